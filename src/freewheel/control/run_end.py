"""How a run ended: status, exit code, cause, and the numbers for `summary.json`."""

from dataclasses import dataclass, replace
from typing import Any

from freewheel.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, FreewheelError

STOP_EXIT_CODES = {"SIGINT": EXIT_INTERRUPTED, "SIGTERM": EXIT_TERMINATED}

_SAMPLES = ("issued", "trained", "filtered", "failed", "set_aside", "open")
_WAITS = ("samples", "validation", "checkpoint", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. `summary` is the content of `summary.json`.

    `stop_signal` was taken, whatever the end.
    """

    status: str
    exit_code: int
    cause: str
    summary: dict[str, Any]
    error: BaseException | None
    stop_signal: str | None = None


def make_run_end(
    *,
    error: BaseException | None,
    stop_signal: str | None,
    cut_short: str,
    numbers: dict[str, Any],
) -> RunEnd:
    """Decide how the run ended: by an error, by a stop, or by itself.

    Args:
        error: the first cause, if a loop failed.
        stop_signal: `SIGINT` or `SIGTERM`, if one was taken.
        cut_short: what a stop did not wait for; empty if nothing.
        numbers: the rest of the summary.
    """
    if error is not None:
        status, cause, exit_code = "failed", f"{type(error).__name__}: {error}", exit_code_of(error)
    elif stop_signal is not None:
        status, exit_code = "stopped", STOP_EXIT_CODES[stop_signal]
        cause = f"{stop_signal}; {cut_short}" if cut_short else stop_signal
    else:
        status, cause, exit_code = "completed", "", 0
    summary = {"status": status, "exit_code": exit_code, "cause": cause, **numbers}
    return RunEnd(
        status=status,
        exit_code=exit_code,
        cause=cause,
        summary=summary,
        error=error,
        stop_signal=stop_signal,
    )


def uncounted(*, steps: int = 0, policy_version: int = 0) -> dict[str, Any]:
    """Numbers for the summary of a run whose own cannot be had: nothing, but for what is given."""
    return {
        "steps": steps,
        "policy_version": policy_version,
        "samples": dict.fromkeys(_SAMPLES, 0),
        "failures": {},
        "late_results": 0,
        "wall_s": 0.0,
        "trainer_wait_s": dict.fromkeys(_WAITS, 0.0),
        "rollout_idle_ratio": 0.0,
        "validations": 0,
        "checkpoints": [],
        "restarts": 0,
    }


def with_error(end: RunEnd, error: BaseException) -> RunEnd:
    """The same end, but that it failed, if it did not before."""
    if end.error is not None:
        return end
    cause, code = f"{type(error).__name__}: {error}", exit_code_of(error)
    summary = {**end.summary, "status": "failed", "exit_code": code, "cause": cause}
    return replace(end, status="failed", exit_code=code, cause=cause, summary=summary, error=error)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a run that this error ended."""
    return error.exit_code if isinstance(error, FreewheelError) else 1


def first_leaf(error: BaseException) -> BaseException:
    """The first error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
