"""`health.*`: the limits past which something counts as stopped, and what happens then."""

from dataclasses import dataclass
from typing import Literal

from freewheel.config.scalars import STRICT, Count, CountOrZero, Positive, Seconds

_CLOSING_S = 5.0
"""Of the time that a stop has, what is kept for the summary, the records and the workers' end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """`health.*`: limits past which a stage counts as stopped."""

    __pydantic_config__ = STRICT

    startup_timeout_s: Seconds = 600.0
    """Until a worker is placed and up."""
    train_step_timeout_s: Seconds = 3600.0
    """One trainer step."""
    sync_timeout_s: Seconds = 600.0
    """One publication, and one replica's weight update."""
    checkpoint_timeout_s: Seconds = 1800.0
    """Writing one checkpoint. Past it the run says so and trains on; it ends when the next one is
    due, or its end has come, and the write is still not done."""
    prepare_timeout_s: Seconds = 120.0
    """Rendering and tokenizing one chunk of prompts."""
    watchdog: Literal["end", "report", "recover", "off"] = "end"
    """What happens when a stage has work but does not move within its limit: after a report, end
    the run; only report; or first replace what may hold it up (rollout workers), and end if that
    does not help. With `off` no stage is looked at; the limits of replicas, loops and processes
    hold all the same."""
    stall_timeout_s: Seconds | None = None
    """Nothing at all has moved in the whole run for so long. Unset: the longest that the other
    limits allow between two moves, which it must not be below: a trainer step, a start-up or a
    checkpoint's copy with a publication after it, a rollout, a trial; with 3 `grace_s`."""
    replica_stall_s: Seconds = 60.0
    """A replica that has requests to work on and has produced no token for so long, or that does
    not answer for so long while rollouts hold it or it loads weights, is replaced."""
    loop_blocked_s: Seconds = 5.0
    """An event loop of any process that has not turned for so long is reported, with the frame that
    blocks it; in a rollout worker, new calls of user code go to another loop."""
    loop_blocked_end_s: Seconds = 60.0
    """An event loop has not turned for so long. The control plane's: the run is ended from outside.
    One of user code in a rollout worker: the rollout that blocks it fails with class `timeout`, the
    others on it run again elsewhere, and the worker is replaced when its groups are done, or after
    as long again. The rollout worker's own, or the worker does not answer at all: it is replaced at
    once."""
    grace_s: Seconds = 15.0
    """How long past a deadline a process has to say so itself before it is taken for lost."""
    shutdown_timeout_s: Seconds = 30.0
    """From a stop signal to the end of the process, the last checkpoint included. The last 5 s of
    it (of a short one the half) are for the summary, the records and the workers' end. After a
    failure, the time in which checkpoints that are cut already are written."""
    max_restarts: CountOrZero = 8
    """Replacements of lost replicas, rollout workers and trainers, together, within
    `health.restart_window_s`, before the run ends."""
    restart_window_s: Seconds = 3600.0
    """For so long a replacement counts against `health.max_restarts`: a long run may lose more
    workers than that over its life, but not one after the other."""
    trainer_replay_bytes: Count = 1 << 32
    """Trajectories kept since the newest checkpoint, to bring a lost trainer back to where it was
    (20 bytes a token). When a save interval trains on more, the run goes back to its newest
    checkpoint instead."""
    max_logprob_difference: Positive | None = None
    """Engine and trainer are compared on the tokens that were sampled under the trainer's own
    weights; when their logprobs differ by more than this on average, the run ends. In float32 they
    agree to 1e-5, in bfloat16 to a few hundredths. Unset: only measured (`engine_mismatch/*`)."""
    max_failed_groups_in_a_row: Count = 128
    """So many groups failed one after the other, and none finished: the run ends."""
    max_prompt_failures: Count = 3
    """Failed groups of one prompt, over all epochs, before it is set aside."""

    @property
    def stop_work_s(self) -> float:
        """Of `shutdown_timeout_s`, the time in which work under way may end and be saved."""
        return self.shutdown_timeout_s - min(_CLOSING_S, self.shutdown_timeout_s / 2)
