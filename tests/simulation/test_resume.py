"""Stopped or killed at any moment, then resumed: one story, nothing lost, nothing trained twice."""

import random
from collections import Counter

import pytest

from freewheel.simulation.run import SimRun, simulate
from tests.audit import audit
from tests.simulation.run_files import write_run
from tests.simulation.scenarios import (
    FIELD_MODES,
    check_samples,
    random_config,
    random_settings,
    small_config,
)


def finish(config, settings, run: SimRun) -> SimRun:
    run = simulate(config, settings, run=run)
    assert run.end is not None
    assert run.end.exit_code == 0, run.end.cause
    return run


def trained_steps(run: SimRun) -> list[int]:
    return [row["step"] for row in run.recorder.rows("metrics")]


def check_story(config, settings, run: SimRun, folder) -> None:
    """The records of all lives together read as those of one run."""
    write_run(config, settings, run, folder)
    assert audit(folder) == []
    run.trained.clear()  # they are those of the last life only
    check_samples(config, run)
    steps = trained_steps(run)
    assert steps == list(range(1, len(steps) + 1))
    rows = run.recorder.rows("samples")
    for step in steps:
        groups = {row["group_id"] for row in rows if row["trained_step"] == step}
        is_last = step == len(steps) and config.trainer.total_training_steps is None
        assert len(groups) == config.groups_per_step or is_last


@pytest.mark.parametrize("mode", FIELD_MODES)
@pytest.mark.parametrize("stop_at_s", [0.5, 3.0, 11.0, 27.0, 41.0])
def test_stopped_and_resumed(mode, stop_at_s, tmp_path):
    config = small_config(mode, total_training_steps=None, total_epochs=2)
    settings = random_settings(random.Random(1), 1, faults=False)
    run = simulate(config, settings, stop_at_s=stop_at_s)
    assert run.end.exit_code == 130
    assert run.end.status == "stopped"
    assert run.ended_s - stop_at_s <= config.health.shutdown_timeout_s + 5
    write_run(config, settings, run, tmp_path / "stopped")
    assert audit(tmp_path / "stopped") == []
    check_story(config, settings, finish(config, settings, run), tmp_path / "done")


@pytest.mark.parametrize("mode", FIELD_MODES)
def test_killed_at_random_moments_and_resumed(mode, tmp_path):
    for seed in range(50):  # 4 modes: 200 kill points
        rng = random.Random(f"kill/{mode}/{seed}")
        config = random_config(rng, mode, rng.choice(["parallel", "exclusive", "dedicated"]))
        settings = random_settings(rng, seed, faults=rng.random() < 0.5)
        run = SimRun()
        try:
            for _ in range(rng.choice([1, 1, 3])):
                run = simulate(config, settings, run=run, kill_at_s=rng.uniform(1.0, 60.0))
            check_story(config, settings, finish(config, settings, run), tmp_path / str(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}: {config}\n{settings}")
            raise


def test_a_stop_between_two_publications_keeps_the_version_that_rollouts_had():
    config = small_config("stream_off_policy", save_freq=1, total_training_steps=9)
    settings = random_settings(random.Random(3), 3, faults=False)
    whole = finish(config, settings, SimRun())
    for kill_at_s in (14.0, 22.0, 30.0):
        run = simulate(config, settings, kill_at_s=kill_at_s)
        resumed = finish(config, settings, run)
        for row, expected in zip(
            resumed.recorder.rows("metrics"), whole.recorder.rows("metrics"), strict=True
        ):
            assert row["policy_version"] == expected["policy_version"]
            assert row["fully_async/staleness/max"] == 0


def test_on_policy_run_killed_and_resumed_reaches_the_same_weights():
    config = small_config("on_policy", save_freq=1)
    settings = random_settings(random.Random(4), 4, faults=False)
    whole = finish(config, settings, SimRun())
    rows = whole.recorder.rows("events")
    cuts = [row["t_s"] for row in rows if row["event"] == "checkpoint_saved"]
    run = simulate(config, settings, kill_at_s=cuts[3] + 0.01)
    resumed = finish(config, settings, run)
    by_step = Counter(
        (row["trained_step"], row["prompt_index"]) for row in whole.recorder.rows("samples")
    )
    assert by_step == Counter(
        (row["trained_step"], row["prompt_index"]) for row in resumed.recorder.rows("samples")
    )
