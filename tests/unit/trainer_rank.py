"""One rank of a sharded trainer, as a program: trains two steps and writes what came out.

    python -m tests.unit.trainer_rank RANK WORLD_SIZE MODEL JOB...

One after the other, in one process, as most of its time goes into imports. A JOB is
`INIT_METHOD,CHECKPOINT_IN,CHECKPOINT_OUT,LORA_RANK`.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from freewheel.config.sections import ModelConfig, OptimConfig
from freewheel.errors import TrainingDivergedError
from freewheel.trainer.core import TrainerCore
from freewheel.trainer.distributed import Ranks
from freewheel.types import Trajectory
from tests.unit.bundles import all_bytes
from tests.unit.trainer_models import make_groups
from tests.unit.trainer_runs import make_config, step


def training_groups(number: int) -> list[list[Trajectory]]:
    """Of different lengths; one group without signal, which only goes forward, and comes last."""
    groups = make_groups(seed=number)
    fields = Trajectory.__dataclass_fields__
    groups[1] = [
        Trajectory(**{**{name: getattr(t, name) for name in fields}, "reward": 1.0})
        for t in groups[1]
    ]
    return groups


def main(rank: str, world_size: str, model: str, *jobs: str) -> None:
    for job in jobs:
        train(rank, world_size, model, *job.split(","))


def train(
    rank: str, world_size: str, model: str, init_method: str, old: str, new: str, lora_rank: str
) -> None:
    ranks = Ranks(rank=int(rank), world_size=int(world_size), init_method=init_method)
    config = make_config(
        strategy="fsdp2",
        world_size=int(world_size),
        # Where a gradient is all but zero, AdamW without eps turns rounding into full steps.
        optim=OptimConfig(lr=1e-3, eps=1e-4),
    )
    config = replace(config, model=ModelConfig(lora_rank=int(lora_rank)))
    core = TrainerCore(config, Path(model), ranks=ranks)
    info = core.start(Path(old) if old else None)
    metrics = {}
    for number in range(info.step + 1, info.step + 3):
        metrics = step(core, number, training_groups(number)).metrics
    core.copy_state(info.step + 2)
    bundle = core.export_weights()
    if ranks.is_main:
        folder = Path(new)
        folder.mkdir()
        core.write_state(info.step + 2, folder, [])
        (folder / "exported").write_bytes(all_bytes(bundle).tobytes())
        (folder / "metrics").write_text(repr(metrics))
    bad = make_groups(seed=9)
    bad[0][0].rollout_logprobs[-1] = float("nan")
    with pytest.raises(TrainingDivergedError, match=bad[0][0].sample_id):
        step(core, 99, bad)
    core.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
