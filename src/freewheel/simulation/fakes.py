"""The fake backend: replicas, rollout workers and a trainer on the virtual clock.

The fakes keep the promises of `freewheel.protocols`: tokens carry the version that was active when
they were sampled, a dead process raises the matching error, cancelling a call ends it.
"""

import asyncio

from freewheel.config.sections import Config
from freewheel.protocols import Replica, RolloutWorker, Trainer
from freewheel.simulation.fake_replica import FakeReplica as FakeReplica
from freewheel.simulation.fake_trainer import FakeTrainer as FakeTrainer
from freewheel.simulation.fake_worker import FakeRolloutWorker as FakeRolloutWorker
from freewheel.simulation.settings import Failure, SimSettings
from freewheel.simulation.world import FakeDisk as FakeDisk
from freewheel.simulation.world import FakeProcess, FakeWorld
from freewheel.simulation.world import FakeTrajectory as FakeTrajectory


class FakeBackend:
    """Backend over fakes. Holds all of them, so that tests can look and injure."""

    def __init__(self, config: Config, settings: SimSettings, disk: FakeDisk) -> None:
        self.world = FakeWorld(config, settings, disk)
        self.replicas: dict[int, FakeReplica] = {}
        self.workers: dict[int, FakeRolloutWorker] = {}
        self.fake_trainer: FakeTrainer | None = None
        self._incarnations = 0

    async def start(self) -> None:
        """Nothing to connect to; sets the time of the injected failure."""
        injection = self.world.settings.faults.injection
        if injection is not None:
            asyncio.get_running_loop().call_at(injection.at_s, self._strike, injection.failure)
        await asyncio.sleep(0)

    def replica(self, replica_id: int) -> Replica:
        """A new fake replica."""
        self._incarnations += 1
        self.replicas[replica_id] = FakeReplica(self.world, replica_id, self._incarnations)
        return self.replicas[replica_id]

    def rollout_worker(self, worker_id: int) -> RolloutWorker:
        """A new fake rollout worker."""
        self._incarnations += 1
        self.workers[worker_id] = FakeRolloutWorker(self.world, worker_id, self._incarnations)
        return self.workers[worker_id]

    def trainer(self) -> Trainer:
        """A new fake trainer."""
        self.fake_trainer = FakeTrainer(self.world)
        return self.fake_trainer

    async def aclose(self) -> None:
        """Nothing to close."""

    def _strike(self, failure: Failure) -> None:
        """Let the failure strike a process, if it is one that strikes processes."""
        victim = self._victim(failure)
        if victim is None:
            return
        if failure is not Failure.NEVER_PLACED:
            self.world.injector.num_strikes += 1
        if failure is Failure.ENGINE_NO_TOKENS and isinstance(victim, FakeReplica):
            victim.stick()
        elif failure in (Failure.ENGINE_FROZEN, Failure.TRAINER_FROZEN, Failure.WORKER_FROZEN):
            victim.freeze()
        else:
            victim.kill()

    def _victim(self, failure: Failure) -> FakeProcess | None:
        choose = self.world.injector.rng.choice
        replicas, workers = list(self.replicas.values()), list(self.workers.values())
        match failure:
            case Failure.ENGINE_NO_TOKENS | Failure.ENGINE_FROZEN | Failure.ENGINE_KILLED:
                return choose(replicas)
            case Failure.WORKER_FROZEN | Failure.WORKER_KILLED:
                return choose(workers)
            case Failure.TRAINER_FROZEN | Failure.TRAINER_KILLED:
                return self.fake_trainer
            case Failure.NEVER_PLACED:
                named = {process.name: process for process in [*replicas, *workers]}
                return named.get(self.world.injector.unplaced)
            case _:
                return None
