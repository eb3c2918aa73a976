"""The state of a run at one moment, put together from the roles, for progress and `status.json`."""

from collections import deque
from typing import Any

from freewheel.config.sections import Config
from freewheel.control.checkpointing import Checkpointer
from freewheel.control.ledger import Ledger
from freewheel.control.restarts import Restarts
from freewheel.control.rollouter import Rollouter
from freewheel.control.train_loop import TrainLoop
from freewheel.control.validation import Validator
from freewheel.control.waits import WaitTable
from freewheel.status import RunningValidation, RunStatus, ScoredValidation, Wait

_WINDOW_S = 30.0
_MIN_STEPS = 3
"""Ends of steps, from two of which on a speed can be told."""


class StatusReport:
    """Builds `RunStatus`; keeps a short history to tell speeds."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger,
        restarts: Restarts,
        rollouter: Rollouter,
        train: TrainLoop,
        validator: Validator,
        checkpointer: Checkpointer,
        waits: WaitTable,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._restarts = restarts
        self._rollouter = rollouter
        self._train = train
        self._validator = validator
        self._checkpointer = checkpointer
        self._waits = waits
        self._history: deque[tuple[float, int, int]] = deque()
        self._steps: deque[tuple[float, int]] = deque()

    def build(self, *, phase: str, now_s: float, loop_s: float) -> RunStatus:
        """The state now.

        Args:
            phase: `starting`, `running`, `stopping` or `ended`.
            now_s: seconds since the run's first start.
            loop_s: the event loop's time; the wait table's clock.
        """
        state, metrics = self._train.state, self._train.last_metrics
        samples_per_s, tokens_per_s = self._speeds(now_s)
        total = self._config.trainer.total_training_steps
        left = None if total is None else total - state.step
        waits = [
            Wait(
                waiter=wait.waiter,
                resource=wait.resource,
                holder=", ".join(wait.held_by[:4]) or wait.note,
                since_s=round(now_s - (loop_s - wait.since_s), 3),
            )
            for wait in self._waits.entries()
        ]
        train_waits = [wait.resource for wait in waits if wait.waiter == "train"]
        return RunStatus(
            phase=phase,
            step=state.step,
            total_steps=total,
            policy_version=state.version,
            groups_running=self._rollouter.num_running,
            groups_ready=self._ledger.num_ready,
            slots_used=len(self._ledger.open),
            slots_max=self._config.max_slots,
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            reward_mean=metrics.get("critic/rewards/mean"),
            staleness_mean=metrics.get("fully_async/staleness/mean"),
            staleness_max=_as_int(metrics.get("fully_async/staleness/max")),
            validation=self._running_validation(),
            last_validation=_scored(self._validator.last_row),
            last_checkpoint=max(self._checkpointer.saved_steps, default=None),
            num_dropped_prompts=self._ledger.num_dropped,
            dropped_prompts=tuple(self._ledger.dropped),
            first_failures=tuple(f"{k}: {v}" for k, v in self._ledger.first_failures.items()),
            losses=tuple(self._restarts.losses),
            trainer_waits_for=train_waits[0] if train_waits else None,
            waits=tuple(waits),
            wall_s=now_s,
            eta_s=self._left_s(now_s, state.step, left),
        )

    def _left_s(self, now_s: float, step: int, left: int | None) -> float | None:
        """Seconds to the end, from the steps alone: what came before the first says nothing."""
        if step > 0 and (not self._steps or self._steps[-1][1] != step):
            self._steps.append((now_s, step))
        while len(self._steps) > _MIN_STEPS and self._steps[0][0] < now_s - _WINDOW_S:
            self._steps.popleft()
        if left is None or len(self._steps) < _MIN_STEPS:
            return None
        (began_s, first), (ended_s, last) = self._steps[0], self._steps[-1]
        return left * (ended_s - began_s) / (last - first)

    def _speeds(self, now_s: float) -> tuple[float, float]:
        """Samples and tokens a second over the last half minute."""
        sample = (
            now_s,
            self._rollouter.num_finished_samples,
            self._rollouter.num_finished_tokens,
        )
        self._history.append(sample)
        while self._history[0][0] < now_s - _WINDOW_S:
            self._history.popleft()
        first = self._history[0]
        elapsed_s = now_s - first[0]
        if elapsed_s <= 0:
            return 0.0, 0.0
        return (sample[1] - first[1]) / elapsed_s, (sample[2] - first[2]) / elapsed_s

    def _running_validation(self) -> RunningValidation | None:
        run = self._validator.current
        if run is None:
            return None
        return RunningValidation(
            step=run.step, version=run.version, num_done=run.num_done, num_total=run.num_total
        )


def _scored(row: dict[str, Any] | None) -> ScoredValidation | None:
    if row is None:
        return None
    return ScoredValidation(
        step=row["step"],
        version=row["policy_version"],
        score=row["score"],
        ci95=None if row["ci95"] is None else tuple(row["ci95"]),
        num_done=row["n_done"],
        num_total=row["n_total"],
        partial=row["reason"],
    )


def _as_int(value: float | None) -> int | None:
    return None if value is None else int(value)
