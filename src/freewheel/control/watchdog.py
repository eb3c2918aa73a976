"""The progress watchdog: a stage that has work and does not move within its limit is stalled.

It asks whether work remains and whether a counter moved, never whether something is in flight.
Every wait has a deadline of its own; the watchdog is the net below, for what nobody thought of.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from freewheel.control.waits import Wait, WaitTable, find_deadlock
from freewheel.errors import RecordError, StalledError

Action = Literal["end", "report", "recover"]

_LOOKS_PER_LIMIT = 10
_MIN_INTERVAL_S = 0.1
_MAX_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the run.

    Attributes:
        name: as it appears in reports.
        limit_s: how long it may have work without moving.
        setting: the configuration key that `limit_s` comes from.
        has_work: whether anything is left for it to do now.
        progress: any value that changes when it moves.
        recover: what may set it going again; None: nothing, the run must end.
    """

    name: str
    limit_s: float
    setting: str
    has_work: Callable[[], bool]
    progress: Callable[[], object]
    recover: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stage that stopped; `since_s` is how long ago it last moved."""

    stage: str
    since_s: float
    limit_s: float
    setting: str
    waits: tuple[Wait, ...]
    cycle: tuple[Wait, ...]

    def sentence(self) -> str:
        """The stall in one sentence that a person understands."""
        text = (
            f"{self.stage} has work but has not moved for {self.since_s:.0f} s "
            f"(limit {self.limit_s:g} s, {self.setting})"
        )
        if self.cycle:
            chain = " -> ".join([wait.waiter for wait in self.cycle] + [self.cycle[0].waiter])
            return f"{text}; a closed circle of waits: {chain}"
        return text


class Reporter(Protocol):
    """Keeps the evidence of a stall, or of a blocked event loop."""

    async def report(self, stall: Stall) -> None:
        """Write the report. Returns within seconds; raises nothing but RecordError."""
        ...

    async def report_block(self, process: str, cause: str) -> None:
        """Write a report on a worker whose loop is blocked. As `report` in all else."""
        ...


class Watchdog:
    """Loop `watch`. See the module's docstring."""

    def __init__(
        self, stages: Sequence[Stage], *, action: Action, waits: WaitTable, reporter: Reporter
    ) -> None:
        self._stages = stages
        self._action: Action = action
        self._waits = waits
        self._reporter = reporter
        self._moved: dict[str, tuple[object, float]] = {}
        self._recovered: dict[str, object] = {}

    async def run(self) -> None:
        """Look at all stages, again and again.

        Consumes: the stages' counters.
        Produces: reports; the end of a run that stopped.
        Waits for: its timer.
        Unblocked by: the clock.
        """
        shortest_s = min(stage.limit_s for stage in self._stages)
        interval_s = min(max(shortest_s / _LOOKS_PER_LIMIT, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
        while True:
            for stage, since_s in self.look(asyncio.get_running_loop().time()):
                await self._act(stage, since_s)
            await asyncio.sleep(interval_s)

    def look(self, now_s: float) -> list[tuple[Stage, float]]:
        """Stages that are past their limit, with the seconds since they last moved."""
        stalled: list[tuple[Stage, float]] = []
        for stage in self._stages:
            if not stage.has_work():
                self._moved.pop(stage.name, None)
                continue
            progress = stage.progress()
            before, since = self._moved.get(stage.name, (None, now_s))
            if stage.name not in self._moved or progress != before:
                self._moved[stage.name] = (progress, now_s)
            elif now_s - since > stage.limit_s:
                stalled.append((stage, now_s - since))
        return stalled

    async def _act(self, stage: Stage, since_s: float) -> None:
        waits = tuple(self._waits.entries())
        stall = Stall(
            stage=stage.name,
            since_s=since_s,
            limit_s=stage.limit_s,
            setting=stage.setting,
            waits=waits,
            cycle=tuple(find_deadlock(waits)),
        )
        try:
            await self._reporter.report(stall)
        except RecordError as error:
            # Either ends the run: the stall came first.
            raise StalledError(stall.sentence()) from error
        progress = stage.progress()
        can_recover = self._action == "recover" and stage.recover is not None
        if self._action == "report":
            self._moved.pop(stage.name)
        elif can_recover and self._recovered.get(stage.name) != progress:
            # Once for each standstill: if it does not help, the run ends at the next limit.
            self._recovered[stage.name] = progress
            self._moved.pop(stage.name)
            if stage.recover is not None:
                stage.recover()
        else:
            raise StalledError(stall.sentence())
