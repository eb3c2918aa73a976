"""The Ray backend's proxies against small cores: calls, errors, cancellation, data by reference."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import ray
from blockbuster import blockbuster_ctx

from freewheel.errors import (
    FailureClass,
    FreewheelError,
    LostError,
    ReplicaLostError,
    RolloutError,
    RolloutWorkerLostError,
    StartupError,
    TrainerLostError,
    TrainingDivergedError,
)
from freewheel.types import Purpose, Split, TrainRequest
from tests.e2e import ray_cores
from tests.e2e.ray_helpers import ended_within, group, make_backend

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
]


class World:
    """A started backend with one process of each kind."""

    def __init__(self, log_dir):
        self.log_dir = log_dir
        self.backend = make_backend(log_dir=log_dir)

    async def start(self):
        async with asyncio.timeout(90):
            await self.backend.start()
            self.replica = self.backend.replica(0)
            self.worker = self.backend.rollout_worker(0)
            self.trainer = self.backend.trainer()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.replica.start())
                opened = tasks.create_task(self.worker.start())
                info = tasks.create_task(self.trainer.start(None))
        self.datasets, self.trainer_info = opened.result(), info.result()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("logs"))
    try:
        await world.start()
        yield world
    finally:
        await world.backend.aclose()


def train_request(step, payloads):
    return TrainRequest(
        step=step, policy_version=0, payloads=payloads, mini_batch_groups=1, num_tokens=1
    )


async def test_start_answers_and_processes_are_told_apart(world):
    assert world.datasets[Split.TRAIN].fingerprint == "worker-0"
    assert world.trainer_info.device == "alone"
    pids = {world.replica.pid, world.worker.pid, world.trainer.pid}
    assert len(pids) == 3
    assert all(psutil.Process(pid).nice() == 0 for pid in pids)
    assert world.replica.waiting_for == world.trainer.waiting_for == ""


async def test_output_of_a_process_goes_to_its_file(world):
    assert "engine up" in (world.log_dir / "replica-0.log").read_text()


async def test_threads_are_those_of_the_configuration(world):
    assert (await world.replica.stats()).extra["omp"] == 1


async def test_prepare(world):
    infos = await world.worker.prepare(Split.TRAIN, range(2, 4))
    assert [info.num_prompt_tokens for info in infos] == [3, 4]


async def test_a_group_is_run_and_trained_by_reference(world):
    result = await world.worker.run_group(group(ray_cores.TRAIN), world.replica)
    assert [outcome.sample_id for outcome in result.outcomes] == ["s0", "s1"]
    assert isinstance(result.payload, ray.ObjectRef)
    trained = await world.trainer.train_step(train_request(1, (result.payload, result.payload)))
    # Two payloads of one group, as after a retry, are one group to the trainer.
    assert (trained.metrics["groups"], trained.metrics["tokens"]) == (1, 12)


async def test_validation_has_no_payload(world):
    request = group(ray_cores.TRAIN, purpose=Purpose.VALIDATION)
    assert (await world.worker.run_group(request, world.replica)).payload is None


async def test_weights_reach_the_engine_as_a_view_of_shared_memory(world):
    weights = await world.trainer.publish(3)
    assert weights.num_bytes == 20_000_000
    await world.replica.update_weights(weights)
    stats = await world.replica.stats()
    assert stats.version == 3
    assert stats.extra["sum"] == 60_000_000
    assert stats.extra["owns"] == stats.extra["writeable"] == 0


async def test_weights_in_the_trainer_s_memory_go_with_the_last_reference(world):
    async def metrics():
        return (await world.trainer.train_step(train_request(1, ()))).metrics

    kept, unneeded = await world.trainer.publish(3), await world.trainer.publish(4)
    number = int((await metrics())["published"])
    await world.replica.update_weights(unneeded)
    assert f"dropped/{number}" not in await metrics()
    del unneeded
    async with asyncio.timeout(10):
        while f"dropped/{number}" not in await metrics():
            pass
    await world.replica.update_weights(kept)
    assert f"dropped/{number - 1}" not in await metrics()


async def test_writing_runs_beside_training(world, tmp_path):
    refs = world.trainer.load_trajectories(tmp_path, [])
    assert refs == []
    result = await world.worker.run_group(group(ray_cores.TRAIN), world.replica)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        # Step 99 waits until a state was written: it ends early only if both run at once.
        step = tasks.create_task(world.trainer.train_step(train_request(99, (result.payload,))))
        started = time.monotonic()
        weights = await world.trainer.publish(3)
        await world.trainer.write_state(4, tmp_path, [result.payload], [weights])
    assert time.monotonic() - started < 15
    assert (tmp_path / "written.txt").read_text() == "5 freewheel-write_0"
    assert (tmp_path / "held.txt").read_text() == "{3: 20000000}"
    assert step.result().metrics["thread/freewheel-train_0"] == 1


@pytest.mark.parametrize("group_ids", [[3], [3, 9]])
async def test_trajectories_of_a_checkpoint_are_references_at_once(world, tmp_path, group_ids):
    (tmp_path / ray_cores.FILE).write_text("")
    refs = world.trainer.load_trajectories(tmp_path, group_ids)
    assert len(refs) == len(group_ids)
    trained = await world.trainer.train_step(train_request(2, tuple(refs)))
    assert trained.metrics["tokens"] == 4 * len(group_ids)


async def test_an_unreadable_checkpoint_fails_who_uses_it(world, tmp_path):
    refs = world.trainer.load_trajectories(tmp_path / "missing", [1, 2])
    with pytest.raises(FreewheelError, match="No such file"):
        await world.trainer.train_step(train_request(2, tuple(refs)))


async def test_our_errors_keep_their_class_and_fields(world):
    with pytest.raises(TrainingDivergedError, match=r"^step 13: loss is nan$") as caught:
        await world.trainer.train_step(train_request(13, ()))
    assert type(caught.value) is TrainingDivergedError
    with pytest.raises(RolloutError, match="reward of 3") as refused:
        await world.worker.run_group(group(ray_cores.ROLLOUT_ERROR), world.replica)
    assert refused.value.failure is FailureClass.REWARD


async def test_an_error_of_the_engine_passes_two_processes(world):
    with pytest.raises(RolloutError, match="prompt of 9 tokens") as refused:
        await world.worker.run_group(group(ray_cores.ENGINE_ERROR), world.replica)
    assert refused.value.failure is FailureClass.OVER_LONG_PROMPT


async def test_a_foreign_error_comes_with_its_remote_traceback(world):
    with pytest.raises(FreewheelError, match="CustomError") as caught:
        await world.worker.run_group(group(ray_cores.USER_ERROR), world.replica)
    assert type(caught.value) is FreewheelError
    assert 'raise CustomError("lost", "in transit")' in str(caught.value)


async def test_cancelling_a_group_cancels_it_in_the_worker_and_in_the_engine(world):
    before = (await world.replica.stats()).extra["cancelled"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await world.worker.run_group(group(ray_cores.HANG_IN_ENGINE), world.replica)
    async with asyncio.timeout(10):
        stats = await world.replica.stats()
        while stats.extra["cancelled"] == before:
            stats = await world.replica.stats()
    assert stats.num_running == 0


async def test_nothing_blocks_the_event_loop(world, tmp_path):
    with blockbuster_ctx():
        replica = world.backend.replica(5)
        await replica.start()
        await replica.update_weights(await world.trainer.publish(4))
        result = await world.worker.run_group(group(ray_cores.TRAIN), replica)
        await world.trainer.train_step(train_request(5, (result.payload,)))
        world.trainer.load_trajectories(tmp_path, [1])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await world.worker.run_group(group(ray_cores.HANG_IN_ENGINE), replica)
        replica.kill()
        with pytest.raises(ReplicaLostError):
            await replica.stats()


async def test_a_payload_outlives_its_worker(world):
    worker = world.backend.rollout_worker(1)
    await worker.start()
    result = await worker.run_group(group(ray_cores.BIG), world.replica)
    process = psutil.Process(worker.pid)
    worker.kill()
    await asyncio.to_thread(process.wait, 10)
    trained = await world.trainer.train_step(train_request(3, (result.payload,)))
    assert trained.metrics["tokens"] == 2 * ray_cores.BIG_TOKENS


async def test_a_replica_that_dies_is_named_to_the_caller_and_to_the_worker(world):
    replica = world.backend.replica(7)
    await replica.start()
    async with asyncio.timeout(20):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_kill_soon(replica.pid))
            request = group(ray_cores.HANG_IN_ENGINE)
            call = tasks.create_task(_expect_lost(world.worker.run_group(request, replica)))
        assert call.result().startswith("replica-7: generate: the process is gone")
        assert str(replica.pid) in call.result()
        with pytest.raises(ReplicaLostError, match="replica-7: stats"):
            await replica.stats()
    again = world.backend.replica(7)
    await again.start()
    assert again.pid != replica.pid
    replica.kill()


async def test_a_worker_that_dies_fails_its_calls(world):
    worker = world.backend.rollout_worker(2)
    await worker.start()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(_kill_soon(worker.pid))
        with pytest.raises(RolloutWorkerLostError, match=f"worker-2: run_group.*{worker.pid}"):
            await worker.run_group(group(ray_cores.HANG_IN_ENGINE), world.replica)


async def test_a_trainer_that_dies_fails_its_calls(world):
    trainer = world.backend.trainer()
    await trainer.start(None)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(_kill_soon(trainer.pid))
        with pytest.raises(TrainerLostError, match="trainer-0: train_step"):
            await trainer.train_step(train_request(99, ()))


async def test_kill_frees_the_callers_and_ends_a_worker_whose_loop_is_blocked(world):
    worker = world.backend.rollout_worker(3)
    await worker.start()
    process = psutil.Process(worker.pid)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        call = tasks.create_task(
            _expect_lost(worker.run_group(group(ray_cores.SPIN), world.replica))
        )
        await asyncio.sleep(0.5)
        started = time.monotonic()
        worker.kill()
        worker.kill()
        assert time.monotonic() - started < 0.1
    assert "was killed" in call.result()
    await asyncio.to_thread(process.wait, 10)


async def test_kill_ends_a_stopped_process_and_what_user_code_started(world):
    worker = world.backend.rollout_worker(4)
    await worker.start()
    result = await worker.run_group(group(ray_cores.SPAWN, n=1), world.replica)
    processes = [psutil.Process(worker.pid), psutil.Process(int(result.outcomes[0].answer))]
    os.kill(worker.pid, signal.SIGSTOP)
    worker.kill()
    assert await ended_within(processes, 15)


async def test_a_core_that_cannot_be_built_is_a_startup_error(world):
    trainer = world.backend.trainer()
    with pytest.raises(StartupError, match=r"(?s)trainer-0: start.*FileNotFoundError"):
        await trainer.start(Path("missing"))
    with pytest.raises(TrainerLostError, match="was killed"):
        await trainer.copy_state(1)


async def test_calls_before_the_start_are_refused(world):
    with pytest.raises(ReplicaLostError, match="replica-9: is not started"):
        await world.backend.replica(9).stats()


async def _kill_soon(pid):
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGKILL)


async def _expect_lost(call):
    with pytest.raises(LostError) as caught:
        await call
    return str(caught.value)
