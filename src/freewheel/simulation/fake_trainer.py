"""A fake trainer: its "weights" are a digest of everything it was trained on, in order."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freewheel.errors import CheckpointError, InvariantError, TrainerLostError
from freewheel.protocols import Watched
from freewheel.simulation.world import FakeProcess, FakeTrajectory, FakeWorld
from freewheel.types import Ref, TrainerInfo, TrainRequest, TrainResult, Weights


class FakeTrainer(FakeProcess):
    """Digests what it is trained on; remembers every trained trajectory."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__(world, "trainer", TrainerLostError)
        self.trained: list[tuple[int, int, FakeTrajectory]] = []
        self.digest = "initial"
        self._is_up = False
        self._step = 0
        self._copies: dict[int, dict[str, Any]] = {}
        self._restored: dict[int, Weights] = {}

    @property
    def processes(self) -> Sequence[Watched]:
        """Itself."""
        return (self,)

    async def start(self, checkpoint: Path | None) -> TrainerInfo:
        """Take the start-up time; load a state of the disk."""
        seconds = self._world.jittered(self._world.settings.startup_s, "trainer")
        if not await self._come_up(seconds):
            raise TrainerLostError("the trainer died at start")
        if checkpoint is not None:
            state = self._state(checkpoint)
            self.digest, self._step = state["digest"], state["step"]
            self._restored = {weights.version: weights for weights in state["held"]}
        self._is_up = True
        return TrainerInfo(step=self._step, num_parameters=1, device="virtual")

    async def train_step(self, request: TrainRequest) -> TrainResult:
        """Take the step's time; digest the trajectories."""
        settings = self._world.settings
        seconds = self._world.jittered(settings.train_step_s, "step", request.step)
        await self._work(seconds, f"step {request.step}")
        for payload in request.payloads:
            for trajectory in payload:
                self.trained.append((request.step, request.policy_version, trajectory))
                text = f"{self.digest}{trajectory}".encode()
                self.digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        self._step = request.step
        return TrainResult(step=request.step, metrics={"actor/pg_loss": 0.0}, wall_s=seconds)

    async def publish(self, version: int) -> Weights:
        """Take the copying time."""
        seconds = self._world.jittered(self._world.settings.publish_s, "publish", version)
        await self._work(seconds, f"publication of version {version}")
        return Weights(version=version, num_bytes=1, ref=self.digest)

    async def publish_restored(self, version: int) -> Weights:
        """A version that came with the checkpoint."""
        await self._work(0.0, f"publication of version {version}")
        if version not in self._restored:
            raise CheckpointError(
                f"the checkpoint carries versions {sorted(self._restored)}, not {version}"
            )
        return replace(self._restored[version])  # another copy in memory each time

    async def copy_state(self, step: int) -> None:
        """Take the copying time."""
        await self._world.injector.checkpoint("checkpoint_copy")
        await self._work(self._world.settings.copy_s, f"copy of step {step}")
        self._copies[step] = {"digest": self.digest, "step": self._step}

    async def write_state(
        self, step: int, folder: Path, trajectories: Sequence[Ref], held: Sequence[Weights]
    ) -> None:
        """Take the writing time; the state is there only when it is over."""
        self._check_alive(f"checkpoint of step {step}")
        if step not in self._copies:
            raise InvariantError(f"step {step}: no copy of the trainer's state was taken")
        copy = self._copies.pop(step)
        await self._world.injector.checkpoint("checkpoint_state")
        seconds = self._world.jittered(self._world.settings.write_s, "write", step)
        await self._work(seconds, f"checkpoint of step {step}")
        rows = [trajectory for payload in trajectories for trajectory in payload]
        self._world.disk.states[str(folder)] = {
            **copy,
            "trajectories": rows,
            "held": tuple(held),
        }

    async def _work(self, seconds: float, doing: str) -> None:
        """Take the time of a piece of work.

        Raises:
            TrainerLostError: the trainer is dead, or died meanwhile.
        """
        if not await self._live(seconds):
            raise TrainerLostError(f"the trainer died: {doing}")

    def _check_alive(self, doing: str) -> None:
        if not self._is_up or self.is_dead:
            raise TrainerLostError(f"the trainer {'died' if self._is_up else 'is not up'}: {doing}")

    def load_trajectories(self, folder: Path, group_ids: Sequence[int]) -> list[Ref]:
        """Trajectories of these groups from the disk."""
        self._check_alive("trajectories")
        rows = self._state(folder)["trajectories"]
        return [[row for row in rows if row.group_id == group_id] for group_id in group_ids]

    def _state(self, folder: Path) -> dict[str, Any]:
        return self._world.disk.states[str(folder)]
