"""The words for a run's state and end, used by every display and by `freewheel status`."""

import math
from collections.abc import Iterator
from typing import Any

from freewheel.status import RunStatus, ScoredValidation

LONG_WAIT_S = 10.0
"""Waits younger than this are the normal course of things."""


def one_line(status: RunStatus) -> str:
    """The whole state on one line."""
    parts = [
        describe_steps(status),
        describe_training(status),
        describe_speed(status),
        describe_rollouts(status),
    ]
    if status.validation is not None:
        parts.append(describe_validation(status))
    waits = describe_waits(status)
    if waits != "none":
        parts.append(waits)
    return f"[{duration(status.wall_s)}] " + " | ".join(parts)


def news(before: RunStatus | None, now: RunStatus) -> Iterator[str]:
    """A line each for what happened since: phase, finished validation, checkpoint."""
    at = f"[{duration(now.wall_s)}] "
    if before is None or before.phase != now.phase:
        yield f"{at}{now.phase}"
    old_validation = before.last_validation if before else None
    if now.last_validation is not None and now.last_validation != old_validation:
        yield f"{at}validation: {describe_score(now.last_validation)}"
    old_checkpoint = before.last_checkpoint if before else None
    if now.last_checkpoint is not None and now.last_checkpoint != old_checkpoint:
        yield f"{at}checkpoint: step {now.last_checkpoint}"
    for text in now.losses[len(before.losses) if before else 0 :]:
        yield f"{at}lost: {text}"
    for text in now.first_failures[len(before.first_failures) if before else 0 :]:
        yield f"{at}the first rollout to fail with class {text}"
    yield from (at + text for text in _dropped_since(before, now))


def _dropped_since(before: RunStatus | None, now: RunStatus) -> Iterator[str]:
    """A line for each prompt that is named; for the rest one each time that they double."""
    named = 0 if before is None else len(before.dropped_prompts)
    for text in now.dropped_prompts[named:]:
        yield f"dropped, as it cannot be used: {text}"
    had = 0 if before is None else before.num_dropped_prompts - named
    rest = now.num_dropped_prompts - len(now.dropped_prompts)
    if rest.bit_length() > had.bit_length():
        yield f"{now.num_dropped_prompts} prompts dropped so far; events.jsonl names them"


def describe_steps(status: RunStatus) -> str:
    """`step 12/100, version 12, 1m 30s left`."""
    total = "" if status.total_steps is None else f"/{status.total_steps}"
    eta = "" if status.eta_s is None else f", {duration(status.eta_s)} left"
    return f"step {status.step}{total}, version {status.policy_version}{eta}"


def describe_rollouts(status: RunStatus) -> str:
    """`14 groups running, 3 ready, slots 17/24`."""
    return (
        f"{status.groups_running} groups running, {status.groups_ready} ready, "
        f"slots {status.slots_used}/{status.slots_max}"
    )


def describe_speed(status: RunStatus) -> str:
    """`95.2 samples/s, 1.2k tokens/s`."""
    return f"{number(status.samples_per_s)} samples/s, {number(status.tokens_per_s)} tokens/s"


def describe_training(status: RunStatus) -> str:
    """`reward 0.532, staleness 0.4 (max 1)`."""
    if status.reward_mean is None:
        return "nothing trained yet"
    text = f"reward {status.reward_mean:.3f}"
    if status.staleness_mean is not None:
        text += f", staleness {status.staleness_mean:.2g} (max {status.staleness_max})"
    return text


def describe_validation(status: RunStatus) -> str:
    """The running validation and the last score."""
    parts: list[str] = []
    running = status.validation
    if running is not None:
        parts.append(
            f"of version {running.version} running, {running.num_done}/{running.num_total} trials"
        )
    if status.last_validation is not None:
        parts.append(f"last {describe_score(status.last_validation)}")
    return "; ".join(parts) or "none yet"


def describe_score(validation: ScoredValidation) -> str:
    """`score 0.812 (95 % 0.750 to 0.870), version 40, step 40`; says what a partial one lacks."""
    ci95 = validation.ci95
    interval = "" if ci95 is None else f" (95 % {ci95[0]:.3f} to {ci95[1]:.3f})"
    score = "no score" if validation.score is None else f"score {validation.score:.3f}{interval}"
    text = f"{score}, version {validation.version}, step {validation.step}"
    if not validation.partial:
        return text
    done = f"{validation.num_done} of {validation.num_total} trials"
    return f"partial: {text}; {done}: {validation.partial}"


def describe_checkpoint(status: RunStatus) -> str:
    """`step 40`."""
    return "none yet" if status.last_checkpoint is None else f"step {status.last_checkpoint}"


def describe_waits(status: RunStatus) -> str:
    """What the trainer waits for, and every wait that lasts long."""
    parts: list[str] = []
    if status.trainer_waits_for is not None:
        parts.append(f"trainer waits for {status.trainer_waits_for}")
    for wait in status.waits:
        lasted_s = status.wall_s - wait.since_s
        if lasted_s >= LONG_WAIT_S:
            holder = f" ({wait.holder})" if wait.holder else ""
            parts.append(f"{wait.waiter} waits for {wait.resource}{holder}, {duration(lasted_s)}")
    return "; ".join(parts) or "none"


def describe_summary(summary: dict[str, Any] | None) -> list[str]:
    """Lines for the end of a run, from the content of `summary.json`."""
    if summary is None:
        return []
    cause = f": {summary['cause']}" if summary.get("cause") else ""
    lines = [f"{summary['status']} (exit code {summary['exit_code']}){cause}"]
    lines.append(
        f"{summary['steps']} steps in {duration(summary['wall_s'])}, "
        f"policy version {summary['policy_version']}"
    )
    samples = ", ".join(f"{count} {fate}" for fate, count in summary["samples"].items())
    lines.append(f"samples: {samples}")
    waits = ", ".join(f"{s:.1f} s for {what}" for what, s in summary["trainer_wait_s"].items())
    lines.append(f"trainer waited: {waits}")
    return lines


def number(value: float) -> str:
    """Three digits that count: `0.12`, `95.2`, `1.23k`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """`4.2s`, `3m 05s`, `2h 03m`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
