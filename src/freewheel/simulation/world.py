"""What all fakes of a run share: settings, disk, random numbers, the injected failure.

`FakeProcess` is the part of a fake that can be killed, freeze, or die by itself.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from freewheel.config.sections import Config
from freewheel.control.rollouter import derive_seed
from freewheel.errors import LostError
from freewheel.simulation.injection import Injector
from freewheel.simulation.settings import SimSettings
from freewheel.types import LoopReport, VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTrajectory:
    """What a finished fake rollout leaves for the trainer."""

    sample_id: str
    group_id: int
    prompt_index: int
    reward: float
    version_spans: VersionSpans


@dataclass(slots=True, kw_only=True)
class FakeDisk:
    """What survives a run: trainer states and trajectories by folder."""

    states: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


class FakeWorld:
    """See the module's docstring."""

    def __init__(self, config: Config, settings: SimSettings, disk: FakeDisk) -> None:
        self.config = config
        self.settings = settings
        self.disk = disk
        self.lengths = settings.lengths.sampler()
        dedicated = config.validation_mode == "dedicated" and bool(config.data.val_files)
        num_replicas = config.rollout.replicas
        num_replicas += config.validation.dedicated_replicas if dedicated else 0
        names = [
            *(f"replica-{i}" for i in range(num_replicas)),
            *(f"rollout-worker-{i}" for i in range(config.rollout.num_workers)),
        ]
        self.injector = Injector(settings.faults.injection, self.rng("injection"), names)

    def rng(self, *parts: int | str) -> random.Random:
        """A generator of random numbers of its own for each use, so that order does not matter."""
        return random.Random(derive_seed(self.settings.seed, *parts))

    def jittered(self, seconds: float, *parts: int | str) -> float:
        """A duration with the settings' relative jitter."""
        spread = self.settings.jitter
        return seconds * self.rng("jitter", *parts).uniform(1 - spread, 1 + spread)


class FakeProcess:
    """Something that can die, or freeze: its calls then raise, or do not return until it is killed.

    Attributes:
        name: as its wait is named in the control plane.
        waiting_for: what a start that is under way waits for.
        is_frozen: it answers nothing any more.
    """

    waiting_for = ""

    def __init__(self, world: FakeWorld, name: str, lost: type[LostError]) -> None:
        self.name = name
        self._lost = lost
        self._reports: list[LoopReport] = []
        self._world = world
        self.is_frozen = False
        self._died = asyncio.Event()
        self._lives_until_s: float | None = None
        # Dictionaries, not sets: their order is the same in every run.
        self._sleepers: dict[asyncio.Future[None], None] = {}
        self._when_dead: dict[Callable[[], object], None] = {}

    @property
    def is_dead(self) -> bool:
        """True once it died."""
        return self._died.is_set()

    def kill(self) -> None:
        """Die now. Idempotent."""
        self._died.set()
        for sleeper in self._sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        for act in self._when_dead:
            act()

    async def watch(self, after: int, wait_s: float) -> list[LoopReport]:
        """What `say_of_loop` was told; looks for it before and after its wait."""
        if len(self._reports) <= after and not await self._live(wait_s):
            raise self._lost(f"{self.name} died")
        if not await self._answer():
            raise self._lost(f"{self.name} died")
        return self._reports[after:]

    def say_of_loop(self, report: LoopReport) -> None:
        """Let the watch report this, under the next number."""
        self._reports.append(replace(report, number=len(self._reports) + 1))

    def freeze(self) -> None:
        """Answer nothing from now on, as a process does that was sent SIGSTOP."""
        self.is_frozen = True

    def _doom(self, rng: random.Random, deaths_per_s: float) -> None:
        if deaths_per_s > 0:
            now_s = asyncio.get_running_loop().time()
            self._lives_until_s = now_s + rng.expovariate(deaths_per_s)

    async def _come_up(self, seconds: float) -> bool:
        """Take the time of a start; False if death came first."""
        if self._world.injector.cannot_place(self.name):
            await self._died.wait()
        return await self._live(seconds)

    async def _live(self, seconds: float) -> bool:
        """Spend time; False if death came first. Frozen, it ends by death alone."""
        loop = asyncio.get_running_loop()
        ends_s, dies = loop.time() + seconds, False
        if self._lives_until_s is not None and ends_s >= self._lives_until_s:
            ends_s, dies = self._lives_until_s, True
        if self._died.is_set():
            return False
        sleeper = loop.create_future()
        timer = loop.call_at(ends_s, self._wake, sleeper)
        self._sleepers[sleeper] = None
        try:
            await sleeper
        finally:
            del self._sleepers[sleeper]
            timer.cancel()
        if dies and not self._died.is_set():
            self.kill()
        return not self._died.is_set()

    def _wake(self, sleeper: "asyncio.Future[None]") -> None:
        if not self.is_frozen and not sleeper.done():
            sleeper.set_result(None)

    async def _answer(self) -> bool:
        """Pass if it answers; else wait for its death. False if it is dead."""
        if self.is_frozen:
            await self._died.wait()
        return not self._died.is_set()
