"""The controller: builds the roles, runs their loops in one task group, ends them by one path.

A loop that raises, or returns before the end began, ends the run; the first cause decides the exit
code. The same controller runs over Ray processes and, on a virtual clock, over fakes.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freewheel.checkpoint import CONTROL_FORMAT
from freewheel.config.sections import Config
from freewheel.control.checkpointing import Checkpointer, CutState
from freewheel.control.feed import Feed
from freewheel.control.group_runner import GroupRunner
from freewheel.control.ledger import Ledger
from freewheel.control.pool import Pool
from freewheel.control.process_watch import ProcessWatch
from freewheel.control.replica_health import ReplicaHealth
from freewheel.control.replica_loop import ReplicaLoop
from freewheel.control.restarts import Restarts
from freewheel.control.rollouter import Admission, Rollouter
from freewheel.control.run_end import RunEnd, first_leaf, make_run_end
from freewheel.control.stages import make_stages
from freewheel.control.staleness import StalenessBound
from freewheel.control.status_report import StatusReport
from freewheel.control.train_loop import TrainLoop, TrainState
from freewheel.control.trainer_keeper import TrainerKeeper
from freewheel.control.validation import Due, Validator
from freewheel.control.waits import Signal, WaitTable
from freewheel.control.watchdog import Reporter, Watchdog
from freewheel.control.weight_store import WeightStore
from freewheel.control.worker_pool import WorkerPool
from freewheel.errors import (
    CheckpointError,
    LoopEndedError,
    NoScoreError,
    RecordError,
)
from freewheel.protocols import Backend, CheckpointStore, Recorder, Watched
from freewheel.status import RunStatus
from freewheel.types import Split, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint to go on from: its folder and its control state."""

    folder: Path
    control: dict[str, Any]


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
        reporter: keeps the evidence when the watchdog finds a stall; None: no watchdog.
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
        self.waits = WaitTable()
        self._backend = backend
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
        self._carried_busy = (0.0, 0.0)
        self._build(checkpoints)
        if resume is not None:
            self._restore(resume.control)

    # -- building -----------------------------------------------------------------------------

    def _build(self, checkpoints: CheckpointStore) -> None:
        config, waits, recorder, backend = self.config, self.waits, self._recorder, self._backend
        changed, health = Signal(), self.config.health
        self.store = WeightStore()
        self.restarts = Restarts(health, recorder)
        self.staleness = StalenessBound(
            max_open=config.max_slots,
            max_staleness=config.async_training.staleness_bound,
        )
        self.ledger = Ledger(
            group_size=config.rollout.n,
            max_prompt_failures=health.max_prompt_failures,
            recorder=recorder,
            now_s=self.now_s,
            changed=changed,
        )
        dedicated = config.validation_mode == "dedicated" and bool(config.data.val_files)
        self.pool = Pool(
            num_shared=config.rollout.replicas,
            num_dedicated=config.validation.dedicated_replicas if dedicated else 0,
            capacity=config.async_training.concurrent_samples_per_replica,
            partial_rollout=config.async_training.partial_rollout,
            changed=changed,
            now_s=self.now_s,
        )
        self.workers = WorkerPool(
            config.rollout.num_workers,
            backend=backend,
            restarts=self.restarts,
            health=health,
            waits=waits,
            recorder=recorder,
            changed=changed,
        )
        self.trainer = TrainerKeeper(
            backend.trainer,
            health=health,
            restarts=self.restarts,
            waits=waits,
            recorder=recorder,
            on_republished=self.store.renew,
        )
        self.replicas = [
            ReplicaLoop(
                replica_id,
                backend=backend,
                pool=self.pool,
                store=self.store,
                trainer=self.trainer,
                restarts=self.restarts,
                health=health,
                waits=waits,
                recorder=recorder,
                give_up=lambda version, reason: self.validator.give_up(version, reason),
            )
            for replica_id in self.pool.slots
        ]
        runner = GroupRunner(
            pool=self.pool,
            workers=self.workers,
            health=health,
            waits=waits,
            recorder=recorder,
            on_late=self.ledger.ignore_late,
        )
        self.feed = Feed(config, workers=self.workers, waits=waits)
        self.admission = Admission(
            config, ledger=self.ledger, pool=self.pool, staleness=self.staleness, changed=changed
        )
        self.rollouter = Rollouter(
            config,
            feed=self.feed,
            admission=self.admission,
            ledger=self.ledger,
            pool=self.pool,
            runner=runner,
            waits=waits,
        )
        self.validator = Validator(
            config,
            pool=self.pool,
            store=self.store,
            workers=self.workers,
            runner=runner,
            admission=self.admission,
            waits=waits,
            recorder=recorder,
            now_s=self.now_s,
            changed=changed,
        )
        self.checkpointer = Checkpointer(
            config,
            trainer=self.trainer,
            store=checkpoints,
            collect=self._collect_cut,
            waits=waits,
            recorder=recorder,
        )
        self.train = TrainLoop(
            config,
            trainer=self.trainer,
            ledger=self.ledger,
            pool=self.pool,
            store=self.store,
            staleness=self.staleness,
            admission=self.admission,
            rollouter=self.rollouter,
            cuts=self.checkpointer,
            validations=self.validator,
            waits=waits,
            recorder=recorder,
            run_time_s=self.now_s,
        )

        self._stages = make_stages(
            config,
            ledger=self.ledger,
            pool=self.pool,
            store=self.store,
            workers=self.workers,
            restarts=self.restarts,
            train=self.train,
            trainer=self.trainer,
            validator=self.validator,
            checkpointer=self.checkpointer,
            is_ending=lambda: self._ending,
        )
        self._status_report = StatusReport(
            config,
            ledger=self.ledger,
            rollouter=self.rollouter,
            train=self.train,
            validator=self.validator,
            checkpointer=self.checkpointer,
            waits=waits,
        )

    # -- running ------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the run's first start."""
        return self._started_s + self._loop.time() - self._loop_began_s

    def end_before_start(self, error: Exception | None) -> RunEnd:
        """The end of a run whose loops never ran: by an error, or by a stop."""
        self._cause = None if error is None else first_leaf(error)
        return self._end()

    def end_at_once(self, reason: str) -> RunEnd:
        """The end of a stopped run that is not waited for; from any thread.

        Args:
            reason: why it is not.
        """
        return self._end(cut_short=reason)

    async def run(self) -> RunEnd:
        """Run to the end, whatever the end."""
        self._recorder.event("run_started", resumed_from=self._resume and str(self._resume.folder))
        try:
            await self._run_loops()
        finally:
            self._ending = True
            self.trainer.kill()
        end = self._end()
        # The records may be what failed; the end of the run is told all the same.
        with contextlib.suppress(RecordError):
            self._recorder.event("run_ended", status=end.status, exit_code=end.exit_code)
        return end

    def stop(self, signal_name: str) -> None:
        """Stop admitting, checkpoint, end. Called on SIGINT (`SIGINT`) or SIGTERM (`SIGTERM`)."""
        if self._stop_signal is None:
            self._stop_signal = signal_name
            self.admission.hold(signal_name)
            self.train.stop()
            self._stop_requested.set()
            self.ledger.changed.notify()
            # Last: if records fail, the run stops all the same.
            self._recorder.event("stop_requested", signal=signal_name)

    async def _run_loops(self) -> None:
        """All loops; that of the checkpoints outlives the others, to write what is already cut."""
        try:
            async with asyncio.TaskGroup() as writing:
                checkpoints = self._guard("checkpoint", self.checkpointer.run())
                write_task = writing.create_task(checkpoints, name="checkpoint")
                await self._run_root()
                if self._cause is not None and not write_task.done():
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
                await self.checkpointer.drain()
        except TimeoutError:
            with contextlib.suppress(RecordError):
                self._recorder.event("checkpoint_overdue", limit_s=limit_s)

    def _start_workers(self, root: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        loops: dict[str, Coroutine[Any, Any, None]] = {
            **{replica.name: replica.run() for replica in self.replicas},
            **{
                f"rollout-worker-{i}": self.workers.run_worker(i)
                for i in range(len(self.workers.slots))
            },
            "validate": self.validator.run(),
            **self._health_loops(),
        }
        return [root.create_task(self._guard(n, loop), name=n) for n, loop in loops.items()]

    def _health_loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What watches the others; with a reporter only, as they keep a virtual clock going."""
        action = self.config.health.watchdog
        if self._reporter is None:
            return {}
        processes = ProcessWatch(
            processes=self._processes,
            workers=self.workers,
            health=self.config.health,
            waits=self.waits,
            recorder=self._recorder,
            reporter=self._reporter,
            arrivals=self.restarts.arrivals,
        )
        if action == "off":
            return {"process-watch": processes.run()}
        watch = Watchdog(self._stages, action=action, waits=self.waits, reporter=self._reporter)
        replicas = ReplicaHealth(
            pool=self.pool,
            health=self.config.health,
            waits=self.waits,
            recorder=self._recorder,
        )
        return {
            "watch": watch.run(),
            "replica-health": replicas.run(),
            "process-watch": processes.run(),
        }

    def _processes(self) -> dict[str, Watched]:
        """The worker processes that are up, by name."""
        # It has moved when it is up.
        ranks = self.trainer.processes if self.trainer.num_moves else ()
        workers = {f"rollout-worker-{s.worker_id}": s.worker for s in self.workers.slots}
        replicas = {f"replica-{s.replica_id}": s.replica for s in self.pool.slots.values()}
        up = {name: process for name, process in {**workers, **replicas}.items() if process}
        return {**up, **{f"trainer-{rank}": process for rank, process in enumerate(ranks)}}

    async def _guard(
        self, name: str, loop: Coroutine[Any, Any, None], *, may_end: bool = False
    ) -> None:
        """Run one loop; remember the first failure of all loops, with the loop's name."""
        try:
            await loop
            if not (may_end or name == "train" or self._ending):
                self._refuse_end(name)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._cause is None:
                self._cause = first_leaf(error)
                self._recorder.event("loop_failed", loop=name, error=repr(self._cause))
            raise

    @staticmethod
    def _refuse_end(name: str) -> None:
        raise LoopEndedError(f"loop {name} ended before the run did")

    async def _train(self, root: asyncio.TaskGroup, tasks: list[asyncio.Task[None]]) -> None:
        await self.trainer.start(self._resume and self._resume.folder)
        if self._validate_only is not None:
            await self._validate(self._validate_only)
            return
        if self._resume is not None:
            await self._rejoin(self._resume)
        feed = self.feed.run(self.ledger.next_group_id)
        for name, loop in (("feed", feed), ("rollouter", self.rollouter.run())):
            tasks.append(root.create_task(self._guard(name, loop, may_end=True), name=name))
        await self.train.begin(resumed=self._resume is not None)
        await self.train.run()
        await self.train.finish()
        await self.checkpointer.drain()
        await self.validator.drain(lambda: self._stop_signal is not None)
        self.ledger.check()

    async def _validate(self, due: ValidateOnly) -> None:
        self.train.state.step = due.step
        await self.train.publish(due.version)
        self.validator.request(step=due.step, version=due.version)
        await self.validator.drain(lambda: self._stop_signal is not None)
        row = self.validator.last_row
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
            phase = "running" if self.store.latest is not None else "starting"
        loop_s = self._loop.time()
        return self._status_report.build(phase=phase, now_s=self.now_s(), loop_s=loop_s)

    async def _limit_stop(self) -> None:
        """After a stop was asked for, wait for its limit at most."""
        await self._stop_requested.wait()
        limit_s = self.config.health.stop_work_s
        await asyncio.sleep(limit_s)
        self._recorder.event("stop_overdue", limit_s=limit_s, waits=self.waits.describe())
        self._cut_short = True
        if self._train_task is not None:
            self._train_task.cancel()

    # -- checkpoints --------------------------------------------------------------------------

    def _collect_cut(self) -> CutState:
        """The control plane's state of this moment. No await, so that it is one moment."""
        train = self.train.state
        ready = [group for group in self.ledger.open.values() if group.ready]
        datasets = self.workers.datasets or {}
        held = self._held_versions()
        train_data, val_data = datasets.get(Split.TRAIN), datasets.get(Split.VALIDATION)
        control = {
            "format": CONTROL_FORMAT,
            "structure": structure(self.config),
            "data_fingerprint": train_data and train_data.fingerprint,
            "val_data_fingerprint": val_data and val_data.fingerprint,
            "train": asdict(train),
            "ledger": self.ledger.state(),
            "staleness": self.staleness.state(),
            "validations": self.validator.state(),
            "held_versions": [weights.version for weights in held],
            "num_rows": self._recorder.num_rows(),
            "num_validations": self.validator.num_recorded,
            "run_s": self.now_s(),
            "busy_s": self._busy_and_total_s(),
        }
        return CutState(
            control=control,
            trajectories=tuple(ref for group in ready for ref in group.payloads),
            owners=tuple(group.group_id for group in ready for _ in group.payloads),
            held=held,
        )

    def _held_versions(self) -> list[Weights]:
        """Published versions, ascending, that a resumed run needs and the trainer has no more.

        The one that rollouts go on with, between two publications; those of the validations.
        """
        train = self.train.state
        wanted = {row["version"] for row in self.validator.state()}
        if train.steps_since_publish % self.train.trigger != 0:
            wanted.add(train.version)
        if train.steps_since_publish == 0:
            wanted.discard(train.version)
        return [self.store.get(version) for version in sorted(wanted) if self.store.has(version)]

    def _restore(self, control: dict[str, Any]) -> None:
        """Take over the control plane's state of a checkpoint. Needs no worker."""
        self.train.state = TrainState(**control["train"])
        self.staleness.restore(control["staleness"])
        self.ledger.restore(control["ledger"])
        self.validator.num_recorded = control["num_validations"]
        self.checkpointer.saved_steps = [*control["checkpoints"], self.train.state.step]
        self._carried_busy = tuple(control["busy_s"])

    async def _rejoin(self, resume: ResumePoint) -> None:
        """What a resume needs workers for: check the data, name the trajectories, validations."""
        await self.workers.dataset(Split.TRAIN, "train")
        self._check_data(resume)
        self.ledger.attach(lambda ids: self.trainer.load_trajectories(resume.folder, ids))
        await self._take_up_validations(resume.control)

    async def _take_up_validations(self, control: dict[str, Any]) -> None:
        """Go on with the validations of the cut, as far as their weights are still there."""
        version = self.train.state.version
        kept: set[int] = set(control.get("held_versions", ()))
        to_come = set[int]() if self.train.publication_due() else {version}
        for due in sorted((Due(**row) for row in control["validations"]), key=lambda d: d.version):
            if not self.config.data.val_files:
                self.validator.skip(due, "the run was resumed without data.val_files")
            elif due.version in kept | to_come:
                self.validator.take_up(due)
            else:
                self.validator.skip(due, "the run was resumed; its policy version is gone")
        for older in sorted(kept - to_come):
            if self.store.is_held(older):
                await self.train.take_back(older)

    def _check_data(self, resume: ResumePoint) -> None:
        """Samples are numbered by the training data; scores of other held-out data do not compare.

        Validation may be left out or begun: only data in the place of other data is refused.
        """
        kinds = {
            "train": (Split.TRAIN, resume.control["data_fingerprint"]),
            "val": (Split.VALIDATION, resume.control.get("val_data_fingerprint")),
        }
        for kind, (split, before) in kinds.items():
            info = (self.workers.datasets or {}).get(split)
            if info is not None and before not in (None, info.fingerprint):
                raise CheckpointError(
                    f"{resume.folder}: its data.{kind}_files (or data.{kind}_max_samples) held "
                    f"other prompts: fingerprint {before}, now {info.fingerprint}"
                )

    # -- the end ------------------------------------------------------------------------------

    def _busy_and_total_s(self) -> tuple[float, float]:
        busy_s, total_s = self._carried_busy
        elapsed_s = self._loop.time() - self._loop_began_s
        shared = self.config.rollout.replicas
        return busy_s + self.pool.busy_s(), total_s + elapsed_s * shared

    def _end(self, cut_short: str = "") -> RunEnd:
        busy_s, total_s = self._busy_and_total_s()
        return make_run_end(
            error=self._cause,
            stop_signal=self._stop_signal,
            cut_short=cut_short or self._describe_cut_short(),
            numbers={
                "steps": self.train.state.step,
                "policy_version": self.train.state.version,
                "samples": self.ledger.counts(),
                "failures": self.ledger.failures(),
                "late_results": self.ledger.num_late,
                "wall_s": round(self.now_s(), 3),
                "trainer_wait_s": {k: round(v, 6) for k, v in self.train.state.wait_s.items()},
                "rollout_idle_ratio": round(1 - busy_s / total_s, 6) if total_s else 0.0,
                "validations": self.validator.num_recorded,
                "checkpoints": self.checkpointer.saved_steps,
                "restarts": self.restarts.count,
            },
        )

    def _describe_cut_short(self) -> str:
        if not self._cut_short:
            return ""
        saved = max(self.checkpointer.saved_steps, default=None)
        health = self.config.health
        return (
            f"what was under way did not end within {health.stop_work_s:g} s "
            f"(health.shutdown_timeout_s={health.shutdown_timeout_s:g}, closing taken off): the "
            f"newest checkpoint is of step {saved}, the run was at step {self.train.state.step}"
        )


def structure(config: Config) -> dict[str, Any]:
    """The configuration keys that a resumed run cannot change."""
    return {
        "rollout.n": config.rollout.n,
        "actor.ppo_mini_batch_size": config.actor.ppo_mini_batch_size,
        "async_training.require_batches": config.async_training.require_batches,
        "async_training.trigger_parameter_sync_step": (
            config.async_training.trigger_parameter_sync_step
        ),
        "data.shuffle": config.data.shuffle,
        "trainer.seed": config.trainer.seed,
    }
