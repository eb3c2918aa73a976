"""A fake replica: tokens carry the version that was active when they were sampled."""

import asyncio
from dataclasses import dataclass

from freewheel.errors import InvariantError, ReplicaLostError
from freewheel.simulation.world import FakeProcess, FakeWorld
from freewheel.types import ReplicaStats, VersionSpans, Weights


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Left:
    """A request that goes on though its rollout worker is gone."""

    began_s: float
    num_tokens: int


class FakeReplica(FakeProcess):
    """An engine that samples at a fixed rate a request, under whatever version is active.

    Stuck, it samples nothing any more, but answers and takes weights.
    """

    def __init__(self, world: FakeWorld, replica_id: int, incarnation: int) -> None:
        super().__init__(world, f"replica-{replica_id}", ReplicaLostError)
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._history: list[tuple[float, int]] = []
        self._num_tokens = 0
        self._num_running = 0
        self._began_s: list[float] = []
        self._left: dict[str, list[_Left]] = {}
        self.num_updates = 0
        self._stuck_s: float | None = None

    @property
    def replica_id(self) -> int:
        """Number of the replica."""
        return self._replica_id

    @property
    def version(self) -> int:
        """Active version, -1 before the first."""
        return self._history[-1][1] if self._history else -1

    @property
    def is_sampling(self) -> bool:
        """True while it has requests to work on."""
        return self._num_running > 0 and not self.is_dead

    @property
    def num_left(self) -> int:
        """Requests that it works on for rollout workers that are gone."""
        return sum(map(len, self._left.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens sampled until now."""
        return self._num_tokens + sum(self._sampled_since(began_s) for began_s in self._began_s)

    def stick(self) -> None:
        """Sample nothing from now on."""
        self._stuck_s = asyncio.get_running_loop().time()

    def freeze(self) -> None:
        """Answer nothing and sample nothing from now on."""
        super().freeze()
        self.stick()

    def _sampled_since(self, began_s: float) -> int:
        now_s = asyncio.get_running_loop().time()
        until_s = now_s if self._stuck_s is None else min(now_s, self._stuck_s)
        return max(0, int((until_s - began_s) * self._world.settings.tokens_per_s))

    async def start(self) -> None:
        """Take the start-up time."""
        settings = self._world.settings
        rng = self._world.rng("replica", self._incarnation)
        self._doom(rng, settings.faults.replica_deaths_per_s)
        seconds = self._world.jittered(settings.startup_s, "replica", self._incarnation)
        if not await self._come_up(seconds):
            raise ReplicaLostError(f"replica {self._replica_id} died at start")

    async def update_weights(self, weights: Weights) -> None:
        """Take the loading time, then activate."""
        settings = self._world.settings
        key = ("update", self._incarnation, self.num_updates)
        self.num_updates += 1
        if self._world.rng(*key).random() < settings.faults.update_death:
            self.kill()
        if self._world.injector.strikes("weight_fetch"):
            await self._died.wait()
        if not await self._live(self._world.jittered(settings.update_s, *key)):
            raise ReplicaLostError(
                f"replica {self._replica_id} died while it loaded version {weights.version}"
            )
        self._activate(weights.version)

    def _activate(self, version: int) -> None:
        """Note the moment; forget versions that ended before anything that still runs began."""
        now_s = asyncio.get_running_loop().time()
        self._history.append((now_s, version))
        oldest_s = min(self._began_s, default=now_s)
        while len(self._history) > 1 and self._history[1][0] <= oldest_s:
            del self._history[0]

    async def generate(self, num_tokens: int) -> VersionSpans:
        """Sample so many tokens; their versions, by the moments of activation."""
        if not self._history:
            raise InvariantError(f"replica {self._replica_id} has no weights to serve")
        rate = self._world.settings.tokens_per_s
        began_s = self._begin()
        try:
            alive = await self._live(num_tokens / rate)
            if self._stuck_s is not None:
                alive = not await self._died.wait()
        finally:
            self._end(began_s, num_tokens)
        if not alive:
            raise ReplicaLostError(f"replica {self._replica_id} died")
        return self._spans(began_s, num_tokens, rate)

    def leave(self, request_id: str, num_tokens: int) -> None:
        """Sample on, so many tokens, for a request whose rollout worker died."""
        left = _Left(began_s=self._begin(), num_tokens=num_tokens)
        self._left.setdefault(request_id, []).append(left)
        seconds = num_tokens / self._world.settings.tokens_per_s
        asyncio.get_running_loop().call_later(seconds, self._finish, request_id, left)

    async def abort(self, request_id: str) -> None:
        """End what was left of a group's request, if it answers."""
        if not await self._answer():
            raise ReplicaLostError(f"replica {self._replica_id} is dead")
        for left in self._left.pop(request_id, []):
            self._end(left.began_s, left.num_tokens)

    def _finish(self, request_id: str, left: "_Left") -> None:
        if self._stuck_s is None and left in self._left.get(request_id, []):
            self._left[request_id].remove(left)
            self._end(left.began_s, left.num_tokens)

    def _begin(self) -> float:
        began_s = asyncio.get_running_loop().time()
        self._num_running += 1
        self._began_s.append(began_s)
        return began_s

    def _end(self, began_s: float, num_tokens: int) -> None:
        self._num_running -= 1
        self._began_s.remove(began_s)
        self._num_tokens += min(num_tokens, self._sampled_since(began_s))

    def _spans(self, began_s: float, num_tokens: int, rate: float) -> VersionSpans:
        spans: list[tuple[int, int]] = []
        num_before = 0
        for index, (_, version) in enumerate(self._history):
            is_last = index + 1 == len(self._history)
            ends_s = float("inf") if is_last else self._history[index + 1][0]
            if ends_s <= began_s:
                continue
            until = num_tokens if is_last else min(num_tokens, int((ends_s - began_s) * rate))
            if until > num_before:
                spans.append((version, until - num_before))
                num_before = until
        return tuple(spans)

    async def stats(self) -> ReplicaStats:
        """Counters, if it answers."""
        if not await self._answer():
            raise ReplicaLostError(f"replica {self._replica_id} is dead")
        return ReplicaStats(
            version=self.version,
            num_running=self._num_running,
            num_waiting=0,
            num_generated_tokens=self.num_tokens,
        )
