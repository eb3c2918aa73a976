"""Stopped or killed at any moment, then resumed: one story, nothing lost, nothing trained twice."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from freewheel.checkpoint.control_state import control_problem
from freewheel.simulation.run import SimRun, simulate
from freewheel.simulation.settings import Faults
from tests.audit import audit
from tests.simulation.run_files import write_run
from tests.simulation.scenarios import (
    FIELD_MODES,
    VALIDATION_MODES,
    check_samples,
    check_staleness,
    check_validations,
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


def check_audited(config, settings, run: SimRun, folder) -> None:
    """The run as a folder keeps its contract, and reads as one story."""
    write_run(config, settings, run, folder)
    assert audit(folder) == []
    check_story(config, run)


def check_story(config, run: SimRun) -> None:
    """The records of all lives together read as those of one run."""
    check_staleness(config, run)
    check_validations(config, run)
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
    assert run.ended_s - stop_at_s <= config.health.shutdown_timeout_s
    write_run(config, settings, run, tmp_path / "stopped")
    assert audit(tmp_path / "stopped") == []
    check_audited(config, settings, finish(config, settings, run), tmp_path / "done")


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
            check_audited(config, settings, finish(config, settings, run), tmp_path / str(seed))
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


def trained_samples(run: SimRun) -> list[tuple[object, ...]]:
    """What was trained in all lives together, in order: the same list means the same learning."""
    keys = ("trained_step", "sample_id", "epoch", "prompt_index", "reward", "version_spans")
    rows = [row for row in run.recorder.rows("samples") if row["status"] == "trained"]
    rows.sort(key=lambda row: (row["trained_step"], row["sample_id"]))
    return [tuple(str(row[key]) for key in keys) for row in rows]


def kill_after_a_checkpoint(config, settings, whole: SimRun, rng: random.Random) -> SimRun:
    """One life, killed at a random moment after its first checkpoint."""
    events = whole.recorder.rows("events")
    first = next(row["t_s"] for row in events if row["event"] == "checkpoint_saved")
    run = simulate(config, settings, kill_at_s=rng.uniform(first + 1e-6, whole.ended_s - 1e-6))
    assert run.end is None
    return run


def test_on_policy_runs_killed_and_resumed_reach_the_same_weights():
    """No generation is in flight at an on-policy cut: in 100 runs all training has one digest."""
    for seed in range(100):
        rng = random.Random(f"same/{seed}")
        config = random_config(rng, "on_policy", rng.choice(VALIDATION_MODES))
        staleness = replace(config.async_training, max_staleness=None)
        config = replace(config, async_training=staleness)
        settings = random_settings(rng, seed, faults=False)
        faults = Faults(environment=0.05, over_long_prompt=0.1) if seed % 2 else Faults()
        settings = replace(settings, faults=faults)
        try:
            whole = finish(config, settings, SimRun())
            run = kill_after_a_checkpoint(config, settings, whole, rng)
            for text in run.checkpoints.saved.values():
                assert json.loads(text)["ledger"]["open"] == []
            if rng.random() < 0.3:
                run = simulate(config, settings, run=run, kill_at_s=rng.uniform(1.0, 20.0))
            resumed = finish(config, settings, run)
            assert resumed.digest == whole.digest
            assert trained_samples(resumed) == trained_samples(whole)
        except BaseException as error:
            error.add_note(f"seed {seed}: {config}\n{settings}")
            raise


@pytest.mark.parametrize("mode", ["stream_off_policy", "async_stale", "async_partial"])
def test_runs_killed_with_generations_in_flight_train_on_the_same_prompts(mode):
    num_in_flight = 0
    for seed in range(25):
        rng = random.Random(f"prompts/{mode}/{seed}")
        config = random_config(rng, mode, rng.choice(VALIDATION_MODES))
        config = replace(config, algorithm=replace(config.algorithm, filter_groups=False))
        config = replace(config, trainer=replace(config.trainer, save_freq=1))
        settings = replace(random_settings(rng, seed, faults=False), train_step_s=0.5, write_s=0.5)
        try:
            whole = finish(config, settings, SimRun())
            run = kill_after_a_checkpoint(config, settings, whole, rng)
            control = json.loads(run.checkpoints.saved[run.checkpoints.latest])
            num_in_flight += any(not group["ready"] for group in control["ledger"]["open"])
            resumed = finish(config, settings, run)
            prompts = [
                Counter(
                    (row["epoch"], row["prompt_index"])
                    for row in each.recorder.rows("samples")
                    if row["status"] == "trained"
                )
                for each in (whole, resumed)
            ]
            assert prompts[0] == prompts[1]
        except BaseException as error:
            error.add_note(f"seed {seed}: {config}\n{settings}")
            raise
    assert num_in_flight >= 5


def test_what_the_controller_writes_has_the_shape_that_a_resume_asks_for():
    config = small_config(save_freq=1)
    run = simulate(config, random_settings(random.Random(5), 5, faults=True))
    assert run.end.exit_code == 0, run.end.cause
    texts = list(run.checkpoints.saved.values())
    assert texts
    assert any(json.loads(text)["ledger"]["open"] for text in texts)
    assert [control_problem(json.loads(text)) for text in texts] == [None] * len(texts)


@pytest.mark.parametrize(
    "changes",
    [
        {"replicas": 4, "num_workers": 3},
        {"replicas": 1, "num_workers": 1},
        {"timeout_s": 12.0, "temperature": 0.7, "min_group_size": 2},
    ],
)
def test_resumed_on_other_workers_and_with_other_settings(changes):
    config = small_config(total_training_steps=None, total_epochs=2, save_freq=2)
    settings = random_settings(random.Random(6), 6, faults=False)
    run = simulate(config, settings, kill_at_s=14.0)
    assert run.checkpoints.latest is not None
    other = replace(
        config,
        rollout=replace(config.rollout, **changes),
        actor=replace(config.actor, optim=replace(config.actor.optim, lr=2e-6)),
        trainer=replace(config.trainer, save_freq=1),
    )
    versions_before = [row["policy_version"] for row in run.recorder.rows("metrics")]
    resumed = finish(other, settings, run)
    check_story(other, resumed)
    versions = [row["policy_version"] for row in resumed.recorder.rows("metrics")]
    assert versions == sorted(versions)
    assert len(versions) > len(versions_before)


def test_changed_held_out_prompts_are_refused_and_beginning_to_validate_is_not():
    config = small_config(save_freq=2)
    settings = random_settings(random.Random(7), 7, faults=False)
    run = simulate(config, settings, kill_at_s=25.0)
    folder = run.checkpoints.latest
    saved = json.loads(run.checkpoints.saved[folder])
    assert saved["val_data_fingerprint"] == "validation"
    run.checkpoints.saved[folder] = json.dumps({**saved, "val_data_fingerprint": "other"})
    refused = simulate(config, settings, run=run)
    assert refused.end.exit_code == 7
    assert "data.val_files" in refused.end.cause
    assert "fingerprint other, now validation" in refused.end.cause
    run.checkpoints.saved[folder] = json.dumps({**saved, "val_data_fingerprint": None})
    finish(config, settings, run)
