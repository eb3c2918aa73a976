"""Two sharded ranks are one trainer: same weights, same metrics, one checkpoint for both."""

import ast
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.unit.trainer_models import save_model

HERE = Path(__file__).parent
TIMEOUT_S = 240
TIMES = {"timing_s/update_actor", "perf/throughput"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


LORA_RANKS = (0, 4)


@dataclass(frozen=True, slots=True)
class Job:
    """One training of two steps, from a checkpoint if there is one."""

    old: Path | None
    new: Path
    lora_rank: int

    def argument(self) -> str:
        address = f"tcp://127.0.0.1:{free_port()}"
        return f"{address},{self.old or ''},{self.new},{self.lora_rank}"


def run(world_size: int, model: Path, *jobs: Job) -> None:
    """Run the ranks to their end; fails with what a failed one said."""
    arguments = [str(world_size), str(model), *(job.argument() for job in jobs)]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parents[1] / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.trainer_rank", str(rank), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


def exported(folder: Path) -> np.ndarray:
    return np.frombuffer((folder / "exported").read_bytes(), dtype=np.float32)


@pytest.mark.slow
def test_two_ranks_equal_one_and_share_checkpoints(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    for world_size in (1, 2):
        run(world_size, model, *(Job(None, tmp_path / f"{world_size}-{r}", r) for r in LORA_RANKS))
    for lora_rank in LORA_RANKS:
        check_equal(tmp_path / f"1-{lora_rank}", tmp_path / f"2-{lora_rank}", lora_rank)

    # Each goes on from the other's checkpoint.
    for world_size, other in ((1, 2), (2, 1)):
        names = [(f"{other}-{r}", f"{world_size}-{r}-on", r) for r in LORA_RANKS]
        run(world_size, model, *(Job(tmp_path / old, tmp_path / new, r) for old, new, r in names))
    for lora_rank in LORA_RANKS:
        before, one, two = (
            exported(tmp_path / name)
            for name in (f"1-{lora_rank}", f"1-{lora_rank}-on", f"2-{lora_rank}-on")
        )
        np.testing.assert_allclose(one, two, atol=2e-5)
        assert float(np.abs(one - before).max()) > 1e-4


def check_equal(one: Path, two: Path, lora_rank: int) -> None:
    """Same weights, same metrics, same checkpoint, however many ranks wrote it."""
    np.testing.assert_allclose(exported(one), exported(two), atol=1e-5)
    metrics = [ast.literal_eval((folder / "metrics").read_text()) for folder in (one, two)]
    assert metrics[0].keys() == metrics[1].keys()
    for name in metrics[0].keys() - TIMES:
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-3, abs=1e-4), name
    adapter = ("adapter/adapter_model.safetensors",) if lora_rank else ()
    for kind in ("hf/model.safetensors", "trainer/optimizer.safetensors", *adapter):
        single, sharded = load_file(one / kind), load_file(two / kind)
        assert single.keys() == sharded.keys()
        for name, array in single.items():
            np.testing.assert_allclose(array, sharded[name], atol=1e-5)
