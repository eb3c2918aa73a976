"""Random scenarios over all modes, and the promises that every run must keep."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from freewheel.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    AsyncTrainingConfig,
    Config,
    DataConfig,
    HealthConfig,
    RolloutConfig,
    TrainerConfig,
    ValidationConfig,
)
from freewheel.control.controller import Controller
from freewheel.control.ledger import Group
from freewheel.simulation.fakes import FakeBackend
from freewheel.simulation.run import SimRun, simulate
from freewheel.simulation.settings import Faults, Lengths, SimSettings
from freewheel.types import Weights

FIELD_MODES: dict[str, dict[str, Any]] = {
    "on_policy": {"trigger_parameter_sync_step": 1, "staleness_threshold": 0.0},
    "stream_off_policy": {"trigger_parameter_sync_step": 3, "staleness_threshold": 0.0},
    "async_stale": {
        "trigger_parameter_sync_step": 2,
        "staleness_threshold": 0.5,
        "partial_rollout": False,
    },
    "async_partial": {"trigger_parameter_sync_step": 2, "staleness_threshold": 0.5},
}
REFUSED = "the validation of step"
"""How the reason begins of a validation for which there was no room: it was not even queued."""
VALIDATION_MODES = ("parallel", "exclusive", "dedicated")


def small_config(
    mode: str = "async_partial", validation_mode: str = "parallel", **trainer: Any
) -> Config:
    """Two replicas, groups of 3, 4 groups a step, 8 steps."""
    return Config(
        data=DataConfig(train_files="train", val_files="val"),
        rollout=RolloutConfig(n=3, replicas=2, max_response_length=160, timeout_s=30.0),
        actor=ActorConfig(ppo_mini_batch_size=4),
        async_training=AsyncTrainingConfig(**FIELD_MODES[mode], concurrent_samples_per_replica=4),
        validation=ValidationConfig(mode=validation_mode, n=2, timeout_s=60.0),
        trainer=TrainerConfig(
            **{"total_training_steps": 8, "test_freq": 2, "save_freq": 3, **trainer}
        ),
        health=HealthConfig(
            grace_s=5.0, startup_timeout_s=60.0, sync_timeout_s=30.0, max_restarts=100
        ),
    )


def random_config(rng: random.Random, mode: str, validation_mode: str) -> Config:
    """A configuration of the given modes with everything else drawn."""
    base = small_config(mode, validation_mode)
    steps = rng.choice([None, 5, 7])
    n = rng.choice([2, 3])
    return replace(
        base,
        rollout=replace(
            base.rollout,
            n=n,
            replicas=rng.choice([1, 2, 3]),
            num_workers=rng.choice([1, 2]),
            min_group_size=rng.choice([0, n]),
        ),
        actor=replace(base.actor, ppo_mini_batch_size=rng.choice([1, 2, 4])),
        algorithm=AlgorithmConfig(filter_groups=rng.random() < 0.3),
        async_training=replace(
            base.async_training,
            require_batches=rng.choice([1, 2]),
            concurrent_samples_per_replica=rng.choice([1, 2, 8]),
            max_staleness=None if rng.random() < 0.7 else 3,
        ),
        validation=replace(
            base.validation,
            max_queued=rng.choice([0, 1]),
            timeout_s=rng.choice([5.0, 60.0]),
            share=rng.choice([None, 1.0]) if validation_mode == "parallel" else None,
        ),
        trainer=replace(
            base.trainer,
            total_training_steps=steps,
            total_epochs=rng.choice([1, 2]),
            test_freq=rng.choice([1, 2, 3]),
            save_freq=rng.choice([1, 2, 3]),
            seed=rng.randrange(1000),
        ),
    )


def random_settings(rng: random.Random, seed: int, *, faults: bool) -> SimSettings:
    """Workers of random speed; with faults, some of everything goes wrong."""
    kind = rng.choice(["fixed", "lognormal", "pareto"])
    return SimSettings(
        seed=seed,
        num_prompts=rng.choice([11, 16, 23]),
        num_val_prompts=rng.choice([1, 5]),
        lengths=Lengths(kind=kind, mean=rng.choice([20.0, 60.0]), alpha=1.2),
        train_step_s=rng.choice([0.5, 4.0]),
        update_s=rng.choice([0.1, 2.0]),
        write_s=rng.choice([0.5, 12.0]),
        faults=Faults(
            environment=0.05,
            hang=0.02,
            over_long_prompt=0.1,
            replica_deaths_per_s=0.004,
            worker_deaths_per_s=0.004,
            update_death=0.01,
        )
        if faults
        else Faults(),
    )


@dataclass(slots=True)
class Watch:
    """Looks into a running simulation: the largest number of open groups at any start."""

    max_open: int = 0
    controllers: list[Controller] = field(default_factory=list)

    def __call__(self, controller: Controller, _backend: FakeBackend) -> None:
        self.controllers.append(controller)
        issue = controller.roles.ledger.issue

        def watched(**kwargs: Any) -> Group:
            group = issue(**kwargs)
            self.max_open = max(self.max_open, len(controller.roles.ledger.open))
            return group

        controller.roles.ledger.issue = watched


def run_and_check(
    config: Config,
    settings: SimSettings,
    *,
    act: Callable[[Controller, FakeBackend], Any] | None = None,
) -> SimRun:
    """Simulate to the end, and check every promise. `act` may injure before the run starts."""
    watch = Watch()

    def begin(controller: Controller, backend: FakeBackend) -> None:
        watch(controller, backend)
        if act is not None:
            act(controller, backend)

    run = simulate(config, settings, act=begin)
    assert run.end is not None
    assert run.end.exit_code == 0, run.end.cause
    assert watch.max_open <= config.max_slots
    check_run(config, run)
    return run


def check_run(config: Config, run: SimRun) -> None:
    """The promises that a completed run's records must keep."""
    check_samples(config, run)
    check_staleness(config, run)
    check_validations(config, run)
    check_each_validation_has_its_row(run)
    check_checkpoints(config, run)


