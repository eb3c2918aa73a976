"""Runs user code off the serving loop, and keeps count of what does not come back.

Deadlines belong to the caller, on the serving loop: cancelling an await here gives the call up at
once, whatever the user code does about it. The `CancelledError` takes a note along that says where
the user code was; `asyncio.timeout` keeps it as the cause of its `TimeoutError`.
"""

import asyncio
import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from freewheel.data.records import nearest
from freewheel.errors import ConfigError
from freewheel.rollout.calls import Call, ThreadPool, after_waiting, blocking_frame
from freewheel.rollout.loops import LoopBlockedError, LoopLimits, Loops

T = TypeVar("T")

LOOP = "user-code"
"""Kind of the loops of environments and rewards."""
TOOL_LOOP = "tool-loop"
"""Kind of the loops of tools, which are apart: an environment stays able to give its tool up."""


class UserCode:
    """Threads and loops for one worker's user code. Used on the serving loop only.

    Args:
        max_environment_threads: most sync environments at once, and most sync tools.
        max_reward_threads: most sync rewards at once. Rewards and tools have pools of their own:
            environments wait for them, and would wait for ever if they held all threads.
        max_leaked: most further threads of each pool, in place of those that do not come back.
        limits: for the loops.
    """

    def __init__(
        self,
        *,
        max_environment_threads: int,
        max_reward_threads: int,
        max_leaked: int = 64,
        limits: LoopLimits | None = None,
    ) -> None:
        sizes = {
            "environment": max_environment_threads,
            "reward": max_reward_threads,
            "tool": max_environment_threads,
        }
        self._pools = {
            name: ThreadPool(name, max_threads=size, max_leaked=max_leaked)
            for name, size in sizes.items()
        }
        self._loops = {kind: Loops(kind, limits or LoopLimits()) for kind in (LOOP, TOOL_LOOP)}
        kinds = [*self._pools, *self._loops]
        self._active: dict[str, set[Call[Any]]] = {kind: set() for kind in kinds}
        self._leaked: dict[str, set[Call[Any]]] = {kind: set() for kind in kinds}

    @property
    def num_leaked(self) -> int:
        """Calls that were given up and have not ended."""
        return sum(len(calls) for calls in self._leaked.values())

    async def run_sync(self, pool: str, name: str, function: Callable[[], T]) -> T:
        """Run a function in a thread of the pool `environment`, `reward` or `tool`.

        Raises:
            UserCodeError: the function raised.
        """
        call = self._new_call(pool, name)
        self._pools[pool].submit(
            call,
            function,
            num_active=len(self._active[pool]),
            num_leaked=len(self._leaked[pool]),
        )
        try:
            return await call.future
        except asyncio.CancelledError as error:
            if self._give_up(pool, call):
                waited = after_waiting(call.waited_s)
                error.add_note(f"at {blocking_frame(call.thread_id)}{waited}")
                self._pools[pool].grow(
                    num_active=len(self._active[pool]), num_leaked=len(self._leaked[pool])
                )
            else:
                num_threads = self._pools[pool].num_threads
                error.add_note(f"{call.waited_s:.1f} s waiting for one of {num_threads} threads")
            raise

    async def run_async(
        self, name: str, make: Callable[[], Awaitable[T]], *, sample_id: str = "", kind: str = LOOP
    ) -> T:
        """Run a coroutine on a loop of the user code.

        Args:
            name: what runs, for messages.
            make: makes the coroutine; called on that loop.
            sample_id: the rollout that it runs for, which is named when it blocks the loop.
            kind: `LOOP` or `TOOL_LOOP`.

        Raises:
            UserCodeError: the coroutine raised, or was cancelled by itself.
            LoopBlockedError: the loop was blocked for too long, by this call (class `timeout`) or
                by another one (`lost_worker`).
        """
        loops = self._loops[kind]
        call = self._new_call(kind, name, sample_id)
        loop = loops.place(call)
        loop.submit(call, make)
        try:
            return await call.future
        except asyncio.CancelledError as error:
            self._give_up(kind, call)
            loops.cancel(loop, call)
            frame = blocking_frame(loop.thread_id)
            if "selectors.py" not in frame:
                error.add_note(f"its event loop is at {frame}")
            raise
        except LoopBlockedError:
            self._give_up(kind, call)
            loops.cancel(loop, call)
            raise
        finally:
            loops.ended(call)

    async def aclose(self) -> None:
        """End threads and loops; those that user code holds are left behind, as daemons."""
        for pool in self._pools.values():
            pool.close()
        async with asyncio.TaskGroup() as group:
            for kind, loops in self._loops.items():
                group.create_task(loops.aclose(), name=f"close {kind}")

    def _new_call(self, kind: str, name: str, sample_id: str = "") -> Call[Any]:
        call = Call[Any](name, lambda ended: self._ended(kind, ended), sample_id=sample_id)
        self._active[kind].add(call)
        return call

    def _ended(self, kind: str, call: Call[Any]) -> None:
        self._active[kind].discard(call)
        self._leaked[kind].discard(call)

    def _give_up(self, kind: str, call: Call[Any]) -> bool:
        """Returns whether the call runs on."""
        if call not in self._active[kind]:
            return False
        self._active[kind].discard(call)
        if call.give_up():
            self._leaked[kind].add(call)
            return True
        return False


def is_async(function: object) -> bool:
    """Whether calling it gives a coroutine, as far as can be told without calling it."""
    if not callable(function):
        return False
    plain = inspect.unwrap(function)
    # An object with an async __call__; of a class it would be the class's own.
    method = None if inspect.isclass(plain) else inspect.getattr_static(plain, "__call__", None)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(method)


def import_object(spec: str, key: str) -> Any:  # whatever the user's module holds
    """What `module:name` names; the current folder is looked in too.

    Args:
        spec: `module:name`, both may be dotted.
        key: configuration key, for messages.

    Raises:
        ConfigError: names the path, what was found, and the nearest name.
    """
    module_name, separator, name = spec.partition(":")
    if not (separator and module_name and name):
        raise ConfigError(f"{key}={spec!r}: not of the form module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # boundary: importing runs the user's code
        raise ConfigError(
            f"{key}={spec!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            public = [known for known in vars(found) if not known.startswith("_")]
            raise ConfigError(
                f"{key}={spec!r}: {getattr(found, '__file__', found)} has no {part!r}, "
                f"only {', '.join(public) or 'nothing public'}{nearest(part, public)}"
            )
        found = getattr(found, part)
    return found
