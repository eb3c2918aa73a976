"""Event loops for async user code, watched: a blocked one gets no new calls, and is given up.

A loop that is blocked cannot say so; its watch does, from a thread. From then on new calls go to
another loop. When the block lasts to its limit, the calls on the loop are ended on the serving
loop: the one that blocks as timed out, the others as victims that may run again elsewhere.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from freewheel.errors import FailureClass, RolloutError
from freewheel.loop_watch import Block
from freewheel.rollout.calls import Call, LoopThread
from freewheel.types import LoopReport

LOOP_ANSWER_S = 1.0
"""A loop that does not take a cancellation within this is blocked; new calls get a new loop."""
_MAX_LOOPS = 8


class LoopBlockedError(RolloutError):
    """A loop of user code was blocked for too long: the calls on it were ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """When a loop of user code counts as blocked, and who is told.

    Attributes:
        blocked_s: `health.loop_blocked_s`.
        end_s: `health.loop_blocked_end_s`.
        report: called in the watches' threads and on the serving loop; returns at once.
    """

    blocked_s: float = 5.0
    end_s: float = 60.0
    report: Callable[[LoopReport], None] = lambda _: None


@dataclass(slots=True)
class _Blocked:
    """A block under way: what the watch said last, whose code it is, when the loop is given up."""

    block: Block
    culprit: Call[Any] | None
    timer: asyncio.TimerHandle


class Loops:
    """The loops of one kind. Used on the serving loop, but for the watches' callbacks.

    Args:
        name: of the threads, which are numbered.
        limits: for each loop.
    """

    def __init__(self, name: str, limits: LoopLimits) -> None:
        self._name = name
        self._limits = limits
        self._serving: asyncio.AbstractEventLoop | None = None
        self._threads: list[LoopThread] = []
        self._calls: dict[Call[Any], LoopThread] = {}
        self._blocked: dict[LoopThread, _Blocked] = {}
        self._avoided: set[LoopThread] = set()

    def place(self, call: Call[Any]) -> LoopThread:
        """The loop for a new call: the newest that turns, or else another one."""
        self._serving = asyncio.get_running_loop()
        good = [thread for thread in self._threads if thread not in self._avoided]
        if not good and len(self._threads) < _MAX_LOOPS:
            good = [self._start()]
        thread = (good or self._threads)[-1]
        self._calls[call] = thread
        return thread

    def ended(self, call: Call[Any]) -> None:
        """Forget a call: nobody waits for it any more."""
        self._calls.pop(call, None)

    def cancel(self, thread: LoopThread, call: Call[Any]) -> None:
        """Cancel a call; if its loop does not take that in time, new calls go elsewhere."""
        serving = asyncio.get_running_loop()
        timer = serving.call_later(LOOP_ANSWER_S, self._avoided.add, thread)

        def turned() -> None:
            timer.cancel()
            if thread not in self._blocked:
                self._avoided.discard(thread)

        def reached() -> None:
            # The serving loop is gone when the worker was closed meanwhile.
            with contextlib.suppress(RuntimeError):
                serving.call_soon_threadsafe(turned)

        thread.cancel(call, reached)

    async def aclose(self) -> None:
        """End the loops; those that user code holds are left behind, as daemons."""
        threads, self._threads = self._threads, []
        for blocked in self._blocked.values():
            blocked.timer.cancel()
        self._blocked.clear()
        for thread in threads:
            thread.close()
        for thread in threads:
            await asyncio.to_thread(thread.join, 2 * LOOP_ANSWER_S)

    def _start(self) -> LoopThread:
        thread = LoopThread(
            f"{self._name}-{len(self._threads)}",
            limit_s=self._limits.blocked_s,
            on_block=self._on_block,
            on_turn=self._on_turn,
        )
        self._threads.append(thread)
        return thread

    def _on_block(self, thread: LoopThread, block: Block) -> None:
        """In the watch's thread: the report goes out even if the serving loop is blocked, too."""
        culprit = thread.current_call()
        self._report(thread, "blocked", block, culprit)
        self._call_serving(self._take_block, thread, block, culprit)

    def _on_turn(self, thread: LoopThread, blocked_s: float) -> None:
        self._limits.report(LoopReport(loop=thread.name, state="turned", blocked_s=blocked_s))
        self._call_serving(self._take_turn, thread)

    def _call_serving(self, function: Callable[..., None], *args: object) -> None:
        # The serving loop is gone when the worker was closed meanwhile.
        with contextlib.suppress(RuntimeError):
            if self._serving is not None:
                self._serving.call_soon_threadsafe(function, *args)

    def _report(
        self, thread: LoopThread, state: Any, block: Block, culprit: Call[Any] | None
    ) -> None:
        who = f"{_name(culprit)} holds {thread.name}: " if culprit else f"{thread.name}: "
        self._limits.report(
            LoopReport(
                loop=thread.name,
                state=state,
                blocked_s=block.blocked_s,
                cause=f"{who}{block.sentence()}",
                call=block.call,
                sample_id=culprit.sample_id if culprit else "",
            )
        )

    def _take_block(self, thread: LoopThread, block: Block, culprit: Call[Any] | None) -> None:
        if thread not in self._threads:
            return
        self._avoided.add(thread)
        known = self._blocked.get(thread)
        if known is None:
            delay_s = max(0.0, self._limits.end_s - block.blocked_s)
            timer = asyncio.get_running_loop().call_later(delay_s, self._give_up, thread)
            self._blocked[thread] = _Blocked(block, culprit, timer)
        else:
            known.block, known.culprit = block, culprit

    def _take_turn(self, thread: LoopThread) -> None:
        blocked = self._blocked.pop(thread, None)
        if blocked is not None:
            blocked.timer.cancel()
            self._avoided.discard(thread)

    def _give_up(self, thread: LoopThread) -> None:
        """End what is on a loop that is blocked for good."""
        blocked = self._blocked[thread]
        calls = [call for call, its in self._calls.items() if its is thread]
        culprit = blocked.culprit
        if culprit is None and len({call.sample_id for call in calls}) == 1:
            culprit = calls[0]  # alone on its loop
        block = Block(blocked_s=self._limits.end_s, stack=blocked.block.stack)
        self._report(thread, "given_up", block, culprit)
        for call in calls:
            call.fail(_error(call, culprit, block))


def _error(call: Call[Any], culprit: Call[Any] | None, block: Block) -> LoopBlockedError:
    held = f"{block.blocked_s:g} s (health.loop_blocked_end_s): {block.frame}, in {block.call}"
    if culprit is not None and call.sample_id == culprit.sample_id:
        message = f"{_name(culprit)} has blocked the event loop that it shares for {held}"
        return LoopBlockedError(FailureClass.TIMEOUT, message)
    holder = "something" if culprit is None else _name(culprit)
    message = f"{_name(call)} was on an event loop that {holder} has blocked for {held}"
    return LoopBlockedError(FailureClass.LOST_WORKER, message)


def _name(call: Call[Any]) -> str:
    return f"rollout {call.sample_id} in {call.name}" if call.sample_id else call.name
