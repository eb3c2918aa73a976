"""vLLM passes the contract, and ends as it must when it is killed, also in a weight update.

Runs where vLLM is installed: `make test-vllm`. An engine takes 20 s to start, so that most tests
share one.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch

from freewheel.backends.vllm import engine
from freewheel.backends.vllm.engine import VllmEngine
from freewheel.errors import ConfigError, ReplicaLostError, StartupError
from freewheel.remote_weights import WeightSource
from tests.contract import engine_suite
from tests.contract.engine_suite import *  # noqa: F403  # its tests are this module's
from tests.contract.replica_suite import *  # noqa: F403  # as above
from tests.contract.subjects import (
    MAX_RESPONSE,
    CoreSubject,
    bundle,
    config,
    make_model,
    request,
    save,
    until,
)
from tests.remote_source import source_process

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    # vLLM and what it imports warn of their own matters.
    pytest.mark.filterwarnings("ignore"),
]
ROOT = Path(__file__).parents[2]


def engine_processes() -> set[psutil.Process]:
    return {p for p in psutil.Process().children(recursive=True) if "VLLM" in p.name()}


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


class VllmSubject(CoreSubject):
    """Dies with the process that computes."""

    def __init__(self, core: VllmEngine, process: psutil.Process) -> None:
        super().__init__(core)
        self.process = process

    async def kill(self) -> None:
        if not gone(self.process):
            self.process.kill()
            await until(lambda: gone(self.process))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    core = VllmEngine(config("vllm"), save(tmp_path_factory.mktemp("model")))
    await core.start()
    yield core
    await core.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def core(shared):
    if shared.stats().version != 0:
        await shared.update_weights(0, bundle(0))
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def new_subject(tmp_path):
    made = []

    async def make(**model):
        others = engine_processes()
        core = VllmEngine(config("vllm"), save(tmp_path, **model), stop_timeout_s=20)
        made.append(core)
        await core.start()
        (process,) = engine_processes() - others
        return VllmSubject(core, process)

    yield make
    for core in made:
        await core.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def new_core(new_subject):
    async def make(**model):
        return (await new_subject(**model)).core

    return make


@pytest.fixture
def held_update(monkeypatch):
    """An update stops between its first and its last word to the engine, until it is let go."""
    entered, go = asyncio.Event(), asyncio.Event()
    send = VllmEngine._send

    async def held(self, update_info):
        entered.set()
        await go.wait()
        await send(self, update_info)

    monkeypatch.setattr(VllmEngine, "_send", held)
    return entered, go


async def _is_over(subject, message):
    """The engine serves no more, and its process is gone."""
    for call in (subject.core.generate([request("later", [5])], timeout_s=5), subject.update(7)):
        with pytest.raises(ReplicaLostError, match=message):
            await call
    with pytest.raises(ReplicaLostError, match=message):
        subject.core.stats()
    await until(lambda: gone(subject.process))


async def test_killed_in_an_update_it_fails_every_call(new_subject, held_update):
    subject = await new_subject()
    entered, go = held_update
    go.set()
    await subject.update(0)
    go.clear()
    entered.clear()
    flying = asyncio.tasks.Task(
        subject.core.generate([request("a", [5], max_tokens=MAX_RESPONSE)], timeout_s=60)
    )
    await subject.under_way()
    update = asyncio.tasks.Task(subject.update(1))
    await entered.wait()
    await subject.kill()
    go.set()
    for call in (update, flying):
        with pytest.raises(ReplicaLostError):
            await call
    await _is_over(subject, "vLLM")


async def test_a_cancelled_update_ends_the_engine(new_subject, held_update):
    subject = await new_subject()
    entered, _ = held_update
    update = asyncio.tasks.Task(subject.update(0))
    await entered.wait()
    flying = asyncio.tasks.Task(subject.core.generate([request("a", [5])], timeout_s=60))
    await asyncio.sleep(0.1)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    with pytest.raises(ReplicaLostError, match="version 0 was not loaded"):
        await flying
    await _is_over(subject, "version 0 was not loaded")


async def test_an_update_that_lacks_a_tensor_ends_the_engine(new_subject, monkeypatch):
    subject = await new_subject()
    await subject.update(0)
    prepare = VllmEngine._prepare

    def cut(self, *args):
        about = prepare(self, *args)
        return about | {"tensors": about["tensors"][:-1]}

    monkeypatch.setattr(VllmEngine, "_prepare", cut)
    flying = asyncio.tasks.Task(
        subject.core.generate([request("a", [5], max_tokens=MAX_RESPONSE)], timeout_s=60)
    )
    await subject.under_way()
    with pytest.raises(ReplicaLostError, match="version 1 was not loaded"):
        await subject.update(1)
    with pytest.raises(ReplicaLostError):
        await flying
    await _is_over(subject, "version 1 was not loaded")


async def test_weights_larger_than_a_chunk_arrive_whole(core, monkeypatch):
    plan = engine.plan_chunks
    monkeypatch.setattr(engine, "plan_chunks", lambda specs: plan(specs, max_bytes=5000))
    await test_each_of_several_updates_is_whole(core)  # noqa: F405  # of the suite


@pytest.fixture
def remote(monkeypatch):
    """Bundles lie in a trainer's memory: the source's, in this process."""
    pytest.importorskip("nixl")
    source = WeightSource(config("vllm"))

    def published(version):
        named = make_model(version).named_parameters()
        return source.publish(named, dtype=torch.float32)

    monkeypatch.setattr(engine_suite, "bundle", published)
    return source


@pytest.mark.parametrize("max_bytes", [5000, 1 << 28])
async def test_weights_are_read_out_of_the_trainer_s_memory(core, remote, max_bytes, monkeypatch):
    plan = engine.plan_chunks
    monkeypatch.setattr(engine, "plan_chunks", lambda specs: plan(specs, max_bytes=max_bytes))
    await test_each_of_several_updates_is_whole(core)  # noqa: F405  # of the suite


async def test_a_source_that_is_gone_ends_the_engine_and_nothing_is_half_loaded(new_subject):
    pytest.importorskip("nixl")
    subject = await new_subject()
    await subject.update(0)
    with source_process(1) as (_, weights):
        pass
    flying = asyncio.tasks.Task(
        subject.core.generate([request("a", [5], max_tokens=MAX_RESPONSE)], timeout_s=60)
    )
    await subject.under_way()
    with pytest.raises(ReplicaLostError, match="version 1 was not loaded"):
        await subject.core.update_weights(1, weights)
    with pytest.raises(ReplicaLostError):
        await flying
    await _is_over(subject, "version 1 was not loaded")


async def test_it_listens_on_the_loopback_interface_alone(core):
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        for connection in process.net_connections(kind="inet"):
            assert connection.laddr.ip in ("127.0.0.1", "::1"), (process.name(), connection)


REPLICA = """
import asyncio, sys
from pathlib import Path

