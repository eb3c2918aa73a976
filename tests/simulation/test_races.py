"""Races between validation, weight sync, stop and resume, each of which once went wrong."""

import asyncio
from dataclasses import replace

import pytest

from freewheel.simulation.run import SimRun, simulate
from freewheel.simulation.settings import Faults, SimSettings
from freewheel.types import Purpose
from tests.simulation.scenarios import check_samples, check_staleness, small_config


def with_workers(change):
    """Change every rollout worker that the backend makes."""

    def act(controller, backend):
        make = backend.rollout_worker

        def worker(worker_id):
            fake = make(worker_id)
            change(fake)
            return fake

        backend.rollout_worker = worker

    return act


def hang_first_validation(fake):
    inner = fake._run_environment

    async def run(request, replica, rng):
        if request.members[0].sample_id.startswith("val0-"):
            await asyncio.Event().wait()
        return await inner(request, replica, rng)

    fake._run_environment = run


def test_no_rollout_starts_on_a_replica_that_goes_back_to_an_older_version():
    """Queued validations of older versions, with weight loads slower than the validations."""
    for seed in range(20):
        config = small_config(total_training_steps=30, test_freq=1)
        validation = replace(config.validation, n=1, share=1.0, trial_timeout_s=25.0, max_queued=2)
        config = replace(config, validation=validation)
        settings = SimSettings(seed=seed, num_val_prompts=1, update_s=4.0, train_step_s=1.0)
        run = simulate(config, settings, act=with_workers(hang_first_validation))
        assert run.end.exit_code == 0, run.end.cause
        check_staleness(config, run)


def test_a_stop_during_start_up_can_be_resumed():
    slow = SimSettings(seed=1, startup_s=2.0)

    def slow_worker(fake):
        start = fake.start

        async def later():
            await asyncio.sleep(10)
            return await start()

        fake.start = later

    config = small_config()
    run = simulate(config, slow, stop_at_s=4.0, act=with_workers(slow_worker))
    assert (run.end.exit_code, run.end.summary["checkpoints"]) == (130, [])
    run = simulate(config, slow, run=run)
    assert run.end.exit_code == 0, run.end.cause
    check_samples(config, run)


@pytest.mark.parametrize("threshold", [0.0, 0.25])
def test_resume_with_a_lower_staleness_threshold_ends(threshold):
    for seed in range(8):
        config = small_config(total_training_steps=12, save_freq=1)
        config = replace(
            config, async_training=replace(config.async_training, staleness_threshold=1.5)
        )
        settings = SimSettings(seed=seed)
        run = simulate(config, settings, kill_at_s=25.0)
        lower = replace(config.async_training, staleness_threshold=threshold)
        run = simulate(replace(config, async_training=lower), settings, run=run)
        assert run.end.exit_code == 0, run.end.cause


