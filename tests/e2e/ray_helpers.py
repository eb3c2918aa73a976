"""What the tests of the Ray backend share: configuration, requests, processes."""

import asyncio
import contextlib
import time
from pathlib import Path

import psutil

from freewheel.backends.ray import Cores, RayBackend
from freewheel.config.sections import Config, RayConfig
from freewheel.types import GroupRequest, Member, Purpose, SamplingParams, Split

CORES = Cores(
    replica="tests.e2e.ray_cores:Engine",
    rollout_worker="tests.e2e.ray_cores:Worker",
    trainer="tests.e2e.ray_cores:Trainer",
    trainer_ranks="tests.e2e.ray_cores:ranks",
    read_trajectories="tests.e2e.ray_cores:read",
    trajectories_file="tests.e2e.ray_cores:FILE",
)


def make_backend(config=None, *, log_dir=None):
    config = config or Config(ray=RayConfig(num_cpus=8, object_store_bytes=1 << 28))
    return RayBackend(config, Path("model"), log_dir=log_dir, cores=CORES)


def group(kind, *, purpose=Purpose.TRAINING, group_id=5, n=2):
    return GroupRequest(
        request_id=f"r-{group_id}",
        group_id=group_id,
        split=Split.TRAIN,
        purpose=purpose,
        prompt_index=kind,
        members=tuple(Member(sample_id=f"s{i}", attempt=0, seed=i) for i in range(n)),
        sampling=SamplingParams(max_tokens=4),
        timeout_s=60.0,
    )


def descendants():
    return psutil.Process().children(recursive=True)


def alive(processes):
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


async def ended_within(processes, limit_s):
    """Whether all of these processes, which need not be our children, end in time."""
    deadline = time.monotonic() + limit_s
    while alive(processes) and time.monotonic() < deadline:  # noqa: ASYNC110  # they tell nobody
        await asyncio.sleep(0.1)
    return alive(processes) == []
