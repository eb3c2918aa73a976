"""What the worker processes say of their event loops, and what it means when one says nothing.

Each process watches its own loops and answers `watch` from another one; a pending call a process
brings its reports here at once. A process in which nothing can run (native code that holds the
interpreter's lock, a stopped process) does not answer. A rollout worker is replaced then; what
becomes of replicas and of the trainer is up to their own limits. One that is gone is replaced if it
is a rollout worker or the trainer, without waiting for a call that finds it; a replica is found by
its work.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from freewheel.config.sections import HealthConfig
from freewheel.control.trainer_keeper import TrainerKeeper
from freewheel.control.waits import Signal, WaitTable
from freewheel.control.watchdog import Reporter
from freewheel.control.worker_pool import WorkerPool
from freewheel.errors import LostError
from freewheel.loop_reports import SERVING_LOOP
from freewheel.protocols import Recorder, RolloutWorker, Watched
from freewheel.types import LoopReport

NO_ANSWER = "no answer"


@dataclass(slots=True, kw_only=True)
class _State:
    """One process under watch: the last report seen, when it last answered, what is blocked."""

    name: str
    process: Watched
    answered_s: float
    seen: int = 0
    is_silent: bool = False
    blocked: set[str] = field(default_factory=set[str])


class ProcessWatch:
    """Loop `process-watch`. See the module's docstring.

    Args:
        processes: those that are up now, by name.
        workers: replaces rollout workers.
        trainer: replaces itself.
        health: limits.
        waits: has an entry for each process that is overdue.
        recorder: is told of each report.
        reporter: keeps the evidence of each block, once.
        arrivals: notified when a process has come up; seldom, as each time costs a look at all.
    """

    def __init__(
        self,
        *,
        processes: Callable[[], Mapping[str, Watched]],
        workers: WorkerPool,
        trainer: TrainerKeeper,
        health: HealthConfig,
        waits: WaitTable,
        recorder: Recorder,
        reporter: Reporter,
        arrivals: Signal,
    ) -> None:
        self._processes = processes
        self._workers = workers
        self._trainer = trainer
        self._silence_s = health.loop_blocked_s + health.grace_s
        # A report comes at once; this is only how often a process that has none says so. Each time
        # costs a millisecond of CPU here.
        self._wait_s = self._silence_s / 2
        self._last_wait_s = health.loop_blocked_s / 2
        self._end_s = health.loop_blocked_end_s
        self._waits = waits
        self._recorder = recorder
        self._reporter = reporter
        self._arrivals = arrivals

    async def run(self) -> None:
        """Watch every process, from when it is up until it is gone.

        Consumes: reports from inside the processes.
        Produces: events, hang reports, reports of loss.
        Waits for: a process to come up; each process's answer, within a limit.
        Unblocked by: the processes, the clock.
        """
        watched: Mapping[str, Watched] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                found = self._processes()
                for name, process in found.items():
                    if watched.get(name) is not process:
                        tasks.create_task(self._watch(name, process, tasks), name=f"watch-{name}")
                watched = found
                await self._arrivals.wait()

    async def _watch(self, name: str, process: Watched, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        state = _State(name=name, process=process, answered_s=loop.time())
        while self._processes().get(name) is process:
            try:
                reports = await self._ask(state)
            except LostError as error:
                self._replace(process, str(error))
                await self._trainer.report_lost(process, str(error))
                return
            causes = self._take_silence(state) if reports is None else self._take(state, reports)
            for cause in causes:
                tasks.create_task(self._reporter.report_block(name, cause), name=f"report-{name}")

    async def _ask(self, state: _State) -> list[LoopReport] | None:
        """The next reports, none if all is well; None if there was no answer."""
        limit_s = self._silence_s
        if state.is_silent:
            silent_s = asyncio.get_running_loop().time() - state.answered_s
            limit_s = max(self._end_s - silent_s, self._last_wait_s)
        try:
            async with asyncio.timeout(limit_s):
                if not state.is_silent:
                    return await state.process.watch(state.seen, self._wait_s)
                with self._waits.waiting(
                    f"watch-{state.name}",
                    "any answer",
                    held_by=(f"process of {state.name}",),
                    timeout_s=limit_s,
                ):
                    return await state.process.watch(state.seen, 0.0)
        except TimeoutError:
            return None

    def _take_silence(self, state: _State) -> list[str]:
        """No answer. Returns what is to be reported: the first time only."""
        silent_s = asyncio.get_running_loop().time() - state.answered_s
        cause = (
            f"{state.name} has not answered for {silent_s:.1f} s, not even that a loop of it is "
            "blocked: native code holds the interpreter's lock, or the process is stopped"
        )
        if state.is_silent:
            self._replace(state.process, f"{cause} (limit: health.loop_blocked_end_s)")
            return []
        state.is_silent = True
        self._recorder.event(
            "loop_blocked",
            process=state.name,
            loop="all",
            blocked_s=round(silent_s, 3),
            cause=cause,
            call=NO_ANSWER,
            sample_id="",
        )
        return [cause]

    def _take(self, state: _State, reports: list[LoopReport]) -> list[str]:
        """An answer. Returns the blocks that are new and last."""
        now_s = asyncio.get_running_loop().time()
        if state.is_silent:
            self._tell(state.name, loop="all", blocked_s=now_s - state.answered_s)
        state.is_silent, state.answered_s = False, now_s
        new: dict[str, str] = {}
        for report in reports:
            state.seen = report.number
            if report.state == "turned":
                self._tell(state.name, loop=report.loop, blocked_s=report.blocked_s)
                state.blocked.discard(report.loop)
                new.pop(report.loop, None)
                continue
            self._take_block(state, report)
            if report.loop not in state.blocked:
                new[report.loop] = report.cause
                state.blocked.add(report.loop)
        return list(new.values())

    def _take_block(self, state: _State, report: LoopReport) -> None:
        self._recorder.event(
            "loop_blocked" if report.state == "blocked" else "loop_given_up",
            process=state.name,
            loop=report.loop,
            blocked_s=round(report.blocked_s, 3),
            cause=report.cause,
            call=report.call,
            sample_id=report.sample_id,
        )
        worker = self._worker(state.process)
        if worker is not None and report.state == "given_up":
            self._workers.retire(worker, report.cause)
        elif report.loop == SERVING_LOOP and report.blocked_s >= self._end_s:
            self._replace(state.process, report.cause)

    def _tell(self, name: str, *, loop: str, blocked_s: float) -> None:
        self._recorder.event("loop_turned", process=name, loop=loop, blocked_s=round(blocked_s, 3))

    def _replace(self, process: Watched, reason: str) -> None:
        worker = self._worker(process)
        if worker is not None:
            self._workers.report_lost(worker, reason)

    def _worker(self, process: Watched) -> RolloutWorker | None:
        """The process as a rollout worker that is in service, if it is one."""
        workers = [slot.worker for slot in self._workers.slots]
        return next((worker for worker in workers if worker is process), None)
