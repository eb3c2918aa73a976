"""The controller: has the roles built, runs their loops in one task group, ends them by one path.

A loop that raises, or returns before the end began, ends the run; the first cause decides the exit
code. The same controller runs over Ray processes and, on a virtual clock, over fakes.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from freewheel.config.sections import Config
from freewheel.control.process_watch import ProcessWatch
from freewheel.control.replica_health import ReplicaHealth
from freewheel.control.roles import Roles
from freewheel.control.run_end import RunEnd, first_leaf, make_run_end, uncounted
from freewheel.control.run_state import ResumePoint, RunState
from freewheel.control.status_report import StatusReport
from freewheel.control.watchdog import Reporter, Watchdog
from freewheel.errors import (
    LoopEndedError,
    NoScoreError,
    RecordError,
)
from freewheel.protocols import Backend, CheckpointStore, Recorder
from freewheel.status import RunStatus

_NUM_COUNTS = 10
"""Tries to count at the end: from another thread, a table may change while it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOnly:
    """Score the trainer's initial weights, under this step and version in the records."""

    step: int
    version: int


class Controller:
    """One run. See the module's docstring.

    Args:
        config: checked configuration.
        backend: makes the worker processes, or fakes; started before `run`.
        recorder: takes the run's records.
        checkpoints: where checkpoints go.
        resume: go on from there; None: from the beginning.
        validate_only: no training, one validation; the run fails if that gives no score.
        reporter: keeps the evidence when the watchdog finds a stall; None: no health loops.
        started_s: run time at which this process takes over (0 for a new run), in seconds.
        on_status: is given the state of the run every `logging.interval_s`; must return at once.
    """

    def __init__(
        self,
        config: Config,
        *,
        backend: Backend,
        recorder: Recorder,
        checkpoints: CheckpointStore,
        resume: ResumePoint | None = None,
        validate_only: ValidateOnly | None = None,
        reporter: Reporter | None = None,
        started_s: float = 0.0,
        on_status: Callable[[RunStatus], None] | None = None,
    ) -> None:
        self.config = config
        self._recorder = recorder
        self._resume = resume
        self._validate_only = validate_only
        self._reporter = reporter
        self._on_status = on_status
        self._started_s = started_s
        self._loop = asyncio.get_running_loop()
        self._loop_began_s = self._loop.time()
        self._ending = False
        self._cause: BaseException | None = None
        self._stop_signal: str | None = None
        self._cut_short = False
        self._stop_requested = asyncio.Event()
        self._train_task: asyncio.Task[None] | None = None
        self.roles = Roles(
            config,
            backend=backend,
            recorder=recorder,
            checkpoints=checkpoints,
            now_s=self.now_s,
            collect=lambda: self.state.collect(),
            is_ending=lambda: self._ending,
        )
        self.state = RunState(config, roles=self.roles, recorder=recorder, now_s=self.now_s)
        self._status_report = StatusReport(
            config,
            ledger=self.roles.ledger,
            restarts=self.roles.restarts,
            rollouter=self.roles.rollouter,
            train=self.roles.train,
            validator=self.roles.validator,
            checkpointer=self.roles.checkpointer,
            waits=self.roles.waits,
        )
        if resume is not None:
            self.state.restore(resume.control)

    # -- running ------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the run's first start."""
        return self._started_s + self._loop.time() - self._loop_began_s

    def end_by(self, error: BaseException | None) -> RunEnd:
        """The end of a run whose loops did not come to theirs; from any thread, and never raises.

        Args:
            error: what ended it, unless a loop had failed before; None: a stop, before the start.
        """
        if self._cause is None and error is not None:
            self._cause = first_leaf(error)
        return self._end()

    def end_at_once(self, reason: str) -> RunEnd:
        """The end of a stopped run that is not waited for; from any thread, and never raises.

        Args:
            reason: why it is not.
        """
        return self._end(cut_short=reason)

    async def run(self) -> RunEnd:
        """Run to the end, whatever the end; only cancellation is raised."""
        try:
            resumed_from = self._resume and str(self._resume.folder)
            self._recorder.event("run_started", resumed_from=resumed_from)
            await self._run_loops()
        except Exception as error:  # noqa: BLE001 - kept as the cause that ends the run
            self._cause = self._cause or first_leaf(error)
        finally:
            self._ending = True
            self.roles.trainer.kill()
        end = self._end()
        # The records may be what failed; the end of the run is told all the same.
        with contextlib.suppress(RecordError):
            self._recorder.event("run_ended", status=end.status, exit_code=end.exit_code)
        return end

    def stop(self, signal_name: str) -> None:
        """Stop admitting, checkpoint, end. Called on SIGINT (`SIGINT`) or SIGTERM (`SIGTERM`)."""
        if self._stop_signal is None:
            self._stop_signal = signal_name
            self.roles.admission.hold(signal_name)
            self.roles.train.stop()
            self._stop_requested.set()
            self.roles.ledger.changed.notify()
            # If records fail, the run stops all the same, and its end tells of them.
            with contextlib.suppress(RecordError):
                self._recorder.event("stop_requested", signal=signal_name)

    async def _run_loops(self) -> None:
        """All loops; that of the checkpoints outlives the others, to write what is already cut."""
        try:
            async with asyncio.TaskGroup() as writing:
                checkpoints = self._guard("checkpoint", self.roles.checkpointer.run())
                write_task = writing.create_task(checkpoints, name="checkpoint")
                await self._run_root()
                can_write = self.roles.checkpointer.overdue is None and not write_task.done()
                if self._cause is not None and can_write:
                    await self._write_cuts_left()
                write_task.cancel()
        except* Exception as errors:  # noqa: BLE001 - kept as the cause that ends the run
            if self._cause is None:
                self._cause = first_leaf(errors)

    async def _run_root(self) -> None:
        try:
            async with asyncio.TaskGroup() as root:
                tasks = self._start_workers(root)
                self._train_task = root.create_task(
                    self._guard("train", self._train(root, tasks)), name="train"
                )
                tasks.append(root.create_task(self._limit_stop(), name="stop-limit"))
                if self._on_status is not None:
                    report = self._guard("report", self._report(self._on_status))
                    tasks.append(root.create_task(report, name="report"))
                await asyncio.wait([self._train_task])
                self._ending = True
                for task in tasks:
                    task.cancel()
        except* Exception as errors:  # noqa: BLE001 - kept as the cause that ends the run
            if self._cause is None:
                self._cause = first_leaf(errors)

    async def _write_cuts_left(self) -> None:
        """After a failure: the state of the cuts is whole, only their writing was under way."""
        limit_s = self.config.health.shutdown_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self.roles.checkpointer.drain()
        except TimeoutError:
            with contextlib.suppress(RecordError):
                self._recorder.event("checkpoint_overdue", limit_s=limit_s)

    def _start_workers(self, root: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        loops: dict[str, Coroutine[Any, Any, None]] = {
            **{replica.name: replica.run() for replica in self.roles.replicas},
            **{
                f"rollout-worker-{i}": self.roles.workers.run_worker(i)
                for i in range(len(self.roles.workers.slots))
            },
            "validate": self.roles.validator.run(),
            **self._health_loops(),
        }
        return [root.create_task(self._guard(n, loop), name=n) for n, loop in loops.items()]

    def _health_loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What watches the others; with a reporter only, as they keep a virtual clock going."""
        action = self.config.health.watchdog
        if self._reporter is None:
            return {}
        processes = ProcessWatch(
            processes=self.roles.processes,
            workers=self.roles.workers,
            trainer=self.roles.trainer,
            health=self.config.health,
            waits=self.roles.waits,
            recorder=self._recorder,
            reporter=self._reporter,
            arrivals=self.roles.restarts.arrivals,
        )
        replicas = ReplicaHealth(
            pool=self.roles.pool,
            health=self.config.health,
            waits=self.roles.waits,
            recorder=self._recorder,
        )
        loops: dict[str, Coroutine[Any, Any, None]] = {
            "replica-health": replicas.run(),
            "process-watch": processes.run(),
        }
        if action == "off":
            return loops
        watch = Watchdog(
            self.roles.stages, action=action, waits=self.roles.waits, reporter=self._reporter
        )
        return {"watch": watch.run(), **loops}

    async def _guard(
        self, name: str, loop: Coroutine[Any, Any, None], *, may_end: bool = False
    ) -> None:
        """Run one loop; record its failure, and remember the first of all loops as the cause."""
        try:
            await loop
            if not (may_end or name == "train" or self._ending):
                self._refuse_end(name)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failure, is_cause = first_leaf(error), self._cause is None
            if is_cause:
                self._cause = failure
            self._recorder.event("loop_failed", loop=name, error=repr(failure), is_cause=is_cause)
            raise

    @staticmethod
    def _refuse_end(name: str) -> None:
        raise LoopEndedError(f"loop {name} ended before the run did")

    async def _train(self, root: asyncio.TaskGroup, tasks: list[asyncio.Task[None]]) -> None:
        await self.roles.trainer.start(self._resume and self._resume.folder)
        if self._validate_only is not None:
            await self._validate(self._validate_only)
            return
        if self._resume is not None:
            await self.state.rejoin(self._resume)
        feed = self.roles.feed.run(self.roles.ledger.next_group_id)
        for name, loop in (("feed", feed), ("rollouter", self.roles.rollouter.run())):
            tasks.append(root.create_task(self._guard(name, loop, may_end=True), name=name))
        await self.roles.train.begin(resumed=self._resume is not None)
        await self.roles.train.run()
        await self.roles.train.finish()
        await self.roles.checkpointer.drain()
        self.roles.trainer.dismiss()
        await self.roles.validator.drain(lambda: self._stop_signal is not None)
        self.roles.ledger.check()

    async def _validate(self, due: ValidateOnly) -> None:
        self.roles.train.state.step = due.step
        await self.roles.train.publish(due.version)
        self.roles.trainer.dismiss()
        self.roles.validator.request(step=due.step, version=due.version)
        await self.roles.validator.drain(lambda: self._stop_signal is not None)
        row = self.roles.validator.last_row
        if self._stop_signal is None and (row is None or row["score"] is None):
            raise NoScoreError(
                "the validation has no score" + ("" if row is None else f": {row['reason']}")
            )

    async def _report(self, on_status: Callable[[RunStatus], None]) -> None:
        """Say how the run stands.

        Consumes: the state of all roles.
        Produces: `RunStatus` every `logging.interval_s`.
        Waits for: its timer.
        Unblocked by: the clock.
        """
        while True:
            on_status(self.status())
            await asyncio.sleep(self.config.logging.interval_s)

    def status(self) -> RunStatus:
        """The state of the run now."""
        if self._ending:
            phase = "ended"
        elif self._stop_signal is not None:
            phase = "stopping"
        else:
            phase = "running" if self.roles.store.latest is not None else "starting"
        loop_s = self._loop.time()
        return self._status_report.build(phase=phase, now_s=self.now_s(), loop_s=loop_s)

    async def _limit_stop(self) -> None:
        """After a stop was asked for, wait for its limit at most."""
        await self._stop_requested.wait()
        limit_s = self.config.health.stop_work_s
        await asyncio.sleep(limit_s)
        self._recorder.event("stop_overdue", limit_s=limit_s, waits=self.roles.waits.describe())
        self._cut_short = True
        if self._train_task is not None:
            self._train_task.cancel()

    # -- the end ------------------------------------------------------------------------------

    def _end(self, cut_short: str = "") -> RunEnd:
        numbers, error = self._count()
        return make_run_end(
            error=self._cause or error,
            stop_signal=self._stop_signal,
            cut_short=cut_short or self._describe_cut_short(),
            numbers=numbers,
        )

    def _count(self) -> tuple[dict[str, Any], Exception | None]:
        """The summary's numbers. If a bug keeps them, the end of the run is told without them."""
        problem: Exception | None = None
        for _ in range(_NUM_COUNTS):
            try:
                return self._numbers(), None
            except Exception as error:  # noqa: BLE001 - becomes the run's end, if there is no other
                problem = error
        train = self.roles.train.state
        return uncounted(steps=train.step, policy_version=train.version), problem

    def _numbers(self) -> dict[str, Any]:
        busy_s, total_s = self.state.busy_and_total_s()
        train = self.roles.train.state
        return {
            "steps": train.step,
            "policy_version": train.version,
            "samples": self.roles.ledger.counts(),
            "failures": self.roles.ledger.failures(),
            "late_results": self.roles.ledger.num_late,
            "wall_s": round(self.now_s(), 3),
            "trainer_wait_s": {k: round(v, 6) for k, v in train.wait_s.items()},
            "rollout_idle_ratio": round(1 - busy_s / total_s, 6) if total_s else 0.0,
            "validations": self.roles.validator.num_recorded,
            "checkpoints": self.roles.checkpointer.saved_steps,
            "restarts": self.roles.restarts.count,
        }

    def _describe_cut_short(self) -> str:
        if not self._cut_short:
            return ""
        saved = max(self.roles.checkpointer.saved_steps, default=None)
        step = self.roles.train.state.step
        health = self.config.health
        return (
            f"what was under way did not end within {health.stop_work_s:g} s "
            f"(health.shutdown_timeout_s={health.shutdown_timeout_s:g}, closing taken off): the "
            f"newest checkpoint is of step {saved}, the run was at step {step}"
        )
