"""Blocked loops of workers under simulation: told, reported once, the worker replaced in order."""

import asyncio
from dataclasses import replace

import pytest

from freewheel.errors import FailureClass, RolloutWorkerLostError
from freewheel.simulation.run import simulate
from freewheel.simulation.settings import SimSettings
from freewheel.types import LoopReport, Purpose
from tests.simulation.scenarios import check_samples, small_config

BLOCK = LoopReport(
    loop="user-code-0", state="blocked", blocked_s=5.0, cause="f (x.py:3): g()", sample_id="2-1"
)


class Reports:
    def __init__(self):
        self.stalls = []
        self.blocks = []

    async def report(self, stall):
        self.stalls.append(stall)

    async def report_block(self, process, cause):
        self.blocks.append((process, cause))


def config_with(**health):
    config = small_config()
    return replace(config, health=replace(config.health, **health))


def watched(config, act):
    """Run; `act(backend)` is a coroutine beside the run, which begins when the worker is up."""
    reports = Reports()

    def both(controller, backend):
        controller._reporter = reports
        run_loops = controller._run_loops

        async def run():
            async with asyncio.TaskGroup() as group:
                acting = group.create_task(begin())
                await run_loops()
                acting.cancel()

        async def begin():
            await controller.roles.pool.changed.until(
                lambda: controller.roles.workers.slots[0].worker
            )
            await act(backend)

        controller._run_loops = run

    run = simulate(config, SimSettings(seed=5), act=both)
    return run, reports


def named(run, name):
    return [row for row in run.recorder.rows("events") if row["event"] == name]


def test_a_block_is_an_event_each_time_and_one_report():
    async def act(backend):
        worker = backend.workers[0]
        await asyncio.sleep(10)
        worker.say_of_loop(BLOCK)
        await asyncio.sleep(5)
        worker.say_of_loop(replace(BLOCK, blocked_s=10.0))
        await asyncio.sleep(5)
        worker.say_of_loop(LoopReport(loop="user-code-0", state="turned", blocked_s=12.0))

    run, reports = watched(small_config(), act)
    assert run.end.exit_code == 0, run.end.cause
    assert [row["blocked_s"] for row in named(run, "loop_blocked")] == [5.0, 10.0]
    first = named(run, "loop_blocked")[0]
    assert (first["process"], first["sample_id"]) == ("rollout-worker-0", "2-1")
    assert [row["blocked_s"] for row in named(run, "loop_turned")] == [12.0]
    assert reports.blocks == [("rollout-worker-0", BLOCK.cause)]
    assert run.end.summary["restarts"] == 0


def test_blocks_of_replicas_and_of_the_trainer_are_told_too():
    async def act(backend):
        await asyncio.sleep(20)
        backend.replicas[0].say_of_loop(replace(BLOCK, loop="serving"))
        backend.fake_trainer.say_of_loop(replace(BLOCK, loop="serving", blocked_s=100.0))

    run, reports = watched(small_config(), act)
    assert run.end.exit_code == 0, run.end.cause
    assert {name for name, _ in reports.blocks} == {"replica-0", "trainer-0"}
    assert run.end.summary["restarts"] == 0


@pytest.mark.parametrize("who", ["replica-0", "trainer-0"])
def test_a_process_that_came_in_place_of_a_lost_one_is_watched_too(who):
    def newest(backend):
        return backend.fake_trainer if who == "trainer-0" else backend.replicas[0]

    async def act(backend):
        await asyncio.sleep(10)
        newest(backend).kill()
        await asyncio.sleep(20)
        newest(backend).say_of_loop(replace(BLOCK, loop="serving"))

    run, reports = watched(small_config(), act)
    assert run.end.exit_code == 0, run.end.cause
    assert run.end.summary["restarts"] == 1
    assert reports.blocks == [(who, BLOCK.cause)]


def test_a_worker_that_gave_a_loop_up_finishes_its_groups_and_is_replaced():
    asked = []

    async def act(backend):
        worker = backend.workers[0]
        run_group = worker.run_group

        async def counted(request, replica):
            asked.append(asyncio.get_running_loop().time())
            return await run_group(request, replica)

        worker.run_group = counted
        await asyncio.sleep(10)
        worker.say_of_loop(replace(BLOCK, state="given_up", blocked_s=60.0))

    config = small_config()
    run, _ = watched(config, act)
    assert run.end.exit_code == 0, run.end.cause
    (retired,) = named(run, "rollout_worker_retired")
    assert asked
    assert max(asked) <= retired["t_s"]
    assert run.end.summary["restarts"] == 1
    (lost,) = named(run, "worker_lost")
    assert BLOCK.cause in lost["cause"]
    assert run.end.summary["failures"] == {}
    check_samples(config, run)


