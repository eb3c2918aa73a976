"""The watchdog with limits as tight as they may be: it leaves alone whatever still moves."""

import random
from dataclasses import replace

import pytest

from freewheel.config import check_config
from freewheel.config.sections import ModelConfig
from freewheel.simulation.run import simulate
from freewheel.simulation.settings import Faults, SimSettings
from freewheel.types import Purpose
from tests.simulation.scenarios import (
    FIELD_MODES,
    VALIDATION_MODES,
    check_samples,
    check_validations,
    random_config,
    random_settings,
    small_config,
)

COMBINATIONS = [(mode, validation) for mode in FIELD_MODES for validation in VALIDATION_MODES]
LONGEST_ROLLOUT_S = 160 / 20 + 0.1
"""All of `max_response_length` at the fakes' rate, and the reward."""


class Alarms:
    def __init__(self):
        self.sentences = []

    async def report(self, stall):
        self.sentences.append(stall.sentence())


def run_watched(config, settings, **when):
    alarms = Alarms()

    def act(controller, _backend):
        controller._reporter = alarms

    return simulate(config, settings, act=act, **when), alarms


def slow_settings(rng, seed, *, faults):
    """Durations far apart, so that each of them is the longest now and then."""
    base = random_settings(rng, seed, faults=faults)
    injuries = replace(
        base.faults,
        environment=rng.choice([0.05, 0.3]),
        replica_deaths_per_s=rng.choice([0.002, 0.01]),
        worker_deaths_per_s=rng.choice([0.002, 0.01]),
    )
    return replace(
        base,
        num_val_prompts=rng.choice([1, 5, 60]),
        startup_s=rng.choice([1.0, 20.0]),
        train_step_s=rng.choice([0.5, 4.0, 30.0]),
        update_s=rng.choice([0.1, 2.0, 15.0]),
        publish_s=rng.choice([0.1, 2.0, 15.0]),
        copy_s=rng.choice([0.1, 10.0]),
        write_s=rng.choice([0.5, 12.0]),
        faults=injuries if faults else Faults(),
    )


def tightest(rng, config, settings):
    """Each limit just above the longest time that the settings give for what it limits."""
    most = 1 + settings.jitter + 0.001
    timeout_s = rng.choice([LONGEST_ROLLOUT_S + 0.5, 20.0])
    config = replace(
        config,
        model=ModelConfig(path="model"),
        rollout=replace(config.rollout, timeout_s=timeout_s, reward_timeout_s=1.0),
        validation=replace(config.validation, timeout_s=timeout_s * rng.choice([1, 20])),
        health=replace(
            config.health,
            startup_timeout_s=most * settings.startup_s,
            train_step_timeout_s=most * settings.train_step_s,
            sync_timeout_s=most * max(settings.update_s, settings.publish_s),
            checkpoint_timeout_s=most * max(settings.write_s, settings.copy_s),
            prepare_timeout_s=1.0,
            replica_stall_s=1.0,  # 20 tokens
            grace_s=0.5,
            max_restarts=10_000,
            max_failed_groups_in_a_row=10_000,
            max_prompt_failures=10_000,
        ),
    )
    check_config(config)
    return config


def check_that_it_was_never_up(run):
    """The run ended by right: a worker died in each of its first three starts."""
    events = run.recorder.rows("events")
    who = [row["worker"] for row in events if row["event"] == "worker_lost"][-1]
    assert sum(row.get("worker") == who for row in events if row["event"] == "worker_lost") == 3
    up = {f"replica-{row['replica']}" for row in events if row["event"] == "replica_up"}
    up |= {f"rollout-worker-{r['worker']}" for r in events if r["event"] == "rollout_worker_up"}
    assert who not in up


@pytest.mark.parametrize(("mode", "validation_mode"), COMBINATIONS)
@pytest.mark.parametrize("faults", [False, True], ids=["healthy", "faulty"])
def test_no_run_that_moves_is_ended(mode, validation_mode, faults):
    for seed in range(12):  # 24 cases: 288 runs
        rng = random.Random(f"watched/{mode}/{validation_mode}/{faults}/{seed}")
        settings = slow_settings(rng, seed, faults=faults)
        config = tightest(rng, random_config(rng, mode, validation_mode), settings)
        try:
            run, alarms = run_watched(config, settings)
            assert alarms.sentences == []
            if faults and "was never up" in run.end.cause:
                check_that_it_was_never_up(run)
                continue
            assert run.end.exit_code == 0, run.end.cause
            stalled = [e for e in run.recorder.rows("events") if e["event"] == "replica_stalled"]
            # One that had died and that nobody called is found by its silence.
            assert all(faults and "no answer" in event["reason"] for event in stalled)
            check_samples(config, run)
            check_validations(config, run)
        except BaseException as error:
            error.add_note(f"seed {seed}: {config}\n{settings}")
            raise


def test_nothing_starts_while_the_rollouts_before_an_exclusive_validation_drain():
    """Not even the groups with failed members: those are many here."""
    begun, num_parked = [], 0

    def act(controller, _backend):
        roles = controller.roles
        lease = roles.pool._lease

        def watched(candidates, purpose, holder):
            nonlocal num_parked
            given = lease(candidates, purpose, holder)
            run = roles.validator.current
            if given is not None and purpose is Purpose.TRAINING and run is not None:
                begun.append((run.step, holder))
            num_parked += run is not None and bool(roles.admission._returning)
            return given

        roles.pool._lease = watched

    for seed in range(3):
        config = small_config(validation_mode="exclusive", total_training_steps=20)
        settings = SimSettings(seed=seed, faults=Faults(environment=0.3))
        run = simulate(config, settings, act=act)
        assert run.end.exit_code == 0, run.end.cause
        check_validations(config, run)
    assert begun == []
    assert num_parked > 0, "no group waited while a validation drained or ran"


def test_groups_that_wait_for_an_exclusive_validation_are_no_stall():
    """A member fails while the validation drains the replicas, and must wait until it is over."""
    config = small_config("async_stale", "exclusive")
    config = replace(
        config,
        async_training=replace(
            config.async_training, staleness_threshold=1.0, trigger_parameter_sync_step=1
        ),
        validation=replace(config.validation, timeout_s=400.0),
    )
    most_parked = 0
    for seed in range(4):
        settings = SimSettings(seed=seed, num_val_prompts=200, faults=Faults(environment=0.3))
        alarms = Alarms()

        def act(controller, _backend, alarms=alarms):
            nonlocal most_parked
            controller._reporter = alarms
            pin = controller.roles.pool.pin

            def watched(hold, replica_ids):
                nonlocal most_parked
                most_parked = max(most_parked, controller.roles.rollouter.num_running)
                pin(hold, replica_ids)

            controller.roles.pool.pin = watched

        run = simulate(config, settings, act=act)
        assert alarms.sentences == []
        assert run.end.exit_code == 0, run.end.cause
    assert most_parked > 0, "no group waited for a replica while a validation had them all"
