"""What the end of a run is made of: steps that neither fail nor hang, so that the next one follows.

Whatever cannot be done is said on stderr, and no more: here the run's end is known already.
"""

import contextlib
import sys
from collections.abc import Callable
from concurrent import futures

from freewheel.threads import CallThread

_SAY_LIMIT_S = 0.5
"""Enough for any terminal that is not paused."""


def say(text: str) -> None:
    """Write lines to stderr. Never raises: nobody looks at a terminal that is gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")


def say_within_limit(text: str) -> None:
    """As `say`, for a process that must end: a paused terminal does not hold it."""
    _perform(_SAY_LIMIT_S, say, text)


def attempt(what: str, limit_s: float, call: Callable[..., object], *args: object) -> None:
    """Make a call in a thread of its own, which is left behind if it hangs. Never raises.

    Args:
        what: names the call if it fails.
        limit_s: how long it is waited for, in seconds.
        call: may block.
        *args: for it.
    """
    problem = _perform(limit_s, call, *args)
    if problem is not None:
        say_within_limit(f"{what}: {problem}")


def _perform(limit_s: float, call: Callable[..., object], *args: object) -> str | None:
    """What went wrong; None: nothing."""
    try:
        thread = CallThread("last-resort")
    except RuntimeError as error:  # the process has no thread left
        return str(error)
    answer = thread.submit(call, *args)
    thread.close()
    done, _ = futures.wait([answer], timeout=limit_s)
    if not done:
        return f"not done within {limit_s:g} s"
    error = answer.exception()
    return None if error is None else f"{type(error).__name__}: {error}"
