"""A process answers `watch` while its serving loop is blocked, but not while it holds the lock."""

import asyncio
import time

import pytest
import pytest_asyncio

from freewheel.config.sections import Config, HealthConfig, RayConfig
from freewheel.errors import RolloutWorkerLostError
from tests.e2e import ray_cores
from tests.e2e.ray_helpers import group, make_backend

LIMIT_S = 0.6

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio, pytest.mark.timeout(120)]


@pytest_asyncio.fixture
async def world():
    backend = make_backend(
        Config(
            ray=RayConfig(num_cpus=8, object_store_bytes=1 << 27),
            health=HealthConfig(loop_blocked_s=LIMIT_S),
        )
    )
    try:
        async with asyncio.timeout(90):
            await backend.start()
            replica, worker = backend.replica(0), backend.rollout_worker(0)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(replica.start())
                tasks.create_task(worker.start())
        yield replica, worker
    finally:
        await backend.aclose()


async def _lost(worker, replica, kind):
    with pytest.raises(RolloutWorkerLostError):
        await worker.run_group(group(kind), replica)


async def test_watch_answers_while_the_serving_loop_sleeps(world):
    replica, worker = world
    assert await worker.watch(0, 0.1) == []
    assert await replica.watch(0, 0.1) == []
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(_lost(worker, replica, ray_cores.SPIN))
        began_s = time.monotonic()
        (first,) = await worker.watch(0, 20.0)
        # The limit, plus the 1 s within which a watch is to notice, plus the way there and back.
        assert time.monotonic() - began_s < LIMIT_S + 1 + 2
        (second,) = await worker.watch(first.number, 20.0)
        worker.kill()
    assert (first.number, first.loop, first.state) == (1, "serving", "blocked")
    assert "run_group (" in first.cause
    assert "ray_cores.py" in first.cause
    assert "time.sleep(60)" in first.cause
    assert second.number == 2
    assert second.blocked_s > first.blocked_s >= LIMIT_S
    assert await replica.watch(0, 0.1) == []


async def test_watch_does_not_answer_while_native_code_holds_the_interpreter_s_lock(world):
    replica, worker = world
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(_lost(worker, replica, ray_cores.HOLD))
        await asyncio.sleep(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await worker.watch(0, 0.1)
        worker.kill()
