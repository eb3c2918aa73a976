"""A validation that ran when its run was killed goes on: same version, the missing trials."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from freewheel.errors import ReplicaLostError, TrainerLostError
from freewheel.simulation.run import SimRun, simulate
from freewheel.simulation.settings import Faults, Lengths
from tests.simulation.scenarios import (
    FIELD_MODES,
    VALIDATION_MODES,
    check_samples,
    check_staleness,
    check_validations,
    random_config,
    random_settings,
    small_config,
    trials_that_hang,
)

SETTINGS = replace(
    random_settings(random.Random(5), 5, faults=False),
    num_prompts=64,
    num_val_prompts=40,
    lengths=Lengths(kind="lognormal", mean=40.0),
    train_step_s=1.0,
    write_s=0.5,
    update_s=0.5,
)


class Trials:
    """Counts the trials that a life asks its rollout workers for, and those that came back."""

    def __init__(self):
        self.asked = Counter()

    def __call__(self, controller, backend):
        make = backend.rollout_worker

        def worker(worker_id):
            fake = make(worker_id)
            run_group = fake.run_group

            async def counted(request, replica):
                if request.purpose == "validation":
                    self.asked.update(member.sample_id for member in request.members)
                return await run_group(request, replica)

            fake.run_group = counted
            return fake

        backend.rollout_worker = worker


def events(run, name):
    return [row for row in run.recorder.rows("events") if row["event"] == name]


def kept(run):
    """What the newest checkpoint says."""
    return json.loads(run.checkpoints.saved[run.checkpoints.latest])


def half_done(control):
    """The validation that ran at the cut, if some of its trials had ended and some had not."""
    for row in control["validations"]:
        if row["progress"] and 0 < len(row["progress"]["done"]) < 80:
            return row
    return None


def row_of(run, step):
    rows = [row for row in run.recorder.rows("validations") if row["step"] == step]
    assert len(rows) == 1
    return rows[0]


def kill_in_validation(config, settings=SETTINGS, *, kept_some="done", at_least=1):
    """Kill after the first checkpoint that was cut in a validation and keeps some of this."""
    whole = simulate(config, settings)
    assert whole.end.exit_code == 0, whole.end.cause
    for saved in events(whole, "checkpoint_saved"):
        run = simulate(config, settings, kill_at_s=saved["t_s"] + 0.01)
        due = half_done(kept(run))
        enough = len(kept(run)["held_versions"]) >= at_least
        if enough and due and due["progress"][kept_some]:
            return whole, run
    raise AssertionError("no checkpoint was cut while a validation ran")


def stop_in_validation(config, settings=SETTINGS):
    """Stop in the middle of the validation of step 4."""
    whole = simulate(config, settings)
    assert whole.end.exit_code == 0, whole.end.cause
    row = row_of(whole, 4)
    # The step under way ends first, so an early moment may still come too late.
    for share in [k / 20 for k in range(19, -20, -1)]:
        wall_s = row["ended_s"] - row["started_s"]
        run = simulate(config, settings, stop_at_s=row["started_s"] + share * wall_s)
        assert run.end.exit_code == 130
        if half_done(kept(run)):
            return whole, run
    raise AssertionError("no stop came in the middle of the validation")


def check_resumed(config, run, whole):
    """Go on, and compare every validation of the cut with what the run would have had."""
    control = kept(run)
    ended = {
        f"val{due['step']}-{index}-{number}"
        for due in control["validations"]
        if due["progress"]
        for index, number, _ in due["progress"]["done"]
    }
    trials = Trials()
    run = simulate(config, SETTINGS, run=run, act=trials)
    assert run.end.exit_code == 0, run.end.cause
    assert ended
    assert not ended & set(trials.asked)
    assert set(trials.asked.values()) == {1}
    for due in control["validations"]:
        resumed, expected = row_of(run, due["step"]), row_of(whole, due["step"])
        assert resumed["policy_version"] == due["version"]
        assert resumed["response_versions"] == {str(due["version"]): 80}
        for key in ("status", "n_total", "n_done", "score", "ci95", "metrics", "score_lower"):
            assert resumed[key] == expected[key], key
    check_validations(config, run)


@pytest.mark.parametrize("validation_mode", ["parallel", "dedicated"])
@pytest.mark.parametrize("mode", FIELD_MODES)
def test_killed_in_a_validation_and_resumed(mode, validation_mode):
    config = small_config(mode, validation_mode, save_freq=1, test_freq=100)
    whole, run = kill_in_validation(config)
    check_resumed(config, run, whole)


@pytest.mark.parametrize("mode", ["async_stale", "async_partial"])
def test_killed_in_an_exclusive_validation_and_resumed(mode):
    config = small_config(mode, "exclusive", save_freq=1, test_freq=2)
    settings = replace(SETTINGS, train_step_s=4.0)
    whole, run = kill_in_validation(config, settings)
    check_resumed(config, run, whole)


@pytest.mark.parametrize("validation_mode", VALIDATION_MODES)
@pytest.mark.parametrize("mode", FIELD_MODES)
def test_stopped_in_a_validation_and_resumed(mode, validation_mode):
    config = small_config(mode, validation_mode, save_freq=100, test_freq=4)
    whole, run = stop_in_validation(config, replace(SETTINGS, train_step_s=0.5))
    cut_short = row_of(run, 4)
    assert cut_short["status"] == "partial"
    check_resumed(config, run, whole)


def test_a_checkpoint_carries_each_version_that_is_needed_once():
    """The running validation's, the queued one's, the one of the rollouts; not the trainer's."""
    config = small_config("stream_off_policy", save_freq=1, test_freq=2)
    seen = set()
    whole = simulate(config, SETTINGS)
    for saved in events(whole, "checkpoint_saved"):
        run = simulate(config, SETTINGS, kill_at_s=saved["t_s"] + 0.01)
        control = kept(run)
        held = [w.version for w in run.disk.states[str(run.checkpoints.latest)]["held"]]
        assert held == control["held_versions"] == sorted(set(held))
        assert len(held) <= 2 + config.validation.max_queued
        wanted = {due["version"] for due in control["validations"]}
        if control["train"]["steps_since_publish"] != 3:
            wanted.add(control["train"]["version"])
        assert set(held) == wanted
        seen.add(len(held))
    assert {1, 2} <= seen


