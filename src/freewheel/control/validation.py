"""Validation: held-out prompts scored under exactly one policy version, beside everything else.

`Validator` queues what is due and runs one validation at a time; `ValidationRun` (in
`validation_run.py`) is one of them. A request never waits: it is queued, or skipped with its reason
recorded. The version to score is held in the weight store from the request on.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from freewheel.config.sections import Config
from freewheel.control.group_runner import GroupRunner
from freewheel.control.pool import Pool, Role
from freewheel.control.rollouter import Admission
from freewheel.control.validation_run import Placement, ValidationRun
from freewheel.control.waits import Signal, WaitTable
from freewheel.control.weight_store import WeightStore
from freewheel.control.worker_pool import WorkerPool
from freewheel.errors import InvariantError
from freewheel.protocols import Recorder
from freewheel.types import DatasetInfo, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A validation that is due: of which step, of which version, since when (run time).

    `progress` is what a checkpoint says of one that ran when it was taken: `ValidationRun.state()`.
    """

    step: int
    version: int
    requested_s: float
    progress: dict[str, Any] | None = None


class Validator:
    """Loop `validate`. See the module's docstring."""

    def __init__(
        self,
        config: Config,
        *,
        pool: Pool,
        store: WeightStore,
        workers: WorkerPool,
        runner: GroupRunner,
        admission: Admission,
        waits: WaitTable,
        recorder: Recorder,
        now_s: Callable[[], float],
        changed: Signal,
    ) -> None:
        self.current: ValidationRun | None = None
        self.last_row: dict[str, Any] | None = None
        self.num_recorded = 0
        self._config = config
        self._pool = pool
        self._store = store
        self._workers = workers
        self._runner = runner
        self._admission = admission
        self._waits = waits
        self._recorder = recorder
        self._now_s = now_s
        self._changed = changed
        self._queue: deque[Due] = deque()
        self._current_due: Due | None = None
        self._last_requested_s: float | None = None
        self._interval_s: float | None = None
        self._replica_s: float | None = None

    @property
    def running(self) -> bool:
        """True while a validation runs."""
        return self._current_due is not None

    def request(self, *, step: int, version: int) -> None:
        """Queue a validation, or skip it with the reason recorded. Returns at once."""
        now_s = self._now_s()
        if self._last_requested_s is not None:
            self._interval_s = now_s - self._last_requested_s
        self._last_requested_s = now_s
        if self._queue_up(Due(step=step, version=version, requested_s=now_s)):
            self._recorder.event("validation_requested", step=step, version=version)

    def take_up(self, due: Due) -> None:
        """Queue what a checkpoint says was running or queued; its version must be held."""
        if self._queue_up(due):
            self._recorder.event("validation_taken_up", step=due.step, version=due.version)

    def _queue_up(self, due: Due) -> bool:
        """Queue it and hold its version; False: skipped, as no more may wait."""
        room = self._config.validation.max_queued + int(not self.running)
        if len(self._queue) >= room:
            busy = self._current_due or self._queue[0]
            self.skip(
                due,
                f"the validation of step {busy.step} still runs and {len(self._queue)} more wait "
                f"(validation.max_queued={self._config.validation.max_queued})",
            )
            return False
        self._store.hold(due.version)
        self._queue.append(due)
        self._changed.notify()
        return True

    def give_up(self, version: int, reason: str) -> None:
        """End the validation of a version whose weights are nowhere any more, with what it has."""
        if self.current is not None and self.current.version == version:
            self.current.give_up(reason)
        for due in [due for due in self._queue if due.version == version]:
            self._queue.remove(due)
            self._store.release(version)
            self.skip(due, reason)

    def skip(self, due: Due, reason: str) -> None:
        """Record a validation that does not take place."""
        now_s = self._now_s()
        self._record(
            {
                "step": due.step,
                "policy_version": due.version,
                "mode": self._config.validation_mode,
                "status": "skipped",
                "reason": reason,
                "n_total": 0,
                "n_done": 0,
                "n_failed": {},
                "n_timeout": 0,
                "score": None,
                "score_lower": None,
                "score_upper": None,
                "ci95": None,
                "metrics": {},
                "started_s": round(now_s, 6),
                "ended_s": round(now_s, 6),
                "response_versions": {},
            }
        )

    async def run(self) -> None:
        """Run due validations, one at a time.

        Consumes: requests of the train loop.
        Produces: rows of `validations.jsonl`.
        Waits for: a request; the version on the pinned replicas; free slots; its trials.
        Unblocked by: train (request, publication), replicas, rollout workers; its own deadline.
        """
        try:
            while True:
                await self._changed.until(lambda: self._queue or None)
                # Still in the queue meanwhile, so that whatever ends the run leaves its row.
                info = await self._workers.dataset(Split.VALIDATION, "validate")
                if info is None:
                    raise InvariantError("a validation is due but there are no held-out prompts")
                await self._run_next(info)
        finally:
            for due in self._queue:
                self.skip(due, "the run ended before it could start")

    async def _run_next(self, data: DatasetInfo) -> None:
        due = self._current_due = self._queue.popleft()
        try:
            await self._run_one(due, data)
        finally:
            self._store.release(due.version)
            self._current_due = self.current = None
            self._changed.notify()

    async def drain(self, is_stopped: Callable[[], bool]) -> None:
        """Wait until no validation runs or is queued, or the run is stopped."""
        with self._waits.waiting(
            "train", "validations to end", held_by=("validate",), note=self.describe
        ):
            await self._changed.until(
                lambda: True if is_stopped() or not (self.running or self._queue) else None
            )

    async def _run_one(self, due: Due, data: DatasetInfo) -> None:
        run = ValidationRun(
            self._config,
            step=due.step,
            version=due.version,
            data=data,
            placement=self._placement(),
            pool=self._pool,
            runner=self._runner,
            admission=self._admission,
            waits=self._waits,
            recorder=self._recorder,
            now_s=self._now_s,
        )
        if due.progress is not None and not run.restore(due.progress):
            self._recorder.event("validation_restarted", step=due.step, reason="other trials now")
        self.current = run
        try:
            await run.run()
        finally:
            self._record(run.row())
            self._replica_s = run.replica_s
            if run.status == "complete":
                self._recorder.event("validation_done", step=due.step, version=due.version)

    def _placement(self) -> Placement:
        mode = self._config.validation_mode
        shared = self._pool.ids(Role.SHARED)
        if mode == "exclusive":
            return Placement(mode=mode, num_replicas=len(shared))
        if mode == "dedicated":
            return Placement(mode=mode, num_replicas=len(self._pool.ids(Role.DEDICATED)))
        return Placement(mode=mode, num_replicas=self._parallel_share(len(shared)))

    def _parallel_share(self, num_shared: int) -> int:
        """Replicas to pin: so many that this one ends before the next is due."""
        share = self._config.validation.share
        if share is not None:
            return max(1, round(share * num_shared))
        most = max(1, num_shared - 1)
        if self._replica_s is None or not self._interval_s:
            return min(most, -(-num_shared // 2))
        needed = -(-self._replica_s // (0.8 * self._interval_s))
        return int(min(most, max(1, needed)))

    def _record(self, row: dict[str, Any]) -> None:
        self.last_row = row if row["status"] != "skipped" else self.last_row
        self.num_recorded += 1
        self._recorder.validation(row)

    def describe(self) -> str:
        """What the running validation does, in one line."""
        return "none runs" if self.current is None else self.current.describe()

    def state(self) -> list[dict[str, Any]]:
        """Validations that run or wait; a checkpoint keeps them."""
        current = [] if self._current_due is None else [self._current_due]
        if current and self.current is not None:
            current = [replace(current[0], progress=self.current.state())]
        return [
            {
                "step": due.step,
                "version": due.version,
                "requested_s": due.requested_s,
                "progress": due.progress,
            }
            for due in [*current, *self._queue]
        ]
