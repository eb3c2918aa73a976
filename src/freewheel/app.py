"""What the command line starts: one run, from its folder to its exit code.

Builds backend, recorder and controller, listens for SIGINT and SIGTERM, writes `summary.json`
whatever the end. A stop has one deadline for all of it; a second signal ends the process at once.
"""

import asyncio
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from freewheel.backends.ray import RayBackend
from freewheel.checkpoint import FileCheckpointStore, find_checkpoint, read_checkpoint
from freewheel.config import Config
from freewheel.control.controller import Controller, ValidateOnly
from freewheel.control.run_end import RunEnd, first_leaf, make_run_end, uncounted, with_error
from freewheel.control.run_state import ResumePoint
from freewheel.errors import (
    EXIT_INTERRUPTED,
    FreewheelError,
    RecordError,
    StalledError,
    StartupError,
)
from freewheel.hang_report import REPORT_TIMEOUT_S, HangReporter
from freewheel.last_resort import attempt, say, say_within_limit
from freewheel.lives import run_lives
from freewheel.loggers import make_sinks
from freewheel.loop_watch import Block, LoopWatch
from freewheel.models import resolve_model
from freewheel.progress import Progress, make_progress
from freewheel.recorder import FileRecorder
from freewheel.resuming import take_up
from freewheel.run_folder import RunClock, RunFolder
from freewheel.status import RunStatus
from freewheel.stop_deadline import StopDeadline
from freewheel.threads import CallThread

_CLOSE_LIMIT_S = 10.0
"""How long each of summary, records and workers has at the end of a run; less after a stop."""

_LOGGERS_LIMIT_S = 60.0
"""How long loggers have to send what is left, when all else has ended; less after a stop."""

_EXIT_S = 1.0
"""Kept of a stop's time for the rest of the process's end."""

_SAME_SIGNAL_S = 0.5
"""Signals within so long are one: `timeout` and schedulers signal the process, then its group."""

_LAST_SUMMARY_S = 2.0
"""How long a process that ends at once waits for the disk to take its summary."""

_LAST_KILL_S = 3.0
"""How long such a process waits until its workers are killed."""


def run_training(
    config: Config,
    run_dir: Path,
    *,
    resume: bool,
    from_step: int | None = None,
    schedule_steps: int | None = None,
) -> int:
    """Train, from the beginning or on from a checkpoint.

    Args:
        config: checked configuration.
        run_dir: folder of the run, new unless `resume`.
        resume: go on with the run that the folder holds.
        from_step: with `resume`, from the checkpoint of this step, not from the newest whole one.
        schedule_steps: trainer steps over which the learning rate's schedule runs, where the
            configuration leaves them to the data.

    Returns:
        The exit code of the run (docs/exit-codes.md).

    Raises:
        ConfigError, CheckpointError: the run cannot start; nothing was started or overwritten.
    """
    folder = RunFolder.resume(run_dir) if resume else RunFolder.create(run_dir, config)
    try:
        model = resolve_model(config.model.path)
        point = take_up(folder, config, model, from_step) if resume else None
        # Not into the run's folder: a resumed run may have more epochs.
        scheduled = _with_optim(config, total_training_steps=schedule_steps)
        end = run_lives(
            lambda point: _run(scheduled, folder, model=model, resume=point),
            point,
            newest=lambda: _newest_checkpoint(folder),
            take_up=lambda: take_up(folder, config, model, None),
            write_summary=folder.write_summary,
        )
        return _report_end(end, folder)
    finally:
        folder.close()


def run_validation(config: Config, target: str, out_dir: Path) -> int:
    """Score a checkpoint or a model on the held-out prompts.

    Args:
        config: checked configuration with `data.val_files`.
        target: folder of a checkpoint or of a model, or `package:...`.
        out_dir: new folder for the result.

    Returns:
        The exit code: `NoScoreError`'s if no trial was scored.
    """
    target = _resolve(target)
    due, model = _what_to_score(target)
    # Before a folder is made for the result: what cannot be scored leaves none.
    model_path = resolve_model(model)
    # The checkpoint of an adapter holds the merged model, and nothing is trained here.
    config = replace(config, model=replace(config.model, lora_rank=0))
    folder = RunFolder.create(
        out_dir,
        replace(config, model=replace(config.model, path=model)),
        purpose="validate",
        target=target,
    )
    # The trainer that comes up publishes weights; how it would train, and on what, is no matter.
    config = _with_optim(config, lr_scheduler_type="constant", lr_warmup_steps=0)
    config = replace(config, data=replace(config.data, train_files=()))
    try:
        end = _run(config, folder, model=model_path, validate_only=due)
        return _report_end(end, folder)
    finally:
        folder.close()


