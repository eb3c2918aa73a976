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

LIMIT_S = 16.0  # looked at every 2 s


class Engine:
    """Has one request in [busy_from_s, ends_s) but in its breaks, and its token only at the end."""

    replica_id = 0

    def __init__(self, *, busy_from_s, ends_s, silent=False, breaks=()):
        self.killed = False
        self._busy_from_s, self._ends_s, self._silent = busy_from_s, ends_s, silent
        self._breaks = breaks

    async def stats(self):
        now_s = asyncio.get_running_loop().time()
        is_busy = self._busy_from_s <= now_s < self._ends_s
        is_busy = is_busy and not any(from_s <= now_s < to_s for from_s, to_s in self._breaks)
        if self._silent and is_busy:
            await asyncio.Event().wait()
        return ReplicaStats(
            version=0,
            num_running=int(is_busy),
            num_waiting=0,
            num_generated_tokens=int(now_s >= self._ends_s),
        )

    def kill(self):
        self.killed = True


def watch(engine, *, prepare=lambda pool: None, until_s=60.0, wanted=True):
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
        if wanted:
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


def test_moments_without_work_do_not_hide_that_nothing_comes_of_it():
    """Its requests time out; a look now and then falls between two of them."""
    breaks = [(at_s - 0.1, at_s + 0.1) for at_s in range(8, 60, 6)]
    assert watch(Engine(busy_from_s=1.0, ends_s=60.0, breaks=breaks))
    assert not watch(Engine(busy_from_s=1.0, ends_s=17.0, breaks=breaks))


def test_new_weights_do_not_hide_that_nothing_is_sampled_under_them():
    def load_now_and_then(pool):
        def toggle(version):
            if pool.slots[0].updating_to is None:
                pool.published(version)
                pool.begin_update(0, version)
            else:
                pool.end_update(0, version)
            again_s = 0.2 if pool.slots[0].updating_to else 5.8
            loop.call_later(again_s, toggle, version + (again_s > 1))

        loop = asyncio.get_running_loop()
        loop.call_later(5.9, toggle, 1)  # every third look falls into a load

    assert watch(Engine(busy_from_s=0.0, ends_s=60.0), prepare=load_now_and_then)


def test_work_that_came_just_before_a_look_has_the_whole_limit():
    # Seen idle at 2 s, busy at 4 s; at 18 s it has worked for 14.1 s only.
    assert not watch(Engine(busy_from_s=3.9, ends_s=3.9 + LIMIT_S - 0.1))


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_a_replica_that_loads_weights_need_not_sample_but_answers(silent, wanted):
    def load(pool):
        pool.published(1)
        pool.begin_update(0, 1)

    engine = Engine(busy_from_s=0.0, ends_s=4 * LIMIT_S, silent=silent)
    killed = watch(engine, prepare=load, until_s=4 * LIMIT_S, wanted=wanted)
    assert killed is silent
