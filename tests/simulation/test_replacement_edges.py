"""A replacement of the trainer meets other things at their worst moment."""

import asyncio
import json
from dataclasses import replace

import pytest

from freewheel.errors import (
    DataError,
    TrainerLostError,
    TrajectoriesLostError,
    WeightsLostError,
)
from freewheel.simulation.run import simulate
from freewheel.simulation.settings import SimSettings
from tests.simulation.scenarios import before_updates, check_samples, small_config
from tests.simulation.test_trainer_replacement import Trainers, num_events, patient


class Reports:
    def __init__(self):
        self.sentences = []

    async def report(self, stall):
        self.sentences.append(stall.sentence())

    async def report_block(self, process, cause):
        raise AssertionError(f"{process}: {cause}")


@pytest.mark.parametrize("lost_at_s", [0.5, 2.5, 4.5])
def test_a_commit_that_ends_during_a_replacement_skips_no_step(lost_at_s):
    """The trainer dies while a checkpoint is being committed, for five seconds."""
    trainers = Trainers(0, chance=0.0)
    settings = SimSettings(seed=2, train_step_s=1.0, write_s=0.5, startup_s=8.0)
    commits = []

    def act(controller, backend):
        trainers(controller, backend)
        commit = controller.roles.checkpointer._store.commit

        async def slow_commit(step, control):
            if not commits:
                asyncio.get_running_loop().call_later(lost_at_s, trainers.all[0].kill)
            commits.append(step)
            await asyncio.sleep(5.0)
            return await commit(step, control)

        controller.roles.checkpointer._store.commit = slow_commit

    run = simulate(patient(small_config(save_freq=2)), settings, act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert len(trainers.all) == 2
    steps = {key: digest for key, digest in trainers.digests.items() if isinstance(key, int)}
    for state in run.disk.states.values():
        assert state["digest"] == steps[state["step"]]


def test_a_step_that_is_tried_again_has_its_whole_limit():
    """The replacement is over between two looks of the watchdog."""
    config = patient(small_config(), train_step_timeout_s=200.0, grace_s=5.0)
    reports = Reports()

    def act(controller, backend):
        step = backend.fake_trainer.train_step

        async def hang_at_the_third(request):
            if request.step == 3:
                await asyncio.Event().wait()
            return await step(request)

        backend.fake_trainer.train_step = hang_at_the_third

    settings = SimSettings(seed=1, train_step_s=100.0, startup_s=2.0)
    run = simulate(config, settings, act=act, reporter=reports)
    assert run.end.exit_code == 0, run.end.cause
    assert reports.sentences == []
    assert run.end.summary["restarts"] == 1


def test_weights_that_were_published_again_meanwhile_end_no_validation():
    """Two replicas fail to fetch one publication; the second finds it out later."""
    failures = []

    def act(_controller, backend):
        async def fail_twice(replica_id, weights):
            if weights.version == 2 and len(failures) < 2:
                failures.append(replica_id)
                await asyncio.sleep(12.0 * (len(failures) - 1))
                raise WeightsLostError("gone")

        before_updates(backend, fail_twice)

    config = patient(small_config(test_freq=2, total_training_steps=8))
    config = replace(config, async_training=replace(config.async_training, max_staleness=4))
    run = simulate(config, SimSettings(seed=3), act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert len(failures) == 2
    assert {row["status"] for row in run.recorder.rows("validations")} == {"complete"}
    check_samples(config, run)


@pytest.mark.parametrize("mode", ["dedicated", "exclusive", "parallel"])
def test_a_version_that_is_nowhere_is_not_asked_for_again_and_again(mode):
    asked = []

    def act(controller, backend):
        async def refuse_old(replica_id, weights):
            if controller.roles.store.latest is not weights and weights.version > 0:
                asked.append(replica_id)
                raise WeightsLostError("gone")

        before_updates(backend, refuse_old)

    config = patient(small_config("async_partial", mode, test_freq=2))
    run = simulate(config, SimSettings(seed=4, train_step_s=0.5), act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert len(asked) <= 4 * len(run.recorder.rows("validations"))
    assert num_events(run, "weights_lost") == len(asked)


def test_a_copy_is_made_again_also_after_trajectories_were_lost():
    trainers = Trainers(0, chance=0.0)

    def act(controller, backend):
        trainers(controller, backend)
        first = trainers.all[0]
        write, calls = first.write_state, []

        async def write_state(step, folder, trajectories, held):
            calls.append(step)
            if len(calls) == 1:
                raise TrajectoriesLostError((0,) if trajectories else (), "node lost")
            if len(calls) == 2:
                first.kill()
                raise TrainerLostError("died")
            return await write(step, folder, trajectories, held)

        first.write_state = write_state

    run = simulate(patient(small_config(save_freq=3)), SimSettings(seed=6), act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert run.end.summary["checkpoints"] == [3, 6, 8]


def loads_fail(version, *, after_s, again_s):
    """For `act`: the first publication of a version cannot be had, and is slow when it is renewed.

    The failing load takes `after_s`, those of the second publication `again_s`.
    """
    first = []

    def act(_controller, backend):
        async def lose_the_first(_replica_id, weights):
            if weights.version == version and not first:
                first.append(weights)
            if first and weights is first[0]:
                await asyncio.sleep(after_s)
                raise WeightsLostError("node lost")
            if weights.version == version:
                await asyncio.sleep(again_s)

        before_updates(backend, lose_the_first)

    return act


@pytest.mark.parametrize(
    ("startup_s", "after_s", "again_s"),
    [(45.0, 0.0, 0.0), (0.2, 28.0, 28.0)],
    ids=["a long replacement", "a short one between two long loads"],
)
def test_weights_that_are_being_published_again_are_no_stall(startup_s, after_s, again_s):
    """The limit of a load is 30 s, with twice the grace 40 s: less than trainer and loads take."""
    config = patient(small_config(save_freq=0, test_freq=0))
    config = replace(config, async_training=replace(config.async_training, max_staleness=4))
    settings = SimSettings(seed=3, startup_s=startup_s, train_step_s=0.1, publish_s=0.01)
    reports = Reports()
    act = loads_fail(2, after_s=after_s, again_s=again_s)
    run = simulate(config, settings, act=act, reporter=reports)
    assert run.end.exit_code == 0, run.end.cause
    assert reports.sentences == []
    assert run.end.summary["restarts"] == 1
    assert num_events(run, "weights_lost") > 0


SHORT_BUT_FOR_CHECKPOINTS = {
    "startup_timeout_s": 30.0,
    "train_step_timeout_s": 30.0,
    "sync_timeout_s": 30.0,
    "checkpoint_timeout_s": 600.0,
}
"""A start and a step take at most 60 s together, with twice the grace 70 s."""


def test_a_replacement_that_waits_for_a_long_commit_is_no_stall():
    trainers, reports = Trainers(0, chance=0.0), Reports()
    commits = []

    def act(controller, backend):
        trainers(controller, backend)
        commit = controller.roles.checkpointer._store.commit

        async def slow_commit(step, control):
            if not commits:
                asyncio.get_running_loop().call_later(1.0, trainers.all[0].kill)
            commits.append(step)
            await asyncio.sleep(100.0)
            return await commit(step, control)

        controller.roles.checkpointer._store.commit = slow_commit

    config = patient(small_config(save_freq=4, test_freq=0), **SHORT_BUT_FOR_CHECKPOINTS)
    settings = SimSettings(seed=2, train_step_s=1.0, write_s=0.5)
    run = simulate(config, settings, act=act, reporter=reports)
    assert run.end.exit_code == 0, run.end.cause
    assert reports.sentences == []
    assert len(trainers.all) == 2


def test_a_replacement_that_makes_a_long_copy_again_is_no_stall():
    trainers, reports = Trainers(0, chance=0.0), Reports()

    def act(controller, backend):
        trainers(controller, backend)
        first = trainers.all[0]

        async def die(*_):
            first.kill()
            raise TrainerLostError("died")

        first.write_state = die

    config = patient(small_config(save_freq=4, test_freq=0), **SHORT_BUT_FOR_CHECKPOINTS)
    settings = SimSettings(seed=2, train_step_s=1.0, write_s=0.5, copy_s=100.0)
    run = simulate(config, settings, act=act, reporter=reports)
    assert run.end.exit_code == 0, run.end.cause
    assert reports.sentences == []
    assert len(trainers.all) == 2


FAILURE = DataError("another loop fails")


def die_in_step(controller, trainers, step, *, then):
    """The first trainer dies in this step; `then` so many seconds after the second is up."""
    first = trainers.all[0]
    train = first.train_step

    async def train_step(request):
        if request.step == step:
            await asyncio.sleep(1.0)
            first.kill()
            raise TrainerLostError("died in the step")
        return await train(request)

    def on_event(row):
        if row["event"] == "trainer_up" and len(trainers.all) == 2:
            asyncio.get_running_loop().call_later(*then)

    first.train_step = train_step
    controller._recorder._on_event = on_event


def fail_a_replica(controller):
    def fail(_replica):
        raise FAILURE

    controller.roles.replicas[0]._next_update = fail
    controller.roles.pool.changed.notify()


@pytest.mark.parametrize("after_s", [0.0, 2.0, 5.0, 9.0])
def test_a_cut_is_written_when_another_loop_fails_during_a_replacement(after_s):
    """The failure cancels the train loop, which has the trainer replaced; the cut is left."""
    trainers = Trainers(0, chance=0.0)
    config = patient(small_config(save_freq=4, test_freq=0), shutdown_timeout_s=300.0)

    def act(controller, backend):
        trainers(controller, backend)
        die_in_step(controller, trainers, 5, then=(after_s, fail_a_replica, controller))

    settings = SimSettings(seed=2, write_s=3.0, startup_s=2.0, train_step_s=4.0)
    run = simulate(config, settings, act=act)
    assert run.end.error is FAILURE
    assert len(trainers.all) == 3
    assert all(fake.is_dead for fake in trainers.all)
    assert run.end.summary["checkpoints"] == [4]
    assert run.disk.states["/simulated/step_000004"]["digest"] == trainers.digests[4]
    resumed = simulate(config, settings, run=run)
    assert resumed.end.exit_code == 0, resumed.end.cause
    check_samples(config, resumed)


def test_each_failure_of_a_loop_is_recorded_and_the_first_is_the_cause():
    """The write of the cut that is left fails, too."""

    def act(controller, backend):
        write = backend.fake_trainer.write_state

        async def write_state(*args):
            fail_a_replica(controller)
            await write(*args)
            raise DataError("the write fails, too")

        backend.fake_trainer.write_state = write_state

    run = simulate(small_config(save_freq=4, test_freq=0), SimSettings(seed=2), act=act)
    assert run.end.error is FAILURE
    failed = [row for row in run.recorder.rows("events") if row["event"] == "loop_failed"]
    assert [(row["loop"], row["is_cause"]) for row in failed] == [
        ("replica-0", True),
        ("checkpoint", False),
    ]
    assert "the write fails, too" in failed[1]["error"]


@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_resume_whose_trainer_is_lost_before_trajectories_are_named_goes_on(after_s):
    """While the resumed run waits for the data, which a rollout worker opens."""
    config = patient(small_config(save_freq=1, test_freq=0))
    settings = SimSettings(seed=1, startup_s=2.0, write_s=0.5)
    run = simulate(config, settings, kill_at_s=25.0)
    control = json.loads(run.checkpoints.saved[run.checkpoints.latest])
    assert any(group["ready"] for group in control["ledger"]["open"])
    trainers, reports = Trainers(0, chance=0.0), []

    def act(controller, backend):
        trainers(controller, backend)
        roles = controller.roles
        dataset = roles.workers.dataset

        async def late_dataset(*args):
            info = await dataset(*args)
            await asyncio.sleep(5.0)
            trainers.all[0].kill()
            report = roles.trainer.report_lost(trainers.all[0], "died")
            reports.append(asyncio.get_running_loop().create_task(report))
            if after_s:
                await asyncio.sleep(after_s)
            roles.workers.dataset = dataset
            return info

        roles.workers.dataset = late_dataset

    run = simulate(config, settings, run=run, act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert len(trainers.all) == 2
    check_samples(config, run)
