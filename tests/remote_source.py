"""A trainer whose memory holds weights, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from freewheel.config.sections import Config
from freewheel.remote_weights import RemoteWeights, WeightSource
from freewheel.weights import TensorSpec
from tests.contract.subjects import make_model

_ROOT = Path(__file__).parents[1]


@contextmanager
def source_process(version: int) -> Iterator[tuple[subprocess.Popen[str], RemoteWeights]]:
    """A process that has published a version of the contract suites' model, and what it told."""
    paths = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
    with subprocess.Popen(
        [sys.executable, "-m", "tests.remote_source", str(version)],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, _from_text(process.stdout.readline())
        finally:
            process.kill()


def _to_text(weights: RemoteWeights) -> str:
    return json.dumps(asdict(weights) | {"metadata": weights.metadata.hex()})


def _from_text(text: str) -> RemoteWeights:
    told = json.loads(text)
    specs = tuple(TensorSpec(**spec | {"shape": tuple(spec["shape"])}) for spec in told["specs"])
    return RemoteWeights(
        **told
        | {
            "metadata": bytes.fromhex(told["metadata"]),
            "addresses": tuple(told["addresses"]),
            "specs": specs,
        }
    )


if __name__ == "__main__":
    source = WeightSource(Config())
    named = make_model(int(sys.argv[1])).named_parameters()
    sys.stdout.write(_to_text(source.publish(named, dtype=torch.float32)) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
