"""Nodes of trainers: what a trainer published lies on its node, and goes down with it."""

from typing import Any

from freewheel.control.controller import Controller
from freewheel.errors import TrainerLostError, WeightsLostError
from freewheel.simulation.fakes import FakeBackend
from freewheel.types import Weights


class Nodes:
    """For `act`, of one run after the other: every trainer on a node of its own.

    Attributes:
        trainers: all so far, the present one last.
        lost: weights that are nowhere any more.
        written: (step, held versions) of each write that was begun.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.trainers: list[Any] = []
        self.lost: list[Weights] = []
        self.written: list[tuple[int, list[int]]] = []
        self._published: list[Weights] = []

    def __call__(self, controller: Controller, backend: FakeBackend) -> None:
        self._begin()
        make_trainer, make_replica = backend.trainer, backend.replica

        def trainer() -> Any:
            return self._on_a_node(make_trainer())

        def replica(replica_id: int) -> Any:
            fake: Any = make_replica(replica_id)
            update = fake.update_weights

            async def update_weights(weights: Weights) -> None:
                self._check([weights])
                await update(weights)

            fake.update_weights = update_weights
            return fake

        backend.trainer, backend.replica = trainer, replica
        keeper: Any = controller.roles.trainer
        # The first one is made before anyone can look.
        keeper._make = trainer
        keeper._trainer = trainer()

    def lose_weights(self) -> None:
        """Lose all that is published, and no process."""
        self.lost += self._published
        self._published = []

    def lose_node(self) -> None:
        """Lose the present trainer and all that is published."""
        self.lose_weights()
        self.trainers[-1].kill()

    def _check(self, asked: list[Weights]) -> None:
        gone = tuple(w.version for w in asked if any(w is lost for lost in self.lost))
        if gone:
            raise WeightsLostError(f"the node of versions {gone} is lost", gone)

    def _on_a_node(self, fake: Any) -> Any:
        self.trainers.append(fake)
        write = fake.write_state

        async def write_state(step: int, folder: Any, trajectories: Any, held: Any) -> None:
            self.written.append((step, [weights.version for weights in held]))
            if fake.is_dead:
                raise TrainerLostError("the trainer was dead before the call")
            self._check(held)
            await write(step, folder, trajectories, held)

        fake.write_state = write_state
        fake.publish = self._kept(fake.publish)
        fake.publish_restored = self._kept(fake.publish_restored)
        return fake

    def _kept(self, publish: Any) -> Any:
        async def call(version: int) -> Weights:
            weights = await publish(version)
            self._published.append(weights)
            return weights

        return call