def test_a_queued_validation_keeps_its_version_and_its_turn():
    config = small_config("async_partial", "dedicated", save_freq=5, test_freq=2)
    run = simulate(config, SETTINGS, kill_at_s=25.0)
    control = kept(run)
    assert [(due["step"], due["version"]) for due in control["validations"]] == [(0, 0), (2, 1)]
    assert control["train"]["version"] == 2
    assert control["held_versions"] == [0, 1, 2]
    run = simulate(config, SETTINGS, run=run)
    rows = [row_of(run, step) for step in (0, 2)]
    assert [row["status"] for row in rows] == ["complete", "complete"]
    assert [row["response_versions"] for row in rows] == [{"0": 80}, {"1": 80}]
    assert rows[0]["ended_s"] <= rows[1]["started_s"]
    taken_back = [row["version"] for row in events(run, "weights_taken_back")]
    assert taken_back == [0, 1]


@pytest.mark.parametrize("mode", ["stream_off_policy", "async_partial"])
def test_a_trainer_that_is_lost_after_the_resume_leaves_the_validation_alone(mode):
    """It starts again from the checkpoint, which carries several versions."""
    config = small_config(mode, save_freq=1, test_freq=2)
    whole, run = kill_in_validation(config, at_least=2)
    lost = 0

    def lose_trainer(controller, backend):
        train_step = backend.fake_trainer.train_step

        async def lose(request):
            nonlocal lost
            lost += 1
            if lost > 1:
                return await train_step(request)
            raise TrainerLostError("the trainer died")

        backend.fake_trainer.train_step = lose

    run = simulate(config, SETTINGS, run=run, act=lose_trainer)
    assert run.end.exit_code == 0, run.end.cause
    assert lost == 1
    assert run.end.summary["restarts"] == 1
    assert row_of(run, 0)["score"] == row_of(whole, 0)["score"]
    check_validations(config, run)
    check_staleness(config, run)


