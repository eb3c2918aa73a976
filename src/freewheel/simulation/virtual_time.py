"""An asyncio event loop on a virtual clock.

When no callback is ready the clock jumps to the next timer. When there is none either, nothing can
ever happen again: a deadlock, raised with the names of the waiting tasks and what each waits for.
A call that would block the loop's thread is refused at once, with the frame that made it.
"""

import asyncio
import inspect
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

from freewheel.aio import describe_tasks

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")


class DeadlockError(Exception):
    """Nothing is ready and no timer is set, but tasks are waiting."""


class BlockedLoopError(Exception):
    """The loop's own thread was about to wait for another thread, or to sleep."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's docstring. Starts at time 0; does no I/O.

    Attributes:
        on_jump: called whenever the clock is about to jump: nothing more happens at this time.
    """

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self.on_jump: Callable[[], None] | None = None
        super().__init__(_VirtualSelector(self))

    def time(self) -> float:
        """The virtual clock, in seconds."""
        return self._virtual_s

    def advance(self, timeout_s: float | None) -> None:
        """Jump forward; None: there is nothing to jump to."""
        if timeout_s is None:
            raise DeadlockError(
                f"deadlock at {self._virtual_s:.3f} s: nothing is ready and no timer is set\n"
                + describe_tasks(self)
            )
        if timeout_s > 0:
            if self.on_jump is not None:
                self.on_jump()
            self._virtual_s += timeout_s


class _VirtualSelector(selectors.BaseSelector):
    """Takes registrations (the loop's own wake-up pipe) and turns waiting into a time jump."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(
        self, fileobj: "FileDescriptorLike", events: int, data: object = None
    ) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, fd, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: "FileDescriptorLike") -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.advance(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, debug: bool = False) -> T:
    """Run a coroutine to its end on a new virtual clock.

    Args:
        main: makes the coroutine, on the loop.
        debug: asyncio's debug mode.

    Raises:
        DeadlockError: nothing can happen any more.
        BlockedLoopError: a blocking call on the loop's thread.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop, debug=debug) as runner:
        loop = runner.get_loop()
        with _blocking_calls_refused(loop) as refused:
            try:
                return runner.run(main())
            finally:
                # Raised again from here: the code under test may have wrapped or swallowed it.
                if refused:
                    raise refused[0] from None


@contextmanager
def _blocking_calls_refused(
    loop: asyncio.AbstractEventLoop,
) -> Iterator[list[BlockedLoopError]]:
    """Refuse to sleep, or to wait for another thread, on this thread while the loop runs.

    `concurrent.futures.Future.result`, `queue.Queue.get` and `threading.Event.wait` all end in
    `threading.Condition.wait`. Yields the list of what was refused.
    """
    thread = threading.get_ident()
    sleep, wait = time.sleep, threading.Condition.wait  # noqa: TID251 - to guard it
    refused: list[BlockedLoopError] = []

    def refuse(call: str) -> None:
        if threading.get_ident() == thread and loop.is_running():
            error = BlockedLoopError(
                f"{call} blocks the event loop, called from {_caller()}\n" + describe_tasks(loop)
            )
            refused.append(error)
            raise error

    def guarded_sleep(seconds: float) -> None:
        refuse(f"time.sleep({seconds:g})")
        sleep(seconds)

    def guarded_wait(self: threading.Condition, timeout: float | None = None) -> bool:
        frame = inspect.currentframe()
        caller = frame and frame.f_back and frame.f_back.f_back
        if caller is None or caller.f_code is not threading.Thread.start.__code__:
            refuse("a wait for another thread")
        return wait(self, timeout)

    with (
        mock.patch("time.sleep", guarded_sleep),
        mock.patch.object(threading.Condition, "wait", guarded_wait),
    ):
        yield refused


def _caller() -> str:
    """The innermost frames outside the standard library and this module."""
    frame = inspect.currentframe()
    stdlib = str(Path(threading.__file__).parent)
    chain: list[str] = []
    while frame is not None and len(chain) < 3:
        filename = frame.f_code.co_filename
        if filename != __file__ and not filename.startswith(stdlib):
            chain.append(f"{frame.f_code.co_qualname} ({filename}:{frame.f_lineno})")
        frame = frame.f_back
    return " <- ".join(chain)
