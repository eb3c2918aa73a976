"""What the command line starts: one run, from its folder to its exit code.

Builds backend, recorder and controller, listens for SIGINT and SIGTERM, writes `summary.json`
whatever the end. A stop has one deadline for all of it; a second signal ends the process at once.
"""

import asyncio
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Coroutine
from concurrent import futures
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from freewheel.backends.ray import RayBackend
from freewheel.checkpoint import FileCheckpointStore, find_checkpoint, read_checkpoint
from freewheel.config import Config
from freewheel.control.controller import Controller, ValidateOnly
from freewheel.control.run_end import RunEnd, with_error
from freewheel.control.run_state import ResumePoint
from freewheel.errors import (
    EXIT_INTERRUPTED,
    FreewheelError,
    RecordError,
    StalledError,
    StartupError,
)
from freewheel.hang_report import HangReporter
from freewheel.lives import run_lives
from freewheel.loggers import make_sinks
from freewheel.loop_watch import Block, LoopWatch
from freewheel.models import resolve_model
from freewheel.progress import Progress, make_progress
from freewheel.recorder import FileRecorder
from freewheel.resuming import take_up
from freewheel.run_folder import RunFolder
from freewheel.status import RunStatus
from freewheel.stop_deadline import StopDeadline
from freewheel.threads import CallThread

_CLOSE_LIMIT_S = 10.0
"""How long each of summary, records and workers has at the end of a run; less after a stop."""

_EXIT_S = 1.0
"""Kept of a stop's time for the rest of the process's end."""

_SAME_SIGNAL_S = 0.5
"""Signals within so long are one: `timeout` and schedulers signal the process, then its group."""

_LAST_SUMMARY_S = 2.0
"""How long a process that ends at once waits for the disk to take its summary."""


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
    resumed_step = None if resume is None else resume.control["train"]["step"]
    sinks = make_sinks(config, folder, resumed_step=resumed_step)
    recorder = FileRecorder(folder, sinks=sinks)
    sys.stderr.write(f"run folder: {folder.path}\n")
    progress = make_progress(config.logging.progress)
    summary = None
    run = _Run(config, folder, recorder, progress, model)
    try:
        with asyncio.Runner() as runner:
            end = runner.run(run.run(resume, validate_only))
        summary = end.summary
    finally:
        progress.close(summary)
        run.deadline.cancel()
    return end


