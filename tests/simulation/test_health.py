"""Stalls under simulation: found by name within their limit, ended or recovered from."""

import asyncio
from dataclasses import replace

import pytest

from freewheel.errors import ReplicaLostError
from freewheel.simulation.run import simulate
from freewheel.simulation.settings import SimSettings
from tests.simulation.scenarios import check_samples, small_config


class Reports:
    def __init__(self):
        self.stalls = []

    async def report(self, stall):
        self.stalls.append((asyncio.get_running_loop().time(), stall))


def watched(config, settings, act=None):
    reports = Reports()
    return simulate(config, settings, act=act, reporter=reports), reports


def config_with(**health):
    config = small_config()
    return replace(config, health=replace(config.health, **health))


def test_a_healthy_run_raises_no_alarm():
    run, reports = watched(small_config(), SimSettings(seed=1))
    assert run.end.exit_code == 0
    assert reports.stalls == []
    assert run.end.summary["restarts"] == 0


@pytest.mark.parametrize("action", ["end", "off"])
def test_a_replica_that_answers_but_produces_no_tokens_is_replaced(action):
    def act(controller, backend):
        make, made = backend.replica, 0

        def replica(replica_id):
            nonlocal made
            fake = make(replica_id)
            made += 1
            if made == 1:
                generate, calls = fake.generate, 0

                async def stuck(num_tokens):
                    nonlocal calls
                    calls += 1
                    if calls > 3:
                        fake._num_running += 1
                        await fake._died.wait()
                    return await generate(num_tokens)

                fake.generate = stuck
            return fake

        backend.replica = replica

    config = config_with(replica_stall_s=10.0, watchdog=action)
    run, _ = watched(config, SimSettings(seed=2), act)
    assert run.end.exit_code == 0, run.end.cause
    stalled = [e for e in run.recorder.rows("events") if e["event"] == "replica_stalled"]
    assert [event["replica"] for event in stalled] == [0]
    assert "no answer" not in stalled[0]["reason"]
    check_samples(config, run)


def test_a_replica_that_does_not_answer_is_replaced():
    def act(controller, backend):
        make, made = backend.replica, 0

        def replica(replica_id):
            nonlocal made
            fake = make(replica_id)
            made += 1
            if made == 2:

                async def silent(*_):
                    await fake._died.wait()
                    raise ReplicaLostError("replica 1 was killed")

                fake.generate = fake.stats = silent
            return fake

        backend.replica = replica

    config = config_with(replica_stall_s=10.0)
    run, _ = watched(config, SimSettings(seed=3), act)
    assert run.end.exit_code == 0, run.end.cause
    stalled = [e for e in run.recorder.rows("events") if e["event"] == "replica_stalled"]
    assert [event["replica"] for event in stalled] == [1]
    assert "no answer" in stalled[0]["reason"]


@pytest.mark.parametrize("action", ["end", "report"])
def test_a_wait_without_a_deadline_is_found_by_the_watchdog(action):
    """What no deadline covers: the rollouter never starts another group."""

    def act(controller, backend):
        controller.roles.admission.hold("a bug")

    config = config_with(stall_timeout_s=100.0, watchdog=action)
    if action == "report":
        settings = SimSettings(seed=4)
        reports = Reports()
        run = simulate(config, settings, act=act, reporter=reports, kill_at_s=1000.0)
        assert run.end is None
        assert len(reports.stalls) >= 5
        return
    run, reports = watched(config, SimSettings(seed=4), act)
    assert run.end.exit_code == 4
    assert "the run has work but has not moved" in run.end.cause
    ((at_s, stall),) = reports.stalls
    assert at_s < 100.0 + 30.0 + 60.0
    waiters = {wait.waiter: wait for wait in stall.waits}
    assert waiters["rollouter"].held_by == ("a bug",)


def test_rollouts_that_stop_in_a_worker_are_recovered_by_replacing_it():
    def act(controller, backend):
        make, made = backend.rollout_worker, 0

        def worker(worker_id):
            nonlocal made
            fake = make(worker_id)
            made += 1
            if made == 1:
                run_group, calls = fake.run_group, 0

                async def stuck(request, replica):
                    nonlocal calls
                    calls += 1
                    if calls > 4:
                        await asyncio.Event().wait()
                    return await run_group(request, replica)

                fake.run_group = stuck
            return fake

        backend.rollout_worker = worker

    config = config_with(watchdog="recover")
    run, _ = watched(config, SimSettings(seed=5), act)
    assert run.end.exit_code == 0, run.end.cause
    check_samples(config, run)
