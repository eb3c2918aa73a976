"""Run the real controller over fakes: from the beginning, or on from what a killed run left."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from freewheel.config.sections import Config
from freewheel.control.controller import Controller, ValidateOnly
from freewheel.control.run_end import RunEnd
from freewheel.control.run_state import ResumePoint
from freewheel.control.watchdog import Reporter
from freewheel.simulation.fakes import FakeBackend, FakeDisk, FakeTrajectory
from freewheel.simulation.records import MemoryCheckpoints, MemoryRecorder
from freewheel.simulation.settings import SimSettings
from freewheel.simulation.virtual_time import run_virtual


@dataclass(slots=True, kw_only=True)
class SimRun:
    """A simulated run: what it left on its disk, what it recorded, how it ended.

    `end` is None if it was killed. `trained` lists (step, policy version, trajectory) of this
    process's life only. `num_strikes`: how often the injected failure struck.
    """

    disk: FakeDisk = field(default_factory=FakeDisk)
    recorder: MemoryRecorder = field(default_factory=MemoryRecorder)
    checkpoints: MemoryCheckpoints = field(default_factory=lambda: MemoryCheckpoints(2))
    end: RunEnd | None = None
    trained: list[tuple[int, int, FakeTrajectory]] = field(
        default_factory=list[tuple[int, int, FakeTrajectory]]
    )
    digest: str = ""
    ended_s: float = 0.0
    num_strikes: int = 0


def simulate(  # noqa: PLR0913 - each is another way to disturb a run
    config: Config,
    settings: SimSettings,
    *,
    run: SimRun | None = None,
    kill_at_s: float | None = None,
    stop_at_s: float | None = None,
    act: Callable[[Controller, FakeBackend], Any] | None = None,
    reporter: Reporter | None = None,
    validate_only: ValidateOnly | None = None,
    debug: bool = False,
) -> SimRun:
    """Run a simulation to its end.

    Args:
        config: configuration of the run.
        settings: what the fakes are like.
        run: an earlier run that was killed or stopped: go on from its newest checkpoint.
        kill_at_s: end the process at this virtual time, as SIGKILL would.
        stop_at_s: ask for a stop at this virtual time, as SIGINT does.
        act: called once with controller and backend before the run starts.
        reporter: given the stalls that the watchdog finds; None: no watchdog, no replica health.
        validate_only: no training, one validation.
        debug: asyncio's debug mode.

    Raises:
        DeadlockError, BlockedLoopError: see `run_virtual`.
    """
    run = run or SimRun()
    resume = _resume_point(run)

    async def main() -> None:
        backend = FakeBackend(config, settings, run.disk)
        run.checkpoints.before_commit = partial(
            backend.world.injector.checkpoint, "checkpoint_commit"
        )
        await backend.start()
        controller = Controller(
            config,
            backend=backend,
            recorder=run.recorder,
            checkpoints=run.checkpoints,
            resume=resume,
            reporter=reporter,
            validate_only=validate_only,
            started_s=0.0 if resume is None else resume.control["run_s"],
        )
        if act is not None:
            act(controller, backend)
        loop = asyncio.get_running_loop()
        if stop_at_s is not None:
            loop.call_at(stop_at_s, controller.stop, "SIGINT")
        try:
            async with asyncio.timeout(kill_at_s):
                run.end = await controller.run()
        except TimeoutError:
            run.end = None
        if backend.fake_trainer is not None:
            run.trained, run.digest = backend.fake_trainer.trained, backend.fake_trainer.digest
        run.ended_s = loop.time()
        run.num_strikes = backend.world.injector.num_strikes

    run_virtual(main, debug=debug)
    return run


def _resume_point(run: SimRun) -> ResumePoint | None:
    if run.checkpoints.latest is None:
        run.recorder = MemoryRecorder()
        return None
    folder = run.checkpoints.latest
    control = json.loads(run.checkpoints.saved[folder])
    run.recorder.cut_back(control["num_rows"])
    return ResumePoint(folder=folder, control=control)
