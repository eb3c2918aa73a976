"""Placement and the end: what cannot fit, what waits, several ranks, and no process left behind."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from freewheel.backends.ray import process as process_module
from freewheel.config.sections import ActorConfig, Config, RayConfig
from freewheel.errors import ReplicaLostError, StartupError
from tests.e2e.ray_helpers import alive, descendants, ended_within, make_backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio,
]


async def test_what_can_never_fit_is_refused_at_once_and_nothing_is_left():
    before = {child.pid for child in descendants()}
    backend = make_backend(
        Config(ray=RayConfig(num_cpus=1, cpus_per_replica=3, object_store_bytes=1 << 27))
    )
    async with asyncio.timeout(60):
        with pytest.raises(StartupError, match=r"a replica needs 3 CPU.*ray\.cpus_per_replica"):
            await backend.start()
        started = [child for child in descendants() if child.pid not in before]
        assert started
        temp_dir = backend._cluster._temp_dir.path
        await backend.aclose()
        await backend.aclose()
    assert alive(started) == []
    assert not temp_dir.exists()


async def test_a_cluster_that_waits_says_so_and_ranks_act_as_one(monkeypatch):
    monkeypatch.setattr(process_module, "_PATIENCE_S", 0.3)
    backend = make_backend(
        Config(
            ray=RayConfig(num_cpus=4, cpus_per_trainer=1.2, object_store_bytes=1 << 27),
            actor=ActorConfig(strategy="fsdp2", world_size=2),
        )
    )
    try:
        async with asyncio.timeout(90):
            await backend.start()
            trainer, replica, late = backend.trainer(), backend.replica(0), backend.replica(1)
            info = await trainer.start(None)
            assert info.device == "0 of 2 at tcp"
            assert len({rank.pid for rank in trainer.ranks}) == 2
            weights = await trainer.publish(1)
            await replica.start()
            await replica.update_weights(weights)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3):
                    await late.start()
            assert late.waiting_for.startswith("replica-1 waits for 1 CPU")
            assert "0.6 of 4 CPU" in late.waiting_for
            assert "127.0.0.1 (4 CPU" in late.waiting_for
            with pytest.raises(ReplicaLostError):
                await late.stats()
            hanging = asyncio.TaskGroup()
            async with hanging:
                call = hanging.create_task(_lost(replica))
                await asyncio.sleep(0.2)
                started = descendants()
                await backend.aclose()
            assert "was killed" in call.result()
    finally:
        await backend.aclose()
    assert len(started) > 3
    assert alive(started) == []


async def test_nothing_outlives_a_driver_that_is_killed_and_ctrl_c_spares_the_workers():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    driver = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.e2e.ray_driver",
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    async with asyncio.timeout(90):
        processes = [psutil.Process(int(pid)) for pid in (await driver.stdout.readline()).split()]
        # Ray's agents, idle, stay for a minute: so long they ask for the rest of the cluster.
        processes = [process for process in processes if not process.name().endswith("Agent")]
        assert any("ReplicaActor" in process.name() for process in processes)
        os.killpg(driver.pid, signal.SIGINT)
        assert await driver.stdout.readline() == b"0\n"
        assert len(alive(processes)) == len(processes)
        driver.kill()
        await driver.wait()
        assert await ended_within(processes, 20)


async def _lost(replica):
    with pytest.raises(ReplicaLostError) as caught:
        await replica.process.call("generate", [], 1)
    return str(caught.value)
