"""Where user code runs: never on the event loop that serves rollouts.

A `Call` is one piece of user code under way. The serving loop awaits its future; a thread of a
`ThreadPool` (sync code) or the loop of a `LoopThread` (async code) runs it. A call that is given up
is asked to stop and not waited for: it counts as leaked until it really ends. All threads are
daemons, so that leaked ones cannot hold the process open.
"""

import asyncio
import contextlib
import contextvars
import math
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from freewheel.loop_watch import Block, LoopWatch
from freewheel.unicode_text import well_formed

T = TypeVar("T")

_NOTICEABLE_S = 0.1
_OURS = __file__.rpartition("/")[0]


class UserCodeError(Exception):
    """User code raised `error`. Never leaves this package: callers give it a class of failure.

    Of a group of errors, `error` is the first.
    """

    def __init__(self, error: BaseException) -> None:
        # A task group of the user's hides what it is about.
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        super().__init__(describe(error))
        self.error = error


class Call(Generic[T]):
    """One call of user code. Made and awaited on the serving loop, run elsewhere.

    Args:
        name: what runs, for messages and thread dumps.
        on_end: called on the serving loop when the code has really ended.
        sample_id: the rollout that it runs for.
    """

    def __init__(
        self, name: str, on_end: "Callable[[Call[Any]], None]", *, sample_id: str = ""
    ) -> None:
        self.name = name
        self.sample_id = sample_id
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.thread_id: int | None = None
        self.task: asyncio.Task[None] | None = None
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._made_s = self._loop.time()
        self._claimed_s = math.inf
        self._lock = threading.Lock()
        self._claimed = False
        self._given_up = False

    def fail(self, error: Exception) -> None:
        """Let who awaits it go on with an error, whatever the code does. On the serving loop."""
        if not self.future.done():
            self.future.set_exception(error)

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._given_up

    @property
    def waited_s(self) -> float:
        """How long it waited for a runner, up to now if it still does. From any thread."""
        return min(self._claimed_s, self._loop.time()) - self._made_s

    def claim(self) -> bool:
        """Called by the runner before it starts. False: given up meanwhile, do not start."""
        with self._lock:
            self._claimed = not self._given_up
            self._claimed_s = self._loop.time()
        self.thread_id = threading.get_ident()
        return self._claimed

    def give_up(self) -> bool:
        """Stop waiting. Returns whether the code runs on: it had been started."""
        with self._lock:
            self._given_up = True
            return self._claimed

    def end(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Called by the runner, from its thread, when the code has ended."""
        # The loop is gone when the worker was closed before its user code ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        self._on_end(self)
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)  # type: ignore[arg-type]  # None only where T allows it


class ThreadPool:
    """Daemon threads for sync user code, started when all others are busy.

    Args:
        name: of the threads.
        max_threads: most threads that do useful work at once.
        max_leaked: most further threads, each in place of one that does not come back.
    """

    def __init__(self, name: str, *, max_threads: int, max_leaked: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._max_leaked = max_leaked
        self._num_threads = 0
        self._queue: queue.SimpleQueue[tuple[Call[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )

    @property
    def num_threads(self) -> int:
        """Threads started and not asked to end."""
        return self._num_threads

    def submit(
        self, call: Call[T], function: Callable[[], T], *, num_active: int, num_leaked: int
    ) -> None:
        """Run a function in a thread. Called on the serving loop.

        Args:
            call: takes the result.
            function: user code.
            num_active: calls under way in this pool that are waited for, this one included.
            num_leaked: calls under way in this pool that were given up.
        """
        self.grow(num_active=num_active, num_leaked=num_leaked)
        self._queue.put((call, function))

    def grow(self, *, num_active: int, num_leaked: int) -> None:
        """Start a thread if calls may have to wait for one, within the bounds."""
        limit = self._max_threads + min(num_leaked, self._max_leaked)
        if self._num_threads < min(num_active + num_leaked, limit):
            self._start_thread()

    def close(self) -> None:
        """Ask all threads to end. Does not wait."""
        for _ in range(self._num_threads):
            self._queue.put(None)
        self._num_threads = 0

    def _start_thread(self) -> None:
        name = f"{self._name}-{self._num_threads}"
        self._num_threads += 1
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            call, function = item
            if not call.claim():
                call.end()
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  # boundary: user code, sys.exit included
                call.end(error=UserCodeError(error))
            else:
                call.end(result)


_CALL: contextvars.ContextVar[Call[Any]] = contextvars.ContextVar("freewheel_call")
"""The call that a task of user code belongs to; tasks that it starts inherit it."""


class LoopThread:
    """A daemon thread with an event loop for async user code, and a watch over it.

    Args:
        name: of the thread.
        limit_s: how long the loop may be without a turn.
        on_block: see `LoopWatch`; with this object before the block.
        on_turn: see `LoopWatch`; with this object before the length.
    """

    def __init__(
        self,
        name: str,
        *,
        limit_s: float,
        on_block: "Callable[[LoopThread, Block], None]",
        on_turn: "Callable[[LoopThread, float], None]",
    ) -> None:
        self.name = name
        self._limit_s = limit_s
        self._on_block = on_block
        self._on_turn = on_turn
        self._watch: LoopWatch | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: weakref.WeakKeyDictionary[asyncio.Future[Any], Call[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int | None:
        """Identifier of the thread."""
        return self._thread.ident

    def current_call(self) -> Call[Any] | None:
        """The call whose code runs on the loop this moment, as far as known. From any thread."""
        task = asyncio.current_task(self._loop)
        return None if task is None else self._calls.get(task)

    def submit(self, call: Call[T], make: Callable[[], Awaitable[T]]) -> None:
        """Run a coroutine on this loop. Called on the serving loop; `make` runs on this one."""
        self._loop.call_soon_threadsafe(self._begin, call, make)

    def cancel(self, call: Call[Any], on_reached: Callable[[], None]) -> None:
        """Cancel a call; `on_reached` is called from this thread once the loop has turned."""

        def reach() -> None:
            if call.task is not None:
                call.task.cancel()
            on_reached()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(reach)

    def close(self) -> None:
        """Cancel what runs, and end the loop and the thread as soon as user code lets them."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end. Blocks: never on an event loop."""
        self._thread.join(timeout_s)

    def _begin(self, call: Call[T], make: Callable[[], Awaitable[T]]) -> None:
        if not call.claim():
            call.end()
            return
        # The set owns the task; it ends with the call, or is cancelled when the loop ends.
        context = contextvars.copy_context()
        context.run(_CALL.set, call)
        call.task = self._loop.create_task(_run_call(call, make), name=call.name, context=context)
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        context: contextvars.Context | None = None,
        **options: Any,  # a name, from Python 3.13 on
    ) -> asyncio.Future[T]:
        """Task factory of the loop: remembers which call a task belongs to."""
        task = asyncio.Task(coroutine, loop=loop, context=context, **options)
        call = _CALL.get(None) if context is None else context.get(_CALL)
        if call is not None:
            self._calls[task] = call
        return task

    def _begin_watch(self) -> None:
        self._watch = LoopWatch(
            limit_s=self._limit_s,
            on_block=lambda block: self._on_block(self, block),
            on_turn=lambda blocked_s: self._on_turn(self, blocked_s),
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._begin_watch)
        try:
            self._loop.run_forever()
            if self._watch is not None:
                self._watch.close()
            if left := asyncio.all_tasks(self._loop):
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        finally:
            self._loop.close()


