"""Ray's errors become ours, once, where an answer is awaited: on the driver and inside actors."""

import asyncio
import contextlib
import re
from typing import Any, TypeAlias

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    ObjectLostError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskCancelledError,
    TaskUnschedulableError,
)

from freewheel.errors import FreewheelError, LostError, StartupError
from freewheel.types import Ref

Handle: TypeAlias = Any
"""Handle of an actor: Ray knows its methods at run time only."""

Answer: TypeAlias = Any
"""What a remote method returns."""

_ray: Any = ray  # half typed, which a strict checker cannot use
_MAX_CAUSE_CHARS = 700
_PLACEMENT_ERRORS = (ActorUnschedulableError, TaskUnschedulableError, RuntimeEnvSetupError)


async def await_answer(ref: Ref, *, lost: type[LostError], who: str) -> Answer:
    """Await a remote call; cancelling cancels the call in the worker, without waiting for that.

    Args:
        ref: the call's object reference.
        lost: what to raise when the process is gone.
        who: names the process and the call in messages.

    Raises:
        FreewheelError: of the class that the remote side raised; `lost` when its process is gone.
    """
    try:
        return await ref
    except asyncio.CancelledError:
        cancel(ref)
        raise
    except RayError as error:
        raise translate(error, lost=lost, who=who) from error


def cancel(ref: Ref) -> None:
    """Cancel a remote call. Its own remote calls are its business: it hears of the cancellation."""
    # RuntimeError, ValueError: Ray is shut down, so there is nothing left to cancel.
    with contextlib.suppress(RayError, RuntimeError, ValueError):
        _ray.cancel(ref, recursive=False)


def translate(error: RayError, *, lost: type[LostError], who: str) -> FreewheelError:
    """Our error for one of Ray's."""
    if isinstance(error, RayTaskError):
        return _of_task(error, lost=lost, who=who)
    if isinstance(error, _PLACEMENT_ERRORS):
        return StartupError(f"{who}: cannot be placed: {_brief(error)}")
    if isinstance(error, ObjectLostError):
        return LostError(f"{who}: data that another process held is gone: {_brief(error)}")
    return lost(f"{who}: the process is gone: {_brief(error)}")


def _of_task(error: RayTaskError, *, lost: type[LostError], who: str) -> FreewheelError:
    """An error that was raised inside a call."""
    cause: object = error.cause
    if isinstance(cause, FreewheelError):
        return cause
    if isinstance(cause, TaskCancelledError | asyncio.CancelledError):
        return lost(f"{who}: the call was cancelled in the process")
    if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
        return translate(cause, lost=lost, who=who)
    return FreewheelError(f"{who}: {error}")


def _brief(error: RayError) -> str:
    """Ray's explanation in one line: class, then pid, node and cause as far as it knows them."""
    text = re.sub(r"\x1b\[\d+m", "", str(error))
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(class_name|actor_id|namespace): \S+ ", "", text)
    return f"{type(error).__name__}: {text[:_MAX_CAUSE_CHARS]}"