def test_the_deadline_of_a_resumed_validation_is_the_one_that_it_had():
    config = small_config("async_partial", "dedicated", save_freq=2, test_freq=100)
    validation = replace(config.validation, timeout_s=40.0, trial_timeout_s=35.0)
    config = replace(config, validation=validation)
    settings = replace(SETTINGS, num_val_prompts=8, startup_s=20.0)
    run = simulate(config, settings, act=trials_that_hang(3), kill_at_s=50.0)
    progress = kept(run)["validations"][0]["progress"]
    assert 5.0 < progress["elapsed_s"] < 40.0
    num_events = len(run.recorder.rows("events"))
    run = simulate(config, settings, act=trials_that_hang(3), run=run)
    second_life = run.recorder.rows("events")[num_events:]
    first_at = {"weights_activated": None, "validation_timeout": None}
    for row in reversed(second_life):
        if row["event"] == "validation_timeout" or (
            row["event"] == "weights_activated" and row["version"] == 0
        ):
            first_at[row["event"]] = row["t_s"]
    # The start of the processes is not in it.
    assert first_at["weights_activated"] > 15.0
    left_s = first_at["validation_timeout"] - first_at["weights_activated"]
    assert left_s == pytest.approx(40.0 - progress["elapsed_s"], abs=1e-6)
    row = row_of(run, 0)
    assert (row["status"], row["n_total"], row["n_done"], row["n_timeout"]) == (
        "partial",
        16,
        14,
        2,
    )
    assert row["started_s"] == pytest.approx(progress["started_s"], abs=1e-6)


def test_a_failed_trial_is_neither_run_again_nor_counted_twice():
    config = small_config("async_partial", "dedicated", save_freq=1, test_freq=100)
    config = replace(config, rollout=replace(config.rollout, retries={}))
    settings = replace(SETTINGS, faults=Faults(environment=0.2))
    whole, run = kill_in_validation(config, settings, kept_some="failed")
    run = simulate(config, settings, run=run)
    assert row_of(run, 0)["n_failed"] == row_of(whole, 0)["n_failed"]
    assert row_of(run, 0)["n_done"] == row_of(whole, 0)["n_done"] < 80


def test_a_trial_keeps_the_attempts_that_it_had():
    config = small_config("async_partial", "dedicated", save_freq=1, test_freq=100)
    settings = replace(SETTINGS, faults=Faults(environment=0.2))
    whole, run = kill_in_validation(config, settings, kept_some="failed_attempts")
    run = simulate(config, settings, run=run)
    for key in ("n_failed", "n_done", "score"):
        assert row_of(run, 0)[key] == row_of(whole, 0)[key]


def test_other_trials_than_before_start_again_under_the_same_version():
    config = small_config("async_partial", save_freq=1, test_freq=100)
    _, run = kill_in_validation(config)
    config = replace(config, validation=replace(config.validation, n=3))
    run = simulate(config, SETTINGS, run=run)
    assert row_of(run, 0)["response_versions"] == {"0": 120}
    assert [row["step"] for row in events(run, "validation_restarted")] == [0]
    check_validations(config, run)


def test_a_checkpoint_of_before_without_the_weights_says_what_was_skipped():
    config = small_config("async_partial", save_freq=2, test_freq=100)
    _, run = kill_in_validation(config)
    folder = run.checkpoints.latest
    control = kept(run)
    assert control.pop("held_versions") == [0]
    assert control["train"]["steps_since_publish"] == 2
    for due in control["validations"]:
        del due["progress"]
    run.checkpoints.saved[folder] = json.dumps(control)
    run.disk.states[str(folder)]["held"] = ()
    run = simulate(config, SETTINGS, run=run)
    assert run.end.exit_code == 0, run.end.cause
    assert row_of(run, 0)["status"] == "skipped"
    assert "its policy version is gone" in row_of(run, 0)["reason"]
    check_validations(config, run)


def test_no_held_out_data_any_more():
    config = small_config("async_partial", save_freq=1, test_freq=100)
    _, run = kill_in_validation(config)
    config = replace(config, data=replace(config.data, val_files=""))
    run = simulate(config, SETTINGS, run=run)
    assert run.end.exit_code == 0, run.end.cause
    assert "without data.val_files" in row_of(run, 0)["reason"]