async def _run_call(call: Call[T], make: Callable[[], Awaitable[T]]) -> None:
    try:
        result = await make()
    except asyncio.CancelledError as error:
        call.end(error=UserCodeError(error))
        raise
    except BaseException as error:  # noqa: BLE001  # boundary: sys.exit must not end the loop
        call.end(error=UserCodeError(error))
    else:
        call.end(result)


def describe(error: BaseException) -> str:
    """Type, message and place of an error, the place being the innermost frame of user code."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OURS)
    ]
    if not frames:
        return well_formed(text)
    frame = frames[-1]
    return well_formed(f"{text} ({frame.filename}:{frame.lineno} in {frame.name})")


def blocking_frame(thread_id: int | None) -> str:
    """Where a thread is right now: `file:line in function`, or the empty string."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  # documented API
    frame = frames.get(thread_id) if thread_id is not None else None
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def after_waiting(seconds: float) -> str:
    """What a message adds of the time until a thread was free, where that was noticeable."""
    return f" (after {seconds:.1f} s of waiting for a thread)" if seconds >= _NOTICEABLE_S else ""


def notes(error: TimeoutError) -> str:
    """Where user code was at its limit, which the cancellation under the timeout carries along."""
    found: list[str] = getattr(error.__cause__, "__notes__", [])
    return "".join(f", {note}" for note in found)