def _resolve(target: str) -> str:
    """Follow links once: `latest` of a run that goes on leads elsewhere a moment later."""
    folder = Path(target).expanduser()
    return str(folder.resolve()) if folder.is_dir() else target


def _what_to_score(target: str) -> tuple[ValidateOnly, str]:
    """Step and version for the records, and the model; only a checkpoint's are not 0."""
    if not (Path(target) / "control.json").is_file():
        return ValidateOnly(step=0, version=0), target
    checkpoint = read_checkpoint(Path(target))
    state = checkpoint.control["train"]
    # The checkpoint is cut before its weights are published: they are the next version.
    version = state["version"] + int(state["steps_since_publish"] > 0)
    return ValidateOnly(step=checkpoint.step, version=version), str(checkpoint.folder / "hf")


def _newest_checkpoint(folder: RunFolder) -> Path | None:
    checkpoint, _ = find_checkpoint(folder.checkpoints_path)
    return checkpoint and checkpoint.folder


def _with_optim(config: Config, **changes: Any) -> Config:
    optim = replace(config.actor.optim, **changes)
    return replace(config, actor=replace(config.actor, optim=optim))


def _run(
    config: Config,
    folder: RunFolder,
    *,
    model: Path,
    resume: ResumePoint | None = None,
    validate_only: ValidateOnly | None = None,
) -> RunEnd:
    say(f"run folder: {folder.path}")
    resumed_step = None if resume is None else resume.control["train"]["step"]
    try:
        sinks = make_sinks(config, folder, resumed_step=resumed_step)
        clock = folder.clock(at_least_s=0.0 if resume is None else resume.control["run_s"])
        recorder = FileRecorder(folder, clock=clock, sinks=sinks)
        progress = make_progress(config.logging.progress)
        run = _Run(
            config, folder, clock=clock, recorder=recorder, progress=progress, model_path=model
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the run's end
        return _end_before_controller(error, folder, resume)
    try:
        with asyncio.Runner() as runner:
            end = runner.run(run.run(resume, validate_only))
    except BaseException as error:  # noqa: BLE001 - SystemExit of a library, an early interrupt
        end = run.abandon(error)
    progress.close(end.summary)
    run.deadline.cancel()
    return end


def _end_before_controller(
    error: BaseException, folder: RunFolder, resume: ResumePoint | None
) -> RunEnd:
    """The end of a run that had no controller yet to tell it; its summary is written."""
    train = {"step": 0, "version": 0} if resume is None else resume.control["train"]
    is_interrupt = isinstance(error, KeyboardInterrupt)
    end = make_run_end(
        error=None if is_interrupt else first_leaf(error),
        stop_signal="SIGINT" if is_interrupt else None,
        cut_short="",
        numbers=uncounted(steps=train["step"], policy_version=train["version"]),
    )
    attempt("summary.json", _CLOSE_LIMIT_S, folder.write_summary, end.summary)
    return end


class _Run:
    """One run on its event loop."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        *,
        clock: RunClock,
        recorder: FileRecorder,
        progress: Progress,
        model_path: Path,
    ) -> None:
        self._config = config
        self._folder = folder
        self._clock = clock
        self._recorder = recorder
        self._progress = progress
        self._backend = RayBackend(config, model_path, log_dir=folder.make_logs())
        self._num_signals = 0
        self._first_signal_s = 0.0
        self._stopped = asyncio.Event()
        self._controller: Controller | None = None
        self._ended: RunEnd | None = None
        self._resume: ResumePoint | None = None
        limit_s = config.health.shutdown_timeout_s
        overdue = f"the process did not end within {limit_s:g} s (health.shutdown_timeout_s)"
        self.deadline = StopDeadline(limit_s, partial(self._end_at_once, overdue))

    async def run(self, resume: ResumePoint | None, validate_only: ValidateOnly | None) -> RunEnd:
        """Run and clean up, whatever fails; the summary is written before what could hang."""
        self._resume = resume
        try:
            self._ended = await self._live(resume, validate_only)
        except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the run's end
            self._ended = self._end_by(error)
        return await self._close(self._ended)

    def abandon(self, error: BaseException) -> RunEnd:
        """End a run whose loop was broken off: write the summary, kill the workers."""
        end = self._end_by(error) if self._ended is None else with_error(self._ended, error)
        self._ended = end
        attempt("summary.json", _LAST_SUMMARY_S, self._folder.write_summary, end.summary)
        attempt("the workers' end", _LAST_KILL_S, self._backend.kill)
        return end

    def _end_by(self, error: BaseException) -> RunEnd:
        if self._controller is None:
            return _end_before_controller(error, self._folder, self._resume)
        return self._controller.end_by(error)

    async def _live(self, resume: ResumePoint | None, validate_only: ValidateOnly | None) -> RunEnd:
        """Make the controller and run it, under the watch of the loop."""
        reporter = HangReporter(
            self._folder.path,
            processes=self._backend.local_processes,
            state=lambda: asdict(controller.status()),
            recorder=self._recorder,
        )
        controller = self._controller = Controller(
            self._config,
            backend=self._backend,
            recorder=self._recorder,
            checkpoints=FileCheckpointStore(
                self._folder.checkpoints_path,
                keep=self._config.checkpoint.keep,
                on_not_removed=self._report_not_removed,
            ),
            resume=resume,
            validate_only=validate_only,
            reporter=reporter,
            started_s=self._clock.t_s(),
            on_status=self._show,
        )
        self._listen(controller)
        watch = LoopWatch(
            limit_s=self._config.health.loop_blocked_s,
            on_block=lambda block: self._take_block(block, controller, reporter),
        )
        try:
            return await self._run_controller(controller)
        finally:
            watch.close()
            self._show(controller.status())

    async def _close(self, end: RunEnd) -> RunEnd:
        """Write what is to be kept, end the workers. Without its records a run has failed.

        Loggers come last: they may take long, and the records are whole without them.
        """
        problems = [
            await self._within_limit("summary.json", self._write_summary(end)),
            await self._within_limit("the records", self._recorder.aclose()),
        ]
        error = next((problem for problem in problems if problem is not None), None)
        if error is not None:
            if end.error is not None:
                say(str(error))
            end = self._ended = with_error(end, error)
            await self._within_limit("summary.json", self._write_summary(end))
        problem = await self._within_limit("the workers' end", self._backend.aclose())
        if problem is not None:
            attempt("the workers' end", _LAST_KILL_S, self._backend.kill)
            say(str(problem))
        problem = await self._within_limit(
            "the loggers' end", self._recorder.aclose_loggers(), limit_s=_LOGGERS_LIMIT_S
        )
        if problem is not None:
            say(f"{problem}; what they lack is in {self._folder.path}")
        return end

    async def _run_controller(self, controller: Controller) -> RunEnd:
        await self._start_backend()
        if self._stopped.is_set():
            return controller.end_by(None)
        # Again: Ray puts a handler of its own in front, which aborts the process after 3 s.
        self._listen(controller)
        return await controller.run()

    async def _start_backend(self) -> None:
        """Start Ray, until its limit or a stop."""
        limit_s = self._config.health.startup_timeout_s
        async with asyncio.TaskGroup() as group:
            start = group.create_task(self._backend.start(), name="ray")
            stop = group.create_task(self._stopped.wait(), name="stop")
            done, _ = await asyncio.wait(
                (start, stop), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            start.cancel()
            stop.cancel()
        if not done:
            raise StartupError(
                f"Ray did not come up within {limit_s:g} s (health.startup_timeout_s)"
            )

    def _report_not_removed(self, path: Path, error: OSError) -> None:
        """An old checkpoint stays: it costs room, and not the run. In the store's thread."""
        self._recorder.event("checkpoint_not_removed", path=str(path), error=str(error))

    def _show(self, status: RunStatus) -> None:
        self._recorder.status(status)
        self._progress.update(status)

    def _listen(self, controller: Controller) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            name = signal.Signals(number).name
            loop.add_signal_handler(number, self._take_signal, name, controller)

    def _take_signal(self, name: str, controller: Controller) -> None:
        signal.alarm(0)  # the alarm of Ray's handler, if the signal came while Ray started
        now_s = time.monotonic()
        if self._num_signals and now_s - self._first_signal_s < _SAME_SIGNAL_S:
            return
        self._first_signal_s = now_s
        self._num_signals += 1
        if self._num_signals > 1:
            self._end_at_once("a second signal ended the process at once")
        self.deadline.begin()
        self._stopped.set()
        controller.stop(name)
        say(f"{name}: stopping, with a checkpoint; once more ends at once")

    def _end_at_once(self, reason: str) -> NoReturn:
        """Write the summary and go, also from a thread: the loop may be what hangs."""

        def make_end() -> RunEnd | None:
            end = self._ended
            if (end is None or end.error is None) and self._controller is not None:
                return self._controller.end_at_once(reason)
            return end

        self._leave(make_end, EXIT_INTERRUPTED)

    def _leave(self, make_end: Callable[[], RunEnd | None], exit_code: int) -> NoReturn:
        """End the process at once, whatever fails or hangs; from any thread.

        Args:
            make_end: the end that is written down.
            exit_code: if there is none.
        """
        try:
            end = make_end()
            if end is not None:
                exit_code = end.exit_code
                attempt("summary.json", _LAST_SUMMARY_S, self._folder.write_summary, end.summary)
                say_within_limit(f"{end.status}: {end.cause}")
        finally:
            try:
                attempt("the workers' end", _LAST_KILL_S, self._backend.kill)
            finally:
                os._exit(exit_code)

    def _take_block(self, block: Block, controller: Controller, reporter: HangReporter) -> None:
        """The control plane's own loop is blocked. In the watch's thread: the loop cannot help.

        Nothing here may keep the last step from being reached: the disk may be what blocks.
        """
        health = self._config.health
        attempt("event loop_blocked", REPORT_TIMEOUT_S, self._record_block, block)
        if block.blocked_s < 2 * health.loop_blocked_s:
            content = {"summary.txt": block.sentence()}
            attempt("hang report", REPORT_TIMEOUT_S, reporter.write, "event-loop", content)
        if block.blocked_s >= health.loop_blocked_end_s:
            error = StalledError(f"{block.sentence()} (limit: health.loop_blocked_end_s)")
            self._leave(lambda: controller.end_by(error), error.exit_code)

    def _record_block(self, block: Block) -> None:
        # The error of records that fail is for the loops: here it would end nothing.
        self._recorder.note(
            "loop_blocked", process="control-plane", cause=block.sentence(), call=block.call
        )

    async def _write_summary(self, end: RunEnd) -> None:
        thread = CallThread("summary")
        try:
            await thread.run(self._folder.write_summary, end.summary)
        finally:
            thread.close()

    async def _within_limit(
        self, what: str, close: Coroutine[Any, Any, None], *, limit_s: float | None = None
    ) -> RecordError | None:
        """Clean up one thing: neither its failure nor its hanging keeps the others from theirs."""
        limit_s = min(
            limit_s or _CLOSE_LIMIT_S, max(_EXIT_S, self.deadline.left_s(math.inf) - _EXIT_S)
        )
        try:
            async with asyncio.timeout(limit_s):
                await close
        except TimeoutError:
            return RecordError(f"{what}: not done within {limit_s:g} s")
        except Exception as error:  # noqa: BLE001 - handed on; the other things have their turn
            return RecordError(f"{what}: {error}")
        return None


def _report_end(end: RunEnd, folder: RunFolder) -> int:
    if end.error is not None:
        if not isinstance(end.error, FreewheelError):
            say("".join(traceback.format_exception(end.error)).rstrip())
        say(f"error: {end.cause}")
    if end.status == "stopped" and end.summary["checkpoints"]:
        say(f"to go on: freewheel resume {folder.path}")
    return end.exit_code
