"""Two sharded ranks are one trainer: same weights, same metrics, one checkpoint for both."""

import ast
import os
import socket
import subprocess
import sys
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


def run(world_size: int, model: Path, old: Path | None, new: Path, lora_rank: int = 0) -> None:
    """Run the ranks to their end; fails with what a failed one said."""
    address = f"tcp://127.0.0.1:{free_port()}"
    arguments = [str(world_size), address, str(model), str(old or ""), str(new), str(lora_rank)]
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
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_two_ranks_equal_one_and_share_checkpoints(tmp_path: Path, lora_rank: int) -> None:
    model = save_model(tmp_path / "model")
    one, two = tmp_path / "one", tmp_path / "two"
    run(1, model, None, one, lora_rank)
    run(2, model, None, two, lora_rank)
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

    # Each goes on from the other's checkpoint.
    one_on, two_on = tmp_path / "one-on", tmp_path / "two-on"
    run(1, model, two, one_on, lora_rank)
    run(2, model, one, two_on, lora_rank)
    np.testing.assert_allclose(exported(one_on), exported(two_on), atol=2e-5)
    assert float(np.abs(exported(one_on) - exported(one)).max()) > 1e-4
