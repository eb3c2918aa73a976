"""A thread that notices when an event loop no longer turns, and names the frame that blocks it.

An asyncio watchdog freezes with its loop; this one does not. It asks the loop for a sign of life;
when none comes within the limit, it reads the stack of the loop's thread from outside. Being the
last to see that something is wrong, it outlives every error of those whom it tells.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from freewheel.last_resort import say

T = TypeVar("T")

_SIGN_INTERVAL_S = 0.8
"""A block is noticed within so long after its limit: 1 s at most. Each sign costs 0.2 ms of CPU."""
_LIBRARY = str(Path(threading.__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A blocked loop: for how long so far, and the stack of its thread, innermost frame last."""

    blocked_s: float
    stack: tuple[traceback.FrameSummary, ...]

    @property
    def frame(self) -> str:
        """The innermost frame outside the standard library, as `function (file:line): code`."""
        own = [frame for frame in self.stack if not frame.filename.startswith(_LIBRARY)]
        frame = (own or list(self.stack))[-1]
        return f"{frame.name} ({frame.filename}:{frame.lineno}): {frame.line}"

    @property
    def call(self) -> str:
        """The innermost frame of all: the call that blocks, where it is Python code."""
        frame = self.stack[-1]
        return f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"

    def sentence(self) -> str:
        """The block in one sentence."""
        return f"the event loop has not turned for {self.blocked_s:.1f} s: {self.frame}"


class LoopWatch:
    """Watches the loop of the thread that makes it. An error of a callback is said on stderr.

    Args:
        limit_s: how long the loop may be without a turn.
        on_block: called in the watch's thread, once when the limit is passed and then every
            `limit_s` while the block lasts; with the block so far.
        on_turn: called in the watch's thread when the loop turns again, with the block's length.
    """

    def __init__(
        self,
        *,
        limit_s: float,
        on_block: Callable[[Block], None],
        on_turn: Callable[[float], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._limit_s = limit_s
        self._on_block = on_block
        self._on_turn = on_turn
        self._closed = threading.Event()
        self._turned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent; does not wait."""
        self._closed.set()

    def _run(self) -> None:
        interval_s = min(_SIGN_INTERVAL_S, self._limit_s / 4)
        while not self._closed.wait(interval_s):
            self._turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._turned.set)
            except RuntimeError:
                return  # the loop is closed
            began_s = time.monotonic()
            if not self._turned.wait(self._limit_s):
                self._watch_block(began_s)

    def _watch_block(self, began_s: float) -> None:
        while not self._closed.is_set():
            frame = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage]  # the only way to see another thread's stack
            if frame is not None:
                stack = tuple(traceback.extract_stack(frame))
                block = Block(blocked_s=time.monotonic() - began_s, stack=stack)
                _tell(self._on_block, block)
            if self._turned.wait(self._limit_s):
                break
        if self._on_turn is not None and self._turned.is_set():
            _tell(self._on_turn, time.monotonic() - began_s)


def _tell(callback: Callable[[T], None], news: T) -> None:
    """Call back. Not even the log of an error may end the watch: no one else would see the next."""
    try:
        callback(news)
    except Exception:  # noqa: BLE001 - a watch that ended with it would let the run hang for ever
        say(f"the watch of the event loop goes on after:\n{traceback.format_exc()}")