def check_samples(config: Config, run: SimRun) -> None:
    rows = run.recorder.rows("samples")
    counts = Counter(row["status"] for row in rows)
    summary = run.end.summary["samples"]
    assert {k: v for k, v in summary.items() if k not in ("issued", "open") and v} == counts
    assert summary["issued"] == len(rows)
    assert summary["open"] == 0
    assert max(Counter(row["sample_id"] for row in rows).values()) == 1
    groups = {row["group_id"]: (row["epoch"], row["prompt_index"]) for row in rows}
    assert sorted(groups) == list(range(len(groups)))
    assert max(Counter(groups.values()).values()) == 1
    trained = Counter(t.sample_id for _, _, t in run.trained)
    assert max(trained.values(), default=1) == 1
    if config.trainer.total_training_steps is None:
        assert len({e for e, _ in groups.values()}) == config.trainer.total_epochs
    else:
        assert run.end.summary["steps"] == config.trainer.total_training_steps


def check_staleness(config: Config, run: SimRun) -> None:
    for _, version, trajectory in run.trained:
        versions = [v for v, _ in trajectory.version_spans]
        assert versions == sorted(versions)
        assert version - versions[0] <= config.async_training.staleness_bound
        assert versions[-1] <= version
        if (
            config.async_training.staleness_threshold == 0
            and not config.async_training.max_staleness
        ):
            assert set(versions) == {version}
        if not config.async_training.partial_rollout:
            assert len(versions) == 1


def check_validations(config: Config, run: SimRun) -> None:
    rows = run.recorder.rows("validations")
    steps = run.end.summary["steps"]
    due = {0, steps, *range(config.trainer.test_freq, steps + 1, config.trainer.test_freq)}
    assert sorted(row["step"] for row in rows) == sorted(due)
    for row in rows:
        assert row["mode"] == config.validation_mode
        if row["status"] == "skipped":
            assert row["reason"]
            continue
        assert set(row["response_versions"]) <= {str(row["policy_version"])}
        assert row["n_done"] == sum(row["response_versions"].values())
        assert row["n_total"] == row["n_done"] + row["n_timeout"] + sum(row["n_failed"].values())
        assert (row["status"] == "complete") == (row["n_done"] == row["n_total"])
        assert bool(row["reason"]) == (row["status"] == "partial")
    assert run.end.summary["validations"] == len(rows)


def check_each_validation_has_its_row(run: SimRun) -> None:
    """Of a run that was never resumed, however it ended: what was asked for ends as one row."""
    rows = run.recorder.rows("validations")
    requested = Counter(
        row["step"] for row in run.recorder.rows("events") if row["event"] == "validation_requested"
    )
    refused = Counter(row["step"] for row in rows if row["reason"].startswith(REFUSED))
    assert Counter(row["step"] for row in rows) == requested + refused


def check_checkpoints(config: Config, run: SimRun) -> None:
    steps = run.end.summary["steps"]
    due = {steps, *range(config.trainer.save_freq, steps + 1, config.trainer.save_freq)}
    assert set(run.end.summary["checkpoints"]) == due


def before_updates(backend: FakeBackend, before: Callable[[int, Weights], Awaitable[None]]) -> None:
    """Await `before(replica_id, weights)` in front of each replica's updates; it may raise."""
    make = backend.replica

    def replica(replica_id: int) -> Any:
        fake = make(replica_id)
        update = fake.update_weights

        async def update_weights(weights: Weights) -> None:
            await before(replica_id, weights)
            await update(weights)

        fake.update_weights = update_weights
        return fake

    backend.replica = replica


def trials_that_hang(prompt_index: int) -> Callable[[Controller, FakeBackend], None]:
    """For `act`: the trials of one held-out prompt never return from their environment."""

    def injure(_controller: Controller, backend: FakeBackend) -> None:
        make = backend.rollout_worker

        def worker(worker_id: int) -> Any:
            fake: Any = make(worker_id)
            run_environment = fake._run_environment

            async def run(request: Any, replica: Any, rng: random.Random) -> Any:
                if request.purpose == "validation" and request.prompt_index == prompt_index:
                    await asyncio.Event().wait()
                return await run_environment(request, replica, rng)

            fake._run_environment = run
            return fake

        backend.rollout_worker = worker

    return injure
