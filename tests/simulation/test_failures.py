"""Each failure point: the named error and its exit code, or the recovery, within its limit."""

import asyncio
from dataclasses import replace

import pytest

from freewheel.errors import (
    CheckpointError,
    InvariantError,
    RecordError,
    StartupError,
    TrainerLostError,
    TrainingDivergedError,
)
from freewheel.simulation.run import simulate
from freewheel.simulation.settings import Faults, SimSettings
from freewheel.simulation.virtual_time import run_virtual
from tests.simulation.scenarios import (
    VALIDATION_MODES,
    check_samples,
    small_config,
    trials_that_hang,
)

SETTINGS = SimSettings(seed=5)


def fail_at(method, *, call, error):
    """Make the call number `call` of a fake's method raise."""
    calls = 0

    async def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return await method(*args, **kwargs)

    return failing


def hang_at(method, *, call):
    calls = 0

    async def hanging(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            await asyncio.Event().wait()
        return await method(*args, **kwargs)

    return hanging


def ends_with(run, exit_code, text):
    assert run.end.status == "failed"
    assert run.end.exit_code == exit_code, run.end.cause
    assert text in run.end.cause


@pytest.mark.parametrize(
    ("method", "error", "exit_code"),
    [
        ("train_step", TrainingDivergedError("step 3: loss is nan"), 6),
        ("write_state", CheckpointError("disk full"), 7),
        ("train_step", ZeroDivisionError("a bug"), 1),
    ],
)
def test_a_failing_trainer_ends_the_run_with_its_cause(method, error, exit_code):
    def injure(controller, backend):
        trainer = backend.fake_trainer
        setattr(trainer, method, fail_at(getattr(trainer, method), call=1, error=error))

    run = simulate(small_config(), SETTINGS, act=injure)
    ends_with(run, exit_code, str(error))


@pytest.mark.parametrize(
    ("method", "limit", "exit_code"),
    [
        ("start", "startup_timeout_s", 3),
        ("train_step", "train_step_timeout_s", 4),
        ("publish", "sync_timeout_s", 4),
        ("copy_state", "checkpoint_timeout_s", 7),
        ("write_state", "checkpoint_timeout_s", 7),
    ],
)
def test_a_trainer_that_hangs_again_after_its_replacement_ends_the_run(method, limit, exit_code):
    def injure(controller, backend):
        def remake(make):
            fake = make()
            setattr(fake, method, hang_at(getattr(fake, method), call=1))
            return fake

        make = backend.trainer
        controller.roles.trainer._make = lambda: remake(make)
        controller.roles.trainer._trainer = remake(make)

    config = small_config()
    config = replace(config, health=replace(config.health, **{limit: 20.0}))
    run = simulate(config, SETTINGS, act=injure)
    ends_with(run, exit_code, f"health.{limit}")
    assert run.ended_s < 2 * 20.0 + 60.0


def test_a_trainer_that_dies_at_each_start_ends_the_run():
    def injure(controller, backend):
        make = backend.trainer

        def dies():
            fake = make()
            fake.start = fail_at(fake.start, call=1, error=TrainerLostError("out of memory"))
            return fake

        controller.roles.trainer._make = dies
        controller.roles.trainer._trainer = dies()

    run = simulate(small_config(), SETTINGS, act=injure)
    ends_with(run, 5, "out of memory")
    assert run.end.summary["restarts"] == 3


def test_a_replica_that_hangs_in_a_weight_update_is_replaced():
    def injure(controller, backend):
        make = backend.replica
        made = 0

        def replica(replica_id):
            nonlocal made
            fake = make(replica_id)
            made += 1
            if made == 1:
                fake.update_weights = hang_at(fake.update_weights, call=2)
            return fake

        backend.replica = replica

    config = small_config()
    run = simulate(config, SETTINGS, act=injure)
    assert run.end.exit_code == 0, run.end.cause
    check_samples(config, run)
    assert run.end.summary["restarts"] == 1


def test_a_replica_that_never_starts_ends_the_run_by_name():
    def injure(controller, backend):
        make = backend.replica

        def replica(replica_id):
            fake = make(replica_id)
            if replica_id == 1:
                fake.start = hang_at(fake.start, call=1)
            return fake

        backend.replica = replica

    run = simulate(small_config(), SETTINGS, act=injure)
    ends_with(run, 3, "replica-1 did not come up within 60 s (health.startup_timeout_s)")


def test_a_worker_that_never_answers_is_replaced_and_its_groups_run_again():
    def injure(controller, backend):
        make = backend.rollout_worker
        made = 0

        def worker(worker_id):
            nonlocal made
            fake = make(worker_id)
            made += 1
            if made == 1:
                fake.run_group = hang_at(fake.run_group, call=3)
            return fake

        backend.rollout_worker = worker

    config = small_config()
    run = simulate(config, SETTINGS, act=injure)
    assert run.end.exit_code == 0, run.end.cause
    check_samples(config, run)
    assert run.end.summary["restarts"] == 1
    attempts = [row["attempt"] for row in run.recorder.rows("samples")]
    assert max(attempts) == 2


def test_replicas_that_die_for_ever_end_the_run():
    settings = replace(SETTINGS, startup_s=0.1, faults=Faults(replica_deaths_per_s=0.5))
    config = small_config()
    config = replace(config, health=replace(config.health, max_restarts=4))
    run = simulate(config, settings)
    ends_with(run, 5, "health.max_restarts")
    assert run.end.summary["restarts"] == 5


def test_replicas_that_die_now_and_then_do_not_end_a_long_run():
    settings = replace(SETTINGS, startup_s=0.1, faults=Faults(replica_deaths_per_s=0.05))
    config = small_config(total_training_steps=40)
    health = replace(config.health, max_restarts=4, restart_window_s=15.0)
    run = simulate(replace(config, health=health), settings)
    assert run.end.exit_code == 0, run.end.cause
    assert run.end.summary["restarts"] > 8


@pytest.mark.parametrize("who", ["replica", "rollout_worker"])
def test_a_worker_that_always_dies_at_start_ends_the_run_at_its_third_loss(who):
    faults = {"replica": "replica_deaths_per_s", "rollout_worker": "worker_deaths_per_s"}
    settings = replace(SETTINGS, faults=Faults(**{faults[who]: 5.0}))
    run = simulate(small_config(), settings)
    ends_with(run, 5, "was lost 3 times and was never up")
    assert run.end.summary["restarts"] < 10


def test_environments_that_always_fail_end_the_run_with_the_counts():
    settings = replace(SETTINGS, faults=Faults(environment=1.0))
    config = small_config()
    config = replace(config, health=replace(config.health, max_failed_groups_in_a_row=10))
    run = simulate(config, settings)
    ends_with(run, 4, "10 groups in a row failed")
    assert "the environment raised ValueError" in run.end.cause


def test_data_without_a_usable_prompt_ends_the_run():
    settings = replace(SETTINGS, faults=Faults(over_long_prompt=1.0))
    ends_with(simulate(small_config(), settings), 9, "none of the 64 prompts can be used")


@pytest.mark.parametrize("validation_mode", VALIDATION_MODES)
@pytest.mark.parametrize("limit", ["trial", "validation"])
def test_a_trial_that_never_returns_costs_only_itself(validation_mode, limit):
    """Steps go on, the due checkpoint exists, the result is partial and says so."""
    config = small_config("async_partial", validation_mode, total_training_steps=12, test_freq=6)
    timeouts = {"trial_timeout_s": 25.0} if limit == "trial" else {"timeout_s": 25.0}
    config = replace(config, validation=replace(config.validation, n=1, **timeouts))
    run = simulate(config, SETTINGS, act=trials_that_hang(3))
    healthy = simulate(config, SETTINGS)
    assert run.end.exit_code == 0
    assert run.end.summary["checkpoints"] == [3, 6, 9, 12]
    rows = run.recorder.rows("validations")
    assert [row["step"] for row in rows] == [0, 6, 12]
    for row in rows:
        assert (row["status"], row["n_done"], row["n_timeout"]) == ("partial", 7, 1)
        assert row["score_lower"] == pytest.approx(row["score_upper"] - 1 / 8)
    saved = [e["t_s"] for e in run.recorder.rows("events") if e["event"] == "checkpoint_saved"]
    assert saved[1] < rows[1]["ended_s"]
    if validation_mode != "exclusive":
        last_steps = [r.recorder.rows("samples")[-1]["ended_s"] for r in (run, healthy)]
        assert last_steps[0] <= last_steps[1] / 0.9


@pytest.mark.parametrize("max_queued", [0, 1])
def test_a_validation_due_while_one_runs_is_queued_or_skipped_with_its_reason(max_queued):
    config = small_config("async_partial", "dedicated", total_training_steps=6, test_freq=1)
    config = replace(
        config,
        validation=replace(config.validation, n=1, max_queued=max_queued, trial_timeout_s=25.0),
    )
    run = simulate(config, SETTINGS, act=trials_that_hang(0))
    rows = sorted(run.recorder.rows("validations"), key=lambda row: row["step"])
    assert [row["step"] for row in rows] == list(range(7))
    skipped = [row for row in rows if row["status"] == "skipped"]
    assert skipped
    assert all("the validation of step 0 still runs" in row["reason"] for row in skipped[:2])
    assert len(rows) - len(skipped) >= 2


@pytest.mark.parametrize("validation_mode", ["parallel", "dedicated"])
def test_three_weight_updates_during_a_validation_leave_its_version_alone(validation_mode):
    config = with_slots(small_config("async_partial", validation_mode, test_freq=100), 12)
    assert config.max_slots == 12, "either replica alone takes all groups that may be open"
    settings = replace(SETTINGS, num_val_prompts=120, train_step_s=1.0)
    run = simulate(config, settings)
    first = run.recorder.rows("validations")[0]
    updates = [
        e
        for e in run.recorder.rows("events")
        if e["event"] == "weights_published" and first["started_s"] < e["t_s"] < first["ended_s"]
    ]
    assert len(updates) >= 3
    assert first["response_versions"] == {"0": 240}
    assert run.end.summary["trainer_wait_s"]["validation"] == 0


def with_slots(config, num_slots, *, replicas=2):
    """So many groups at once on each of so many replicas."""
    return replace(
        config,
        rollout=replace(config.rollout, replicas=replicas),
        async_training=replace(config.async_training, concurrent_samples_per_replica=num_slots),
    )


def waits_beside_a_validation(config):
    """What the trainer of a run waits for, with its first validation and without it."""
    settings = replace(SETTINGS, num_val_prompts=40, train_step_s=1.0)
    unhurried = replace(config, trainer=replace(config.trainer, val_before_train=False))
    runs = [simulate(each, settings) for each in (config, unhurried)]
    with_it_s, without_s = (run.end.summary["trainer_wait_s"] for run in runs)
    assert without_s["validation"] == 0
    assert with_it_s["samples"] < without_s["samples"] * 1.2
    return with_it_s


def test_the_wait_for_the_only_replica_that_a_validation_has_is_booked_on_it():
    config = small_config("async_partial", "parallel", test_freq=100, val_at_end=False)
    assert waits_beside_a_validation(with_slots(config, 1, replicas=1))["validation"] > 1.0


def test_the_trainer_does_not_wait_while_another_replica_has_the_rollouts_of_a_pinned_one():
    config = small_config("async_partial", "parallel", test_freq=100, val_at_end=False)
    assert waits_beside_a_validation(with_slots(config, 4))["validation"] == 0


def test_the_same_error_in_two_loops_reports_the_first():
    def injure(controller, backend):
        backend.fake_trainer.train_step = fail_at(
            backend.fake_trainer.train_step, call=3, error=TrainingDivergedError("later")
        )
        backend.fake_trainer.write_state = fail_at(
            backend.fake_trainer.write_state, call=1, error=CheckpointError("earlier")
        )

    run = simulate(small_config(save_freq=1), replace(SETTINGS, train_step_s=30.0), act=injure)
    ends_with(run, 7, "earlier")


BROKEN = InvariantError("the rollouter is broken")


def break_rollouts_after(num_cuts, *, write=None):
    """The rollouter fails at the next finished group once so many checkpoints are cut."""

    def fail(*_args):
        raise BROKEN

    def injure(controller, backend):
        num_left, cut = num_cuts, controller.roles.checkpointer.cut

        async def watched(step):
            nonlocal num_left
            await cut(step)
            num_left -= 1
            if num_left == 0:
                controller.roles.ledger.absorb = fail

        controller.roles.checkpointer.cut = watched
        if write is not None:
            backend.fake_trainer.write_state = write(backend.fake_trainer.write_state)

    return injure


SLOW_DISK = replace(SETTINGS, write_s=8.0, train_step_s=0.5)


@pytest.mark.parametrize("num_cuts", [1, 2])
def test_what_is_cut_when_another_loop_fails_is_still_written(num_cuts):
    config = small_config(save_freq=1)
    run = simulate(config, SLOW_DISK, act=break_rollouts_after(num_cuts))
    ends_with(run, BROKEN.exit_code, "the rollouter is broken")
    events = [row["event"] for row in run.recorder.rows("events")]
    assert events.index("loop_failed") < events.index("checkpoint_saved")
    assert run.end.summary["checkpoints"] == list(range(1, num_cuts + 1))
    resumed = simulate(config, SLOW_DISK, run=run)
    assert resumed.end.exit_code == 0, resumed.end.cause
    check_samples(config, resumed)


@pytest.mark.parametrize("wrong", ["hangs", "fails"])
def test_a_write_that_is_left_delays_the_end_by_its_limit_and_changes_no_cause(wrong):
    def write(method):
        if wrong == "hangs":
            return hang_at(method, call=1)
        return fail_after(8.0, CheckpointError("disk full"))

    config = small_config(save_freq=1)
    run = simulate(config, SLOW_DISK, act=break_rollouts_after(1, write=write))
    ends_with(run, BROKEN.exit_code, "the rollouter is broken")
    assert run.end.summary["checkpoints"] == []
    failed_s = next(e["t_s"] for e in run.recorder.rows("events") if e["event"] == "loop_failed")
    limit_s = config.health.shutdown_timeout_s if wrong == "hangs" else 8.0
    assert run.ended_s - failed_s <= limit_s + 0.1
    overdue = [e for e in run.recorder.rows("events") if e["event"] == "checkpoint_overdue"]
    assert len(overdue) == (wrong == "hangs")


def fail_after(seconds, error):
    async def failing(*_args, **_kwargs):
        await asyncio.sleep(seconds)
        raise error

    return failing


def test_a_cut_whose_copy_was_not_taken_is_not_waited_for():
    def injure(controller, backend):
        backend.fake_trainer.copy_state = hang_at(backend.fake_trainer.copy_state, call=1)
        cut = controller.roles.checkpointer.cut

        async def watched(step):
            controller.roles.ledger.absorb = fail
            await cut(step)

        def fail(*_args):
            raise BROKEN

        controller.roles.checkpointer.cut = watched

    run = simulate(small_config(save_freq=1), SLOW_DISK, act=injure)
    ends_with(run, BROKEN.exit_code, "the rollouter is broken")
    failed_s = next(e["t_s"] for e in run.recorder.rows("events") if e["event"] == "loop_failed")
    assert run.ended_s == pytest.approx(failed_s, abs=1e-6)


def test_prompts_that_all_fail_in_the_reward_are_named_by_what_failed():
    config = small_config(total_training_steps=None, total_epochs=50)
    config = replace(config, health=replace(config.health, max_failed_groups_in_a_row=10_000))
    settings = replace(SETTINGS, num_prompts=5, faults=Faults(environment=1.0))
    run = simulate(config, settings)
    ends_with(run, 4, "all 5 prompts are set aside")
    assert "the environment raised ValueError" in run.end.cause
    assert "over-long" not in run.end.cause


def refuse_record(name):
    """The records fail at the event of this name; the error is raised once, as the recorder does.

    What would be recorded later is lost.
    """

    def injure(controller, _backend):
        record, failed = controller._recorder.event, []

        def event(event_name, **fields):
            if event_name == name and not failed:
                failed.append(event_name)
                raise RecordError("no space left")
            if not failed:
                record(event_name, **fields)

        controller._recorder.event = event

    return injure


def test_records_that_fail_at_once_end_the_run_before_its_loops():
    run = simulate(small_config(), SETTINGS, act=refuse_record("run_started"))
    ends_with(run, RecordError.exit_code, "no space left")
    assert (run.ended_s, run.end.summary["steps"]) == (0.0, 0)


def test_records_that_fail_at_a_stop_do_not_keep_the_run_from_stopping():
    stopped = []

    def stop(controller):
        controller.stop("SIGINT")
        stopped.append(controller)

    def injure(controller, backend):
        refuse_record("stop_requested")(controller, backend)
        asyncio.get_running_loop().call_at(20.0, stop, controller)

    run = simulate(small_config(total_training_steps=1000), SETTINGS, act=injure)
    assert stopped
    assert (run.end.status, run.end.exit_code) == ("stopped", 130)
    assert run.end.summary["checkpoints"][-1] == run.end.summary["steps"] > 0


@pytest.mark.parametrize("times", [1, 1000])
def test_books_that_cannot_be_counted_do_not_hide_the_runs_end(times):
    def injure(controller, _backend):
        count, left = controller.roles.ledger.counts, [times]

        def counts():
            if controller._ending and left[0] > 0:
                left[0] -= 1
                raise RuntimeError("dictionary changed size during iteration")
            return count()

        controller.roles.ledger.counts = counts

    whole = simulate(small_config(), SETTINGS).end
    end = simulate(small_config(), SETTINGS, act=injure).end
    if times == 1:
        assert end == whole
        return
    assert (end.status, end.exit_code) == ("failed", 1)
    assert end.cause == "RuntimeError: dictionary changed size during iteration"
    assert (end.summary["steps"], end.summary["policy_version"]) == (
        8,
        whole.summary["policy_version"],
    )
    assert end.summary.keys() == whole.summary.keys()
    assert end.summary["samples"].keys() == whole.summary["samples"].keys()
    assert end.summary["trainer_wait_s"].keys() == whole.summary["trainer_wait_s"].keys()


def test_the_first_cause_stays_whatever_the_end_is_told_later():
    found = []

    def injure(controller, backend):
        trainer = backend.fake_trainer
        error = TrainingDivergedError("loss is nan")
        trainer.train_step = fail_at(trainer.train_step, call=1, error=error)
        found.append(controller)

    simulate(small_config(), SETTINGS, act=injure)

    async def later():
        return found[0].end_by(StartupError("later"))

    assert run_virtual(later).cause == "TrainingDivergedError: loss is nan"
