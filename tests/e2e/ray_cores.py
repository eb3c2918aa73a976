"""Small cores with the signatures of the real ones, for the tests of the Ray layer alone.

Not a test module: the actors of `test_ray_backend_*.py` import it by path. Prompt indices choose
what a group does, so that a test says in the request what it wants to happen.
"""

import asyncio
import ctypes
import os
import subprocess
import threading
import time
from dataclasses import dataclass

import numpy as np

from freewheel.errors import FailureClass, RolloutError, TrainingDivergedError
from freewheel.types import (
    DatasetInfo,
    Generation,
    PromptInfo,
    ReplicaStats,
    RolloutOutcome,
    Split,
    TrainerInfo,
    TrainResult,
    Trajectory,
)

TRAIN, HANG_IN_ENGINE, USER_ERROR, ROLLOUT_ERROR, BIG, SPAWN, ENGINE_ERROR, SPIN, HOLD = range(9)
BIG_TOKENS = 1_000_000


class CustomError(Exception):
    """An exception that does not survive pickling: two arguments, one in `args`."""

    def __init__(self, first, second):
        super().__init__(first)
        self.second = second


class Engine:
    def __init__(self, config, model_path):
        self.version, self.cancelled, self.running, self.view = 0, 0, 0, None
        self.env = os.environ.get("OMP_NUM_THREADS")

    async def start(self):
        print("engine up", flush=True)  # noqa: T201  # goes to the log file

    async def generate(self, requests, *, timeout_s):
        self.running += 1
        try:
            if timeout_s == HANG_IN_ENGINE:
                await asyncio.Event().wait()
            if timeout_s == ENGINE_ERROR:
                raise RolloutError(FailureClass.OVER_LONG_PROMPT, "prompt of 9 tokens, 8 allowed")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return [_generation(request, self.version) for request in requests]

    async def abort(self, request_ids):
        pass

    async def update_weights(self, version, bundle):
        self.version = version
        self.view = bundle.buffer

    def stats(self):
        extra = {"cancelled": float(self.cancelled), "omp": float(self.env or -1)}
        if self.view is not None:
            extra |= {
                "owns": float(self.view.flags.owndata),
                "writeable": float(self.view.flags.writeable),
                "sum": float(self.view.sum()),
            }
        return ReplicaStats(
            version=self.version,
            num_running=self.running,
            num_waiting=0,
            num_generated_tokens=0,
            extra=extra,
        )


def _generation(request, version):
    return Generation(
        request_id=request.request_id,
        token_ids=request.prompt_token_ids + 1,
        logprobs=np.zeros(len(request.prompt_token_ids), np.float32),
        versions=np.full(len(request.prompt_token_ids), version, np.int32),
        finish_reason="stop",
    )


class Worker:
    def __init__(self, config, model_path, worker_id, *, on_loop_report):
        self.worker_id = worker_id

    async def start(self):
        return {Split.TRAIN: DatasetInfo(num_prompts=8, fingerprint=f"worker-{self.worker_id}")}

    async def prepare(self, split, indices):
        return [PromptInfo(prompt_index=index, num_prompt_tokens=index + 1) for index in indices]

    async def run_group(self, request, generator):
        from freewheel.types import GenerationRequest

        kind = request.prompt_index
        if kind == USER_ERROR:
            raise CustomError("lost", "in transit")
        if kind == ROLLOUT_ERROR:
            raise RolloutError(FailureClass.REWARD, "reward of 3 asked for")
        if kind == SPIN:
            time.sleep(60)  # noqa: TID251, ASYNC251  # user code that blocks its loop
        if kind == HOLD:
            ctypes.PyDLL(None).sleep(60)  # native code that keeps the interpreter's lock
        spawned = _spawn() if kind == SPAWN else None
        generations = await generator.generate(
            [
                GenerationRequest(
                    request_id=member.sample_id,
                    prompt_token_ids=np.arange(3, dtype=np.int32),
                    sampling=request.sampling,
                )
                for member in request.members
            ],
            timeout_s=kind if kind in (HANG_IN_ENGINE, ENGINE_ERROR) else 60.0,
        )
        length = BIG_TOKENS if kind == BIG else 3
        outcomes = tuple(
            RolloutOutcome(
                sample_id=member.sample_id,
                attempt=member.attempt,
                reward=1.0,
                answer=spawned,
                version_spans=((int(generation.versions[0]), 3),),
            )
            for member, generation in zip(request.members, generations, strict=True)
        )
        return outcomes, [
            trajectory(request.group_id, m.sample_id, length) for m in request.members
        ]


def _spawn():
    return str(subprocess.Popen(["sleep", "300"]).pid)


def trajectory(group_id, sample_id, length):
    return Trajectory(
        sample_id=sample_id,
        group_id=group_id,
        reward=1.0,
        token_ids=np.full(length, group_id, np.int32),
        loss_mask=np.ones(length, np.bool_),
        rollout_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
    )


@dataclass(frozen=True, kw_only=True)
class Bundle:
    buffer: np.ndarray
    publication: int

    @property
    def num_bytes(self):
        return self.buffer.nbytes


class Trainer:
    def __init__(self, config, model_path, *, ranks=None):
        self.ranks = ranks
        self.release = threading.Event()
        self.published, self.dropped = 0, []

    def start(self, checkpoint):
        if checkpoint is not None:
            raise FileNotFoundError(checkpoint)
        device = "alone" if self.ranks is None else f"{self.ranks}"
        return TrainerInfo(step=0, num_parameters=1, device=device)

    def train_step(self, request, groups):
        if request.step == 13:
            raise TrainingDivergedError("step 13: loss is nan")
        if request.step == 99:
            self.release.wait(30)
        tokens = sum(len(trajectory.token_ids) for group in groups for trajectory in group)
        metrics = {"tokens": float(tokens), "groups": float(len(groups))}
        metrics |= {"published": float(self.published)}
        metrics |= {f"dropped/{publication}": 1.0 for publication in self.dropped}
        metrics |= {f"thread/{threading.current_thread().name}": 1.0}
        return TrainResult(step=request.step, metrics=metrics, wall_s=0.0)

    def export_weights(self):
        self.published += 1
        return Bundle(buffer=np.full(20_000_000, 3, np.uint8), publication=self.published)

    def drop_weights(self, publication):
        self.dropped.append(publication)

    def copy_state(self, step):
        pass

    def write_state(self, step, folder, trajectories, held):
        ids = ",".join(str(group[0].group_id) for group in trajectories)
        (folder / "written.txt").write_text(f"{ids} {threading.current_thread().name}")
        sizes = {version: int(bundle.num_bytes) for version, bundle in held.items()}
        (folder / "held.txt").write_text(f"{sizes}")
        self.release.set()


def ranks(*, rank, world_size, init_method):
    return f"{rank} of {world_size} at {init_method.split(':')[0]}"


FILE = "written.txt"


def read(path, group_ids):
    path.read_text()
    return [[trajectory(group_id, f"g{group_id}", 4)] for group_id in group_ids]
