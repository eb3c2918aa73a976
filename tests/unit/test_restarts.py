"""Replacements: so many in a window of time, and none for what never came up."""

import asyncio

import pytest

from freewheel.config.sections import HealthConfig
from freewheel.control.restarts import Restarts
from freewheel.errors import ReplicaLostError, RolloutWorkerLostError
from freewheel.simulation.records import MemoryRecorder
from freewheel.simulation.virtual_time import run_virtual


def make(*, limit=2, window_s=100.0):
    recorder = MemoryRecorder()
    health = HealthConfig(max_restarts=limit, restart_window_s=window_s)
    restarts = Restarts(health, recorder)
    for who in ("replica-0", "replica-1"):
        restarts.came_up(who)
    return restarts, recorder


def test_more_losses_than_allowed_within_the_window_end_the_run_with_the_last_cause():
    async def main():
        restarts, recorder = make()
        restarts.spend("replica-0", ReplicaLostError("first"))
        await asyncio.sleep(60)
        restarts.spend("replica-1", ReplicaLostError("second"))
        await asyncio.sleep(39)
        with pytest.raises(ReplicaLostError, match=r"^third \(replaced 2 .*restart_window_s\)$"):
            restarts.spend("replica-0", ReplicaLostError("third"))
        assert [row["replaced"] for row in recorder.rows("events")] == [True, True, False]

    run_virtual(main)


def test_a_loss_counts_no_longer_when_the_window_is_over_but_stays_in_the_total():
    async def main():
        restarts, recorder = make()
        for _ in range(20):
            restarts.spend("replica-0", ReplicaLostError("again"))
            await asyncio.sleep(50)
        assert restarts.count == 20
        assert [row["restarts"] for row in recorder.rows("events")] == list(range(1, 21))

    run_virtual(main)


def test_with_no_restarts_allowed_the_first_loss_ends_the_run():
    async def main():
        restarts, _ = make(limit=0)
        with pytest.raises(ReplicaLostError, match=r"health\.max_restarts"):
            restarts.spend("replica-0", ReplicaLostError("gone"))

    run_virtual(main)


def test_a_worker_that_was_never_up_ends_the_run_at_its_third_loss():
    async def main():
        restarts, _ = make(limit=100)
        for _ in range(2):
            restarts.spend("rollout-worker-0", RolloutWorkerLostError("died at start"))
            restarts.spend("rollout-worker-1", RolloutWorkerLostError("died at start"))
        restarts.came_up("rollout-worker-1")
        for _ in range(5):
            restarts.spend("rollout-worker-1", RolloutWorkerLostError("died at start"))
        with pytest.raises(RolloutWorkerLostError, match="rollout-worker-0 was lost 3 times and"):
            restarts.spend("rollout-worker-0", RolloutWorkerLostError("died at start"))

    run_virtual(main)