class _Run:
    """One run on its event loop."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        recorder: FileRecorder,
        progress: Progress,
        model_path: Path,
    ) -> None:
        self._config = config
        self._folder = folder
        self._recorder = recorder
        self._progress = progress
        logs = folder.path / "logs"
        logs.mkdir(exist_ok=True)
        self._backend = RayBackend(config, model_path, log_dir=logs)
        self._num_signals = 0
        self._first_signal_s = 0.0
        self._stopped = asyncio.Event()
        self._controller: Controller | None = None
        self._ended: RunEnd | None = None
        limit_s = config.health.shutdown_timeout_s
        overdue = f"the process did not end within {limit_s:g} s (health.shutdown_timeout_s)"
        self.deadline = StopDeadline(limit_s, partial(self._end_at_once, overdue))

    async def run(self, resume: ResumePoint | None, validate_only: ValidateOnly | None) -> RunEnd:
        """Run and clean up; the summary is written before anything that could hang."""
        reporter = HangReporter(
            self._folder.path,
            processes=self._backend.local_processes,
            state=lambda: asdict(controller.status()),
            recorder=self._recorder,
        )
        controller = Controller(
            self._config,
            backend=self._backend,
            recorder=self._recorder,
            checkpoints=FileCheckpointStore(
                self._folder.checkpoints_path, keep=self._config.checkpoint.keep
            ),
            resume=resume,
            validate_only=validate_only,
            reporter=reporter,
            started_s=self._folder.clock().t_s(),
            on_status=self._show,
        )
        self._controller = controller
        self._listen(controller)
        watch = LoopWatch(
            limit_s=self._config.health.loop_blocked_s,
            on_block=lambda block: self._take_block(block, controller, reporter),
        )
        self._ended = await self._run_controller(controller)
        watch.close()
        self._show(controller.status())
        return await self._close(self._ended)

    async def _close(self, end: RunEnd) -> RunEnd:
        """Write what is to be kept, end the workers. Without its records a run has failed."""
        problems = [
            await self._within_limit("summary.json", self._write_summary(end)),
            await self._within_limit("the records", self._recorder.aclose()),
        ]
        error = next((problem for problem in problems if problem is not None), None)
        if error is not None:
            if end.error is not None:
                sys.stderr.write(f"{error}\n")
            end = self._ended = with_error(end, error)
            await self._within_limit("summary.json", self._write_summary(end))
        problem = await self._within_limit("the workers' end", self._backend.aclose())
        if problem is not None:
            sys.stderr.write(f"{problem}\n")
            self._backend.kill()
        return end

    async def _run_controller(self, controller: Controller) -> RunEnd:
        try:
            await self._start_backend()
        except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the run's end
            return controller.end_before_start(error)
        if self._stopped.is_set():
            return controller.end_before_start(None)
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
        sys.stderr.write(f"{name}: stopping, with a checkpoint; once more ends at once\n")
        controller.stop(name)
        self._stopped.set()

    def _end_at_once(self, reason: str) -> NoReturn:
        """Write the summary and go, also from a thread: the loop may be what hangs."""
        exit_code = EXIT_INTERRUPTED
        try:
            end = self._ended
            if (end is None or end.error is None) and self._controller is not None:
                end = self._controller.end_at_once(reason)
            if end is not None:
                exit_code = end.exit_code
                sys.stderr.write(f"{end.status}: {end.cause}\n")
                # In a thread: a disk that takes nothing must not hold the process.
                writing = CallThread("last-summary").submit(self._folder.write_summary, end.summary)
                futures.wait([writing], timeout=_LAST_SUMMARY_S)
            self._backend.kill()
        finally:
            os._exit(exit_code)

    def _take_block(self, block: Block, controller: Controller, reporter: HangReporter) -> None:
        """The control plane's own loop is blocked. In the watch's thread: the loop cannot help."""
        health = self._config.health
        self._recorder.event(
            "loop_blocked", process="control-plane", cause=block.sentence(), call=block.call
        )
        if block.blocked_s < 2 * health.loop_blocked_s:
            reporter.write("event-loop", {"summary.txt": block.sentence()})
        if block.blocked_s >= health.loop_blocked_end_s:
            error = StalledError(f"{block.sentence()} (limit: health.loop_blocked_end_s)")
            end = controller.end_before_start(error)
            self._folder.write_summary(end.summary)
            sys.stderr.write(f"error: {end.cause}\n")
            self._backend.kill()
            os._exit(end.exit_code)

    async def _write_summary(self, end: RunEnd) -> None:
        thread = CallThread("summary")
        await thread.run(self._folder.write_summary, end.summary)
        thread.close()

    async def _within_limit(
        self, what: str, close: Coroutine[Any, Any, None]
    ) -> RecordError | None:
        """Clean up one thing: neither its failure nor its hanging keeps the others from theirs."""
        limit_s = min(_CLOSE_LIMIT_S, max(_EXIT_S, self.deadline.left_s(math.inf) - _EXIT_S))
        try:
            async with asyncio.timeout(limit_s):
                await close
        except TimeoutError:
            return RecordError(f"{what}: not done within {limit_s:g} s")
        except (FreewheelError, OSError) as error:
            return RecordError(f"{what}: {error}")
        return None


def _report_end(end: RunEnd, folder: RunFolder) -> int:
    if end.error is not None:
        if not isinstance(end.error, FreewheelError):
            traceback.print_exception(end.error)
        sys.stderr.write(f"error: {end.cause}\n")
    if end.status == "stopped" and end.summary["checkpoints"]:
        sys.stderr.write(f"to go on: freewheel resume {folder.path}\n")
    return end.exit_code
