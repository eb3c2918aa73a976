"""The hang sweep's cases: a tiny run, one failure at a random moment, and how it may end.

To run one seed by itself: `run_case("engine_frozen", "async_partial", 17)`.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Any

from freewheel.config.sections import (
    ActorConfig,
    AsyncTrainingConfig,
    Config,
    DataConfig,
    HealthConfig,
    RolloutConfig,
    TrainerConfig,
    ValidationConfig,
)
from freewheel.simulation.run import SimRun, simulate
from freewheel.simulation.settings import Failure, Faults, Injection, Lengths, SimSettings
from tests.simulation.scenarios import (
    FIELD_MODES,
    VALIDATION_MODES,
    Watch,
    check_run,
)
from tests.simulation.standstill import Observer

_USER_CODE = {
    Failure.ENVIRONMENT_NEVER_RETURNS,
    Failure.ENVIRONMENT_BLOCKS_LOOP,
    Failure.ENVIRONMENT_IGNORES_CANCELLATION,
    Failure.REWARD_NEVER_RETURNS,
    Failure.TOOL_NEVER_RETURNS,
}
_TRAINER = {Failure.TRAINER_FROZEN, Failure.TRAINER_KILLED}
_FREEZES = {Failure.ENGINE_FROZEN, Failure.WORKER_FROZEN, Failure.TRAINER_FROZEN}
_CHECKPOINT = {Failure.CHECKPOINT_DISK_FULL, Failure.CHECKPOINT_NEVER_RETURNS}


@dataclass(slots=True)
class Stalls:
    """Reporter of a simulated run."""

    stalls: list[Any] = field(default_factory=list)
    blocks: list[tuple[str, str]] = field(default_factory=list)

    async def report(self, stall: Any) -> None:
        self.stalls.append(stall)

    async def report_block(self, process: str, cause: str) -> None:
        self.blocks.append((process, cause))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of the sweep."""

    failure: Failure
    config: Config
    settings: SimSettings

    @property
    def injection(self) -> Injection:
        return self.settings.faults.injection


def make_case(failure: Failure, mode: str, seed: int) -> Case:
    """Everything that the failure, the mode and the seed decide."""
    rng = random.Random(f"{failure}/{mode}/{seed}")
    config = tiny_config(rng, mode)
    settings = SimSettings(
        seed=seed,
        num_prompts=8,
        num_val_prompts=2,
        lengths=Lengths(mean=20.0),
        train_step_s=rng.choice([0.5, 1.5]),
        update_s=0.3,
        write_s=rng.choice([0.5, 3.0]),
        startup_s=0.5,
        faults=Faults(injection=_draw_injection(rng, failure)),
    )
    return Case(failure=failure, config=config, settings=settings)


def tiny_config(rng: random.Random, mode: str) -> Config:
    """Four steps of one or two groups of two on one or two replicas; limits of seconds."""
    return Config(
        data=DataConfig(train_files="train", val_files="val"),
        rollout=RolloutConfig(
            n=2,
            replicas=rng.choice([1, 2]),
            num_workers=rng.choice([1, 2]),
            max_response_length=80,
            timeout_s=10.0,
        ),
        actor=ActorConfig(ppo_mini_batch_size=rng.choice([1, 2])),
        async_training=AsyncTrainingConfig(**FIELD_MODES[mode], concurrent_samples_per_replica=2),
        validation=ValidationConfig(
            mode=rng.choice(VALIDATION_MODES), n=1, timeout_s=25.0, max_queued=rng.choice([0, 1])
        ),
        trainer=TrainerConfig(total_training_steps=4, test_freq=2, save_freq=2),
        health=HealthConfig(
            grace_s=2.0,
            startup_timeout_s=12.0,
            sync_timeout_s=8.0,
            train_step_timeout_s=12.0,
            checkpoint_timeout_s=10.0,
            prepare_timeout_s=6.0,
            replica_stall_s=6.0,
            stall_timeout_s=60.0,
            max_failed_groups_in_a_row=8,
            watchdog=rng.choice(["end", "recover"]),
        ),
    )