from freewheel.backends.vllm.engine import VllmEngine
from tests.contract.subjects import config, save


async def main():
    core = VllmEngine(config("vllm"), save(Path(sys.argv[1])))
    await core.start()
    Path(sys.argv[2]).touch()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_its_process_ends_with_the_replicas(tmp_path):
    script, started = tmp_path / "replica.py", tmp_path / "started"
    script.write_text(REPLICA)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    replica = psutil.Popen(
        [sys.executable, str(script), str(tmp_path), str(started)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await until(lambda: started.exists() or gone(replica), timeout_s=200)
        below = replica.children(recursive=True)
        assert any("VLLM" in process.name() for process in below)
    finally:
        replica.kill()
    replica.wait()
    # They hear of it at once; the limit is for a busy machine.
    await until(lambda: all(gone(process) for process in below), timeout_s=20)


async def test_nothing_is_left_in_shared_memory(core):
    before = set(os.listdir("/dev/shm"))
    await core.update_weights(1, bundle(1))
    assert set(os.listdir("/dev/shm")) <= before


async def test_a_build_for_another_device_is_refused(core, tmp_path):
    import dataclasses

    on_gpu = config("vllm")
    on_gpu = dataclasses.replace(on_gpu, rollout=dataclasses.replace(on_gpu.rollout, device="cuda"))
    with pytest.raises(ConfigError, match=r"rollout\.device=cuda"):
        await VllmEngine(on_gpu, save(tmp_path)).start()


async def test_memory_that_cannot_hold_one_request_fails_the_start(tmp_path):
    engine = VllmEngine(config("vllm", kv_cache_bytes=1 << 16), save(tmp_path))
    with pytest.raises(StartupError, match="vLLM did not come up"):
        await engine.start()
    await engine.aclose()
