"""What a worker process says of its event loops, readable while one of them is blocked.

The watches' threads put reports in; a call on another loop of the process takes them out.
"""

import asyncio
import contextlib
import threading
from collections import deque
from dataclasses import replace

from freewheel.loop_watch import Block, LoopWatch
from freewheel.types import LoopReport

_MAX_KEPT = 256
SERVING_LOOP = "serving"


class LoopReports:
    """The newest reports of one process, numbered. Used from any thread and any loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: deque[LoopReport] = deque(maxlen=_MAX_KEPT)
        self._number = 0
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def put(self, report: LoopReport) -> None:
        """Keep a report, under the next number, and wake who waits for it. Never waits."""
        with self._lock:
            self._number += 1
            self._reports.append(replace(report, number=self._number))
            waiters = list(self._waiters)
        for loop, event in waiters:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                loop.call_soon_threadsafe(event.set)

    async def after(self, number: int, *, wait_s: float) -> list[LoopReport]:
        """Reports with a higher number, oldest first; waits at most `wait_s` for the first."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiters.add(waiter)
        try:
            found = self._newer_than(number)
            if not found:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await waiter[1].wait()
                found = self._newer_than(number)
        finally:
            with self._lock:
                self._waiters.discard(waiter)
        return found

    def _newer_than(self, number: int) -> list[LoopReport]:
        with self._lock:
            return [report for report in self._reports if report.number > number]


def watch_serving_loop(reports: LoopReports, *, limit_s: float) -> LoopWatch:
    """Watch the running loop, on which a worker process serves its calls.

    Args:
        reports: take what the watch finds.
        limit_s: how long the loop may be without a turn.
    """

    def on_block(block: Block) -> None:
        reports.put(
            LoopReport(
                loop=SERVING_LOOP,
                state="blocked",
                blocked_s=block.blocked_s,
                cause=block.sentence(),
                call=block.call,
            )
        )

    def on_turn(blocked_s: float) -> None:
        reports.put(LoopReport(loop=SERVING_LOOP, state="turned", blocked_s=blocked_s))

    return LoopWatch(limit_s=limit_s, on_block=on_block, on_turn=on_turn)
