"""Every validation that was asked for ends as one row, whenever and however the run ends."""

import asyncio
import random
from dataclasses import replace

import pytest

from freewheel.simulation.run import simulate
from freewheel.simulation.settings import SimSettings
from tests.simulation.scenarios import (
    FIELD_MODES,
    VALIDATION_MODES,
    check_each_validation_has_its_row,
    random_config,
    random_settings,
    small_config,
)


def slow_workers(startup_s):
    """Rollout workers that come up so much later than everything else."""

    def act(_controller, backend):
        make = backend.rollout_worker

        def rollout_worker(worker_id):
            worker = make(worker_id)
            start = worker.start

            async def start_late():
                await asyncio.sleep(startup_s)
                return await start()

            worker.start = start_late
            return worker

        backend.rollout_worker = rollout_worker

    return act


def test_a_validation_that_waits_for_the_first_worker_at_a_stop_is_skipped_with_its_reason():
    run = simulate(small_config(), SimSettings(seed=1), act=slow_workers(40.0), stop_at_s=10.0)
    assert run.end.exit_code == 130
    (row,) = run.recorder.rows("validations")
    assert (row["step"], row["status"]) == (0, "skipped")
    assert row["reason"] == "the run ended before it could start"
    assert run.end.summary["validations"] == 1


def test_a_validation_that_waits_for_the_first_worker_when_the_run_fails_has_its_row():
    config = small_config()
    config = replace(config, health=replace(config.health, startup_timeout_s=30.0))
    run = simulate(config, SimSettings(seed=1), act=slow_workers(40.0))
    assert run.end.exit_code == 3, run.end.cause
    assert [row["step"] for row in run.recorder.rows("validations")] == [0]


@pytest.mark.parametrize("mode", FIELD_MODES)
@pytest.mark.parametrize("validation_mode", VALIDATION_MODES)
def test_whenever_a_run_is_stopped_each_validation_has_its_row(mode, validation_mode):
    for seed in range(12):  # 12 combinations: 144 runs
        rng = random.Random(f"stopped/{mode}/{validation_mode}/{seed}")
        config = random_config(rng, mode, validation_mode)
        settings = random_settings(rng, seed, faults=rng.random() < 0.5)
        act = slow_workers(rng.choice([0.0, 0.5, 20.0]))
        run = simulate(config, settings, act=act, stop_at_s=rng.uniform(0.1, 60.0))
        assert run.end.exit_code in (0, 130), run.end.cause
        check_each_validation_has_its_row(run)
