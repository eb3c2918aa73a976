"""The run's allowance of replacements for lost workers: so many in a window of time.

A long run may lose many workers over its life; what ends it is many in a short time, or a worker
that never came up at all.
"""

import asyncio
from collections import Counter, deque

from freewheel.config.sections import HealthConfig
from freewheel.control.waits import Signal
from freewheel.errors import LostError
from freewheel.protocols import Recorder

MAX_NAMED = 50
"""Losses that the display names."""
MAX_FAILED_FIRST_STARTS = 3
"""A worker that was lost so often and was never up will not come up: the run ends at once."""


class Restarts:
    """Counts replacements of workers; past the limits the run ends.

    `arrivals` is notified when a worker has come up, or has come back.
    """

    def __init__(self, health: HealthConfig, recorder: Recorder) -> None:
        self._limit = health.max_restarts
        self._window_s = health.restart_window_s
        self._recorder = recorder
        self._spent_s: deque[float] = deque()
        self._were_up: set[str] = set()
        self._failed_starts: Counter[str] = Counter()
        self.count = 0
        self.losses: list[str] = []
        self.arrivals = Signal()

    def came_up(self, who: str) -> None:
        """A worker is up: its start can work."""
        self._were_up.add(who)
        self.arrivals.notify()

    def spend(self, who: str, cause: LostError) -> None:
        """Allow one more replacement.

        Raises:
            LostError: the cause, when `health.max_restarts` were spent within
                `health.restart_window_s`, or when this worker was lost
                `MAX_FAILED_FIRST_STARTS` times and was never up.
        """
        self.count += 1
        refusal = self._refusal(who)
        if len(self.losses) < MAX_NAMED:
            self.losses.append(f"{who}{'' if refusal else ', is replaced'}: {cause}")
        self._recorder.event(
            "worker_lost",
            worker=who,
            cause=str(cause),
            restarts=self.count,
            replaced=refusal is None,
        )
        if refusal is not None:
            raise type(cause)(f"{cause} ({refusal})") from cause

    def _refusal(self, who: str) -> str | None:
        """Book a loss; why it is one too many, if it is."""
        now_s = asyncio.get_running_loop().time()
        while self._spent_s and now_s - self._spent_s[0] >= self._window_s:
            self._spent_s.popleft()
        self._spent_s.append(now_s)
        if who not in self._were_up:
            self._failed_starts[who] += 1
            if self._failed_starts[who] >= MAX_FAILED_FIRST_STARTS:
                return f"{who} was lost {MAX_FAILED_FIRST_STARTS} times and was never up"
        if len(self._spent_s) > self._limit:
            return (
                f"replaced {self._limit} workers before within {self._window_s:g} s: "
                "health.max_restarts, health.restart_window_s"
            )
        return None
