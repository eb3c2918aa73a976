"""When a replica that produces no token counts as stalled; on a virtual clock."""

import asyncio

import pytest

from freewheel.config.sections import HealthConfig
from freewheel.control.pool import Pool
from freewheel.control.replica_health import ReplicaHealth
from freewheel.control.waits import Signal, WaitTable
from freewheel.simulation.records import MemoryRecorder
from freewheel.simulation.virtual_time import run_virtual
from freewheel.types import ReplicaStats

LIMIT_S = 8.0  # looked at every 2 s


class Engine:
    """Has one request in [busy_from_s, ends_s), and its token only at the end."""

    replica_id = 0

    def __init__(self, *, busy_from_s, ends_s, silent=False):
        self.killed = False
        self._busy_from_s, self._ends_s, self._silent = busy_from_s, ends_s, silent

    async def stats(self):
        now_s = asyncio.get_running_loop().time()
        if self._silent and self._busy_from_s <= now_s < self._ends_s:
            await asyncio.Event().wait()
        return ReplicaStats(
            version=0,
            num_running=int(self._busy_from_s <= now_s < self._ends_s),
            num_waiting=0,
            num_generated_tokens=int(now_s >= self._ends_s),
        )

    def kill(self):
        self.killed = True


def watch(engine, *, prepare=lambda pool: None, until_s=40.0):
    """Watch one replica at version 0; whether it was replaced."""

    async def main():
        pool = Pool(
            num_shared=1,
            num_dedicated=0,
            capacity=2,
            partial_rollout=True,
            changed=Signal(),
            now_s=asyncio.get_running_loop().time,
        )
        pool.up(0, engine)
        pool.published(0)
        pool.begin_update(0, 0)
        pool.end_update(0, 0)
        pool.try_lease_training("group-0", min_version=0)
        prepare(pool)
        health = ReplicaHealth(
            pool=pool,
            health=HealthConfig(replica_stall_s=LIMIT_S),
            waits=WaitTable(),
            recorder=MemoryRecorder(),
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(until_s):
                await health.run()

    run_virtual(main)
    return engine.killed


@pytest.mark.parametrize("silent", [False, True])
def test_a_replica_that_stands_still_with_work_is_replaced(silent):
    assert watch(Engine(busy_from_s=3.9, ends_s=3.9 + 2 * LIMIT_S, silent=silent))


def test_work_that_came_just_before_a_look_has_the_whole_limit():
    # Seen idle at 2 s, busy at 4 s; at 10 s it has worked for 6.1 s only.
    assert not watch(Engine(busy_from_s=3.9, ends_s=3.9 + LIMIT_S - 0.1))


@pytest.mark.parametrize("silent", [False, True])
def test_a_replica_that_loads_weights_need_not_sample_but_answers(silent):
    def load(pool):
        pool.published(1)
        pool.begin_update(0, 1)

    engine = Engine(busy_from_s=0.0, ends_s=4 * LIMIT_S, silent=silent)
    assert bool(watch(engine, prepare=load, until_s=4 * LIMIT_S)) is silent
