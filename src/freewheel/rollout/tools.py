"""Tools of environments: called off the environment's own loop or thread, each in time."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from freewheel.errors import FailureClass, RolloutError, ToolTimeoutError
from freewheel.rollout.calls import UserCodeError, notes
from freewheel.rollout.usercode import TOOL_LOOP, UserCode, is_async


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool. `timeout_s` None: `rollout.tool_timeout_s`."""

    name: str
    make: Callable[[], Any]
    is_async: bool
    timeout_s: float | None

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        name: str | None,
        timeout_s: float | None,
    ) -> "ToolCall":
        """The call of a function; without a name it has the function's."""
        plain = function
        while isinstance(plain, functools.partial):
            plain = plain.func
        return cls(
            name=name or getattr(plain, "__qualname__", type(plain).__qualname__),
            make=functools.partial(function, *args),
            is_async=is_async(plain),
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool returned, or what it raised."""

    value: Any = None
    error: Exception | None = None

    def unpack(self) -> Any:
        """The value; raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


async def run_tool(
    call: ToolCall, user_code: UserCode, *, default_timeout_s: float, sample_id: str
) -> ToolResult:
    """Run a tool until its limit.

    Args:
        call: what to run.
        user_code: has threads and loops for it.
        default_timeout_s: `rollout.tool_timeout_s`.
        sample_id: the rollout, for messages.

    Returns:
        What the tool returned or raised.

    Raises:
        ToolTimeoutError: it did not return in time.
        RolloutError: it raised what must not be raised on a loop, such as SystemExit.
        LoopBlockedError: the loop that it ran on was blocked for too long.
    """
    limit_s = default_timeout_s if call.timeout_s is None else call.timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return ToolResult(value=await _run(call, user_code, sample_id))
    except TimeoutError as error:
        setting = "rollout.tool_timeout_s=" if call.timeout_s is None else ""
        raise ToolTimeoutError(
            FailureClass.TIMEOUT,
            f"tool {call.name} did not return within {setting}{limit_s:g} s{notes(error)}",
        ) from error
    except UserCodeError as error:
        if not isinstance(error.error, Exception):
            raise RolloutError(
                FailureClass.ENVIRONMENT, f"tool {call.name} raised {error}"
            ) from error.error
        return ToolResult(error=error.error)


async def _run(call: ToolCall, user_code: UserCode, sample_id: str) -> object:
    name = f"tool {call.name}"
    if call.is_async:
        return await user_code.run_async(name, call.make, sample_id=sample_id, kind=TOOL_LOOP)
    value = await user_code.run_sync("tool", name, call.make)
    if inspect.isawaitable(value):
        # Decorators and partial objects hide that a function is async.
        return await user_code.run_async(name, lambda: value, sample_id=sample_id, kind=TOOL_LOOP)
    return value