def test_killed_at_random_moments_with_validations_all_the_time():
    num_taken_up = 0
    for seed in range(60):
        rng = random.Random(f"validation/{seed}")
        config = random_config(rng, rng.choice([*FIELD_MODES]), rng.choice(VALIDATION_MODES))
        config = replace(config, trainer=replace(config.trainer, save_freq=1, test_freq=1))
        settings = random_settings(rng, seed, faults=rng.random() < 0.5)
        settings = replace(settings, num_val_prompts=12, write_s=0.5)
        run = SimRun()
        try:
            for _ in range(rng.choice([1, 2, 3])):
                run = simulate(config, settings, run=run, kill_at_s=rng.uniform(5.0, 40.0))
            run = simulate(config, settings, run=run)
            assert run.end.exit_code == 0, run.end.cause
            check_staleness(config, run)
            check_validations(config, run)
            run.trained.clear()  # they are those of the last life only
            check_samples(config, run)
        except BaseException as error:
            error.add_note(f"seed {seed}: {config}\n{settings}")
            raise
        num_taken_up += len(events(run, "weights_taken_back"))
    assert num_taken_up > 20


def start_late(replica_ids, late_s):
    """For `act`: these replicas take so much longer to start."""

    def act(_controller, backend):
        make = backend.replica

        def replica(replica_id):
            fake = make(replica_id)
            start = fake.start

            async def slow():
                await asyncio.sleep(late_s if replica_id in replica_ids else 0.0)
                await start()

            fake.start = slow
            return fake

        backend.replica = replica

    return act


def patient_with_starts(config):
    return replace(config, health=replace(config.health, startup_timeout_s=300.0))


class Alarms:
    """The watchdog's; there should be none."""

    def __init__(self):
        self.sentences = []

    async def report(self, stall):
        self.sentences.append(stall.sentence())


@pytest.mark.parametrize("late", [{0, 1}, {1}], ids=["both replicas", "one replica"])
def test_the_time_of_a_validation_does_not_run_before_a_replica_takes_its_trials(late):
    """The replicas take twice its time to start, and so long the first one is for rollouts."""
    config = patient_with_starts(small_config(total_training_steps=4, test_freq=0, save_freq=0))
    alarms = Alarms()
    run = simulate(config, SETTINGS, act=start_late(late, 120.0), reporter=alarms)
    assert run.end.exit_code == 0, run.end.cause
    assert alarms.sentences == []
    check = row_of(run, 0)
    assert (check["status"], check["n_done"]) == ("complete", 80), check["reason"]


def test_the_time_of_a_resumed_validation_does_not_run_while_its_replica_is_for_rollouts():
    config = patient_with_starts(small_config("async_partial", save_freq=1, test_freq=100))
    _, run = kill_in_validation(config)
    alarms = Alarms()
    run = simulate(config, SETTINGS, run=run, act=start_late({1}, 120.0), reporter=alarms)
    assert run.end.exit_code == 0, run.end.cause
    assert alarms.sentences == []
    assert row_of(run, 0)["status"] == "complete", row_of(run, 0)["reason"]
    check_validations(config, run)


def test_a_replica_that_never_loads_its_first_weights_holds_a_validation_up_for_its_limit_only():
    """It is lost over each of its loads: replaced each time, and never of use."""

    def act(_controller, backend):
        make = backend.replica

        def replica(replica_id):
            fake = make(replica_id)

            async def lost(_weights):
                await asyncio.sleep(20.0)
                raise ReplicaLostError("it died over its weights")

            if replica_id == 1:
                fake.update_weights = lost
            return fake

        backend.replica = replica

    config = small_config(total_training_steps=4, test_freq=0, save_freq=0)
    config = replace(config, health=replace(config.health, max_restarts=1000))
    alarms = Alarms()
    run = simulate(config, SETTINGS, act=act, reporter=alarms)
    assert run.end.exit_code == 0, run.end.cause
    assert alarms.sentences == []
    row = row_of(run, 0)
    assert row["status"] == "partial"
    assert "validation.timeout_s" in row["reason"]
    health = config.health
    limit_s = health.startup_timeout_s + health.sync_timeout_s + config.validation.timeout_s
    assert row["ended_s"] - row["started_s"] == pytest.approx(limit_s, abs=0.1)