@pytest.mark.parametrize("answers_again", [True, False])
def test_a_worker_that_says_nothing_is_told_and_then_replaced(answers_again):
    """As with native code that holds the interpreter's lock."""
    config = config_with(loop_blocked_s=5.0, grace_s=5.0, loop_blocked_end_s=30.0)
    silent_s = 20.0 if answers_again else 1000.0

    async def act(backend):
        worker = backend.workers[0]
        await asyncio.sleep(10)
        watch, run_group, until_s = worker.watch, worker.run_group, 0.0

        async def silent():
            await worker._live(until_s - asyncio.get_running_loop().time())

        async def no_watch(after, wait_s):
            await silent()
            return await watch(after, wait_s)

        async def no_group(request, replica):
            await silent()
            return await run_group(request, replica)

        until_s = asyncio.get_running_loop().time() + silent_s
        worker.watch, worker.run_group = no_watch, no_group

    run, reports = watched(config, act)
    assert run.end.exit_code == 0, run.end.cause
    (blocked,) = named(run, "loop_blocked")
    assert (blocked["process"], blocked["call"]) == ("rollout-worker-0", "no answer")
    assert 10.0 <= blocked["blocked_s"] < 10.0 + 5.0
    assert len(reports.blocks) == 1
    assert len(named(run, "loop_turned")) == int(answers_again)
    assert run.end.summary["restarts"] == int(not answers_again)
    if not answers_again:
        (lost,) = named(run, "rollout_worker_lost")
        assert lost["t_s"] - blocked["t_s"] == pytest.approx(20.0, abs=5.0)
    check_samples(config, run)


def test_a_group_that_takes_its_worker_down_each_time_does_not_take_others_along():
    config = config_with(max_restarts=20, max_prompt_failures=1)

    def act(controller, backend):
        make = backend.rollout_worker

        def rollout_worker(worker_id):
            worker = make(worker_id)
            run_group = worker.run_group

            async def run(request, replica):
                if request.group_id == 2 and request.purpose is Purpose.TRAINING:
                    await asyncio.sleep(0.5)
                    worker.kill()
                    raise RolloutWorkerLostError("the worker died")
                return await run_group(request, replica)

            worker.run_group = run
            return worker

        backend.rollout_worker = rollout_worker

    run = simulate(config, SimSettings(seed=6), act=act)
    assert run.end.exit_code == 0, run.end.cause
    retries = config.rollout.retries[FailureClass.LOST_WORKER]
    assert run.end.summary["restarts"] == retries + 1
    failed = [row for row in run.recorder.rows("samples") if row["status"] == "failed"]
    assert {row["group_id"] for row in failed} == {2}
    assert {row["failure"] for row in failed} == {"lost_worker"}
    check_samples(config, run)


def test_a_dead_trainer_is_replaced_before_anything_is_asked_of_it():
    config = small_config()
    slow = replace(SimSettings(seed=5), tokens_per_s=2.0)  # the next batch is long in coming
    reports, died_s = Reports(), []

    def act(controller, backend):
        controller._reporter = reports
        train = controller.roles.train._train

        async def train_then_die(group_ids):
            trained = await train(group_ids)
            if not died_s:
                loop = asyncio.get_running_loop()
                loop.call_later(1.0, lambda: died_s.append(loop.time()) or trainer().kill())
            return trained

        def trainer():
            return backend.fake_trainer

        controller.roles.train._train = train_then_die

    run = simulate(config, slow, act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert run.end.summary["restarts"] == 1
    (replayed,) = named(run, "trainer_replayed")
    (lost,) = (row for row in named(run, "worker_lost") if row["worker"] == "trainer")
    assert lost["t_s"] == pytest.approx(died_s[0], abs=0.1)
    assert run.end.summary["trainer_wait_s"]["samples"] > 10.0
    # Its start, and one step to replay.
    back_s = 2 * (slow.startup_s + slow.train_step_s + slow.publish_s)
    assert replayed["t_s"] < died_s[0] + back_s


def test_a_trainer_that_dies_when_all_is_trained_and_saved_is_not_missed():
    reports = Reports()

    def act(controller, backend):
        controller._reporter = reports
        drain = controller.roles.validator.drain

        async def drain_without_trainer(stopping):
            backend.fake_trainer.kill()
            await asyncio.sleep(1.0)
            await drain(stopping)

        controller.roles.validator.drain = drain_without_trainer

    run = simulate(small_config(), SimSettings(seed=5), act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert run.end.summary["restarts"] == 0