def test_an_exclusive_validation_has_the_replicas_to_itself():
    seen = {"training": 0, "validation": 0}

    def act(controller, backend):
        pool = controller.roles.pool
        lease = pool._lease

        def watched(candidates, purpose, holder):
            given = lease(candidates, purpose, holder)
            if given is not None:
                owned = all(slot.pin is not None for slot in pool.slots.values())
                seen["training"] += owned and purpose is Purpose.TRAINING
                most = max(s.num_leases(Purpose.VALIDATION) for s in pool.slots.values())
                seen["validation"] = max(seen["validation"], most)
            return given

        pool._lease = watched

    config = small_config(validation_mode="exclusive", total_training_steps=20, test_freq=1)
    wide = replace(config.async_training, concurrent_samples_per_replica=8)
    config = replace(config, async_training=wide)
    faults = Faults(environment=0.15, replica_deaths_per_s=0.02)
    settings = SimSettings(seed=1, num_val_prompts=40, faults=faults)
    run = simulate(config, settings, act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert seen == {"training": 0, "validation": 8}
    for at_s in (9.0, 23.0, 40.0):
        run = simulate(config, settings, kill_at_s=at_s)
        assert simulate(config, settings, run=run, act=act).end.exit_code == 0
    assert seen["training"] == 0


def test_an_exclusive_validation_does_not_end_the_hold_of_a_stop():
    config = small_config(validation_mode="exclusive", total_training_steps=30, test_freq=1)
    for stop_at_s in (5.0, 9.0, 13.0, 17.0, 21.0):
        issued = []

        def act(controller, backend, issued=issued):
            issue = controller.roles.ledger.issue

            def watched(**kwargs):
                issued.append(asyncio.get_running_loop().time())
                return issue(**kwargs)

            controller.roles.ledger.issue = watched

        run = simulate(config, SimSettings(seed=2), stop_at_s=stop_at_s, act=act)
        assert run.end.exit_code == 130
        assert max(issued, default=0.0) <= stop_at_s


def test_a_pinned_replica_that_is_long_in_coming_back_is_replaced_by_another():
    config = small_config(total_training_steps=30, test_freq=6)
    config = replace(
        config,
        rollout=replace(config.rollout, replicas=4),
        validation=replace(config.validation, share=0.25, n=1),
    )

    def act(controller, backend):
        make, made = backend.replica, 0

        def replica(replica_id):
            nonlocal made
            fake = make(replica_id)
            made += 1
            if made > 4:
                start = fake.start

                async def slow():
                    await asyncio.sleep(50)
                    await start()

                fake.start = slow
            return fake

        killed = []

        def on_event(row):
            if row["event"] == "pinned" and row["step"] == 6 and not killed:
                killed.append(row["replicas"][0])
                loop = asyncio.get_running_loop()
                loop.call_later(2.0, backend.replicas[killed[0]].kill)

        backend.replica = replica
        controller._recorder._on_event = on_event

    run = simulate(config, SimSettings(seed=2, num_val_prompts=12), act=act)
    assert run.end.exit_code == 0, run.end.cause
    rows = {row["step"]: row for row in run.recorder.rows("validations")}
    assert rows[6]["status"] == "complete", rows[6]["reason"]
    assert rows[6]["ended_s"] - rows[6]["started_s"] < 40


def test_a_stop_while_the_last_validation_runs_does_not_wait_for_it():
    config = small_config(total_training_steps=3, test_freq=0)
    config = replace(config, validation=replace(config.validation, n=1, trial_timeout_s=50.0))

    def hang(fake):
        inner = fake._run_environment

        async def run(request, replica, rng):
            if request.members[0].sample_id.startswith("val3-"):
                await asyncio.Event().wait()
            return await inner(request, replica, rng)

        fake._run_environment = run

    run = simulate(config, SimSettings(seed=3), stop_at_s=60.0, act=with_workers(hang))
    assert run.end.exit_code == 130
    assert run.ended_s < 62.0
    last = run.recorder.rows("validations")[-1]
    assert (last["step"], last["status"]) == (3, "partial")


def test_validations_queued_at_a_stop_are_recorded_as_skipped():
    config = small_config(total_training_steps=30, test_freq=2)
    validation = replace(config.validation, n=1, max_queued=2, trial_timeout_s=50.0)
    config = replace(config, validation=validation)
    run = simulate(
        config, SimSettings(seed=4), stop_at_s=40.0, act=with_workers(hang_first_validation)
    )
    requested = [
        e["step"] for e in run.recorder.rows("events") if e["event"] == "validation_requested"
    ]
    recorded = {row["step"] for row in run.recorder.rows("validations")}
    assert len(requested) >= 2
    assert set(requested) <= recorded


def test_a_validation_cut_short_by_a_stop_is_run_again_if_its_version_is_there():
    config = small_config("on_policy", total_training_steps=8, test_freq=2, save_freq=100)
    config = replace(config, validation=replace(config.validation, n=1, trial_timeout_s=20.0))
    settings = SimSettings(seed=5, num_val_prompts=30)
    run = simulate(config, settings, stop_at_s=3.2)
    assert run.end.exit_code == 130
    assert run.recorder.rows("validations")[0]["status"] == "partial"
    run = simulate(config, settings, run=run)
    assert run.end.exit_code == 0, run.end.cause
    rows = {row["step"]: row for row in run.recorder.rows("validations")}
    assert sorted(rows) == [0, 2, 4, 6, 8]
    assert {row["status"] for row in rows.values()} == {"complete"}


@pytest.mark.parametrize("mode", ["on_policy", "async_partial"])
def test_a_completed_run_that_is_resumed_stays_completed(mode):
    config = small_config(mode, total_training_steps=None, total_epochs=1)
    settings = SimSettings(seed=6, num_prompts=18)
    run = simulate(config, settings)
    scores = [row["status"] for row in run.recorder.rows("validations")]
    again = simulate(
        config,
        settings,
        run=SimRun(**{name: getattr(run, name) for name in ("disk", "recorder", "checkpoints")}),
    )
    assert again.end.exit_code == 0, again.end.cause
    assert [row["status"] for row in again.recorder.rows("validations")] == scores
    check_samples(config, again)


def test_a_replica_lost_while_its_lease_waits_for_a_worker_costs_an_attempt_only():
    faults = Faults(replica_deaths_per_s=0.05, worker_deaths_per_s=0.05)

    def forgive_starts(controller, _backend):
        """Three deaths before a worker is up would end the run, which is not the matter here."""
        for name in ("replica-0", "replica-1", "rollout-worker-0", "rollout-worker-1"):
            controller.roles.restarts.came_up(name)

    for seed in range(20):
        config = small_config(total_training_steps=10)
        health = replace(config.health, max_restarts=10_000)
        config = replace(config, health=health)
        settings = SimSettings(seed=seed, startup_s=5.0, faults=faults)
        run = simulate(config, settings, act=forgive_starts)
        assert run.end.exit_code == 0, run.end.cause
        check_samples(config, run)