def _draw_injection(rng: random.Random, failure: Failure) -> Injection:
    """A moment while the run is under way; a start-up now and then."""
    at_s = rng.uniform(0.0, 9.0)
    times: int | None = 1
    if failure in _USER_CODE or failure is Failure.TRIAL_NEVER_RETURNS:
        times = rng.choice([1, 3, None])
    if failure is Failure.NEVER_PLACED and rng.random() < 0.5:
        at_s = 0.0
    if failure in _CHECKPOINT:
        at_s = rng.uniform(0.0, 6.0)
    return Injection(failure=failure, at_s=at_s, times=times)


def may_end_with(case: Case) -> dict[int, str]:
    """The exit codes that are documented for the failure, each with what its cause must say."""
    failure, ends = case.failure, {0: "^$"}
    if failure in _USER_CODE and (
        case.injection.times is None or failure is Failure.ENVIRONMENT_BLOCKS_LOOP
    ):
        ends[4] = r"^StalledError: 8 groups in a row failed .*'timeout': \d+.* s are over$"
    elif failure in _CHECKPOINT:
        ends[7] = (
            r"^CheckpointError: .*No space left on device$"
            if failure is Failure.CHECKPOINT_DISK_FULL
            else r"^CheckpointError: checkpoint of step \d: (\w+ )?not (copied|written) within 10 s"
        )
    elif failure is Failure.NEVER_PLACED:
        # A run may also complete without the one that is missing, before the limit is over.
        who = r"(replica-\d|rollout-worker-\d|the trainer)"
        ends[3] = rf"^StartupError: {who} did not come up within 12 s \(health.startup_timeout_s"
    elif failure in _TRAINER:
        ends |= _trainer_ends(failure)
    elif failure in _FREEZES:
        # It struck a process that was starting.
        ends[3] = r"^StartupError: (replica|rollout-worker)-\d did not come up within 12 s"
    return ends


def _trainer_ends(failure: Failure) -> dict[int, str]:
    if failure is Failure.TRAINER_KILLED:
        return {}
    return {
        3: "^StartupError: the trainer did not come up within 12 s",
        # It froze while a checkpoint was written: that has a limit of its own.
        7: r"^CheckpointError: checkpoint of step \d: state not written within 10 s",
    }


def run_case(failure: Failure | str, mode: str, seed: int) -> SimRun:
    """Run one case and check all that the sweep promises.

    Raises:
        AssertionError: a promise was broken; its notes name the case.
        DeadlockError, BlockedLoopError: the run hung.
    """
    case = make_case(Failure(failure), mode, seed)
    try:
        return _run_and_check(case)
    except BaseException as error:
        error.add_note(f"run_case({failure!r}, {mode!r}, {seed}): {case.injection}")
        raise


def _run_and_check(case: Case) -> SimRun:
    watch, observer, stalls = Watch(), Observer(), Stalls()

    def act(controller: Any, backend: Any) -> None:
        watch(controller, backend)
        observer(controller, backend)

    run = simulate(case.config, case.settings, act=act, reporter=stalls, kill_at_s=600.0)
    assert run.end is not None, "the run goes on and on"
    assert observer.late == []
    assert stalls.stalls == []
    ends = may_end_with(case)
    assert run.end.exit_code in ends, run.end.cause
    assert re.search(ends[run.end.exit_code], run.end.cause), run.end.cause
    struck = run.num_strikes > 0
    assert struck or run.end.exit_code == 0, run.end.cause
    if case.failure in _TRAINER | _CHECKPOINT and struck and run.end.exit_code == 0:
        replaced = run.end.summary["restarts"] > 0
        assert replaced or _was_over(run, case), "the failure had no effect"
    if run.end.exit_code == 0:
        assert watch.max_open <= case.config.max_slots
        check_run(case.config, run)
    return run


def _was_over(run: SimRun, case: Case) -> bool:
    """True if the trainer had nothing more to do when the failure struck it."""
    events = run.recorder.rows("events")
    last = max(e["t_s"] for e in events if e["event"] in ("checkpoint_saved", "weights_published"))
    return case.failure in _TRAINER and case.injection.at_s >= last
