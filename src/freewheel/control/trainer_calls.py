"""Calls to the trainer as the wait table and messages name them, with their limits."""

from dataclasses import dataclass

from freewheel.config.sections import HealthConfig
from freewheel.errors import CheckpointError, FreewheelError, StalledError


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call. `overdue` ends the run if a replaced trainer, too, is not done at the limit.

    Without it the caller looks after the limit.
    """

    waiter: str
    what: str
    limit_s: float
    overdue: FreewheelError | None = None


def training(step: int, *, waiter: str, health: HealthConfig) -> Call:
    """A training step."""
    limit_s = health.train_step_timeout_s
    text = f"step {step} not done within {limit_s:g} s (health.train_step_timeout_s)"
    return Call(
        waiter=waiter,
        what=f"step {step}",
        limit_s=limit_s,
        overdue=StalledError(f"trainer: {text}"),
    )


def publication(version: int, *, waiter: str, health: HealthConfig) -> Call:
    """The copy of the weights to where replicas fetch them."""
    limit_s = health.sync_timeout_s
    text = f"version {version} not published within {limit_s:g} s (health.sync_timeout_s)"
    return Call(
        waiter=waiter,
        what=f"publication of version {version}",
        limit_s=limit_s,
        overdue=StalledError(f"trainer: {text}"),
    )


def copying(step: int, *, waiter: str, health: HealthConfig) -> Call:
    """The copy in memory of what a checkpoint is to hold."""
    limit_s = health.checkpoint_timeout_s
    text = f"checkpoint of step {step}: not copied within {limit_s:g} s"
    return Call(
        waiter=waiter,
        what="checkpoint copy",
        limit_s=limit_s,
        overdue=CheckpointError(f"{text} (health.checkpoint_timeout_s)"),
    )


def writing(step: int, *, health: HealthConfig) -> Call:
    """The writing of such a copy; it may be overdue and go on."""
    limit_s = health.checkpoint_timeout_s
    return Call(waiter="checkpoint", what=f"write of step {step}", limit_s=limit_s)
