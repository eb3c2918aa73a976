"""What runs inside the actors, by import path, so that only the actors' processes import it."""

import importlib
from dataclasses import dataclass
from typing import Any, TypeAlias

from freewheel.config.sections import RolloutConfig

Loaded: TypeAlias = Any
"""A class, function or constant; who loads it knows which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """`module:name` of what each kind of actor works with; tests put small ones in."""

    replica: str = "freewheel.engine.async_engine:AsyncEngine"
    adapter_merger: str = "freewheel.adapter:AdapterMerger"
    rollout_worker: str = "freewheel.rollout.worker:RolloutWorkerCore"
    trainer: str = "freewheel.trainer.core:TrainerCore"
    trainer_ranks: str = "freewheel.trainer.distributed:Ranks"
    read_trajectories: str = "freewheel.trainer.trajectories:read_trajectories"
    trajectories_file: str = "freewheel.checkpoint.contents:TRAJECTORIES"

    @classmethod
    def of(cls, rollout: RolloutConfig) -> "Cores":
        """Those of a run with this engine."""
        if rollout.engine == "vllm":
            return cls(replica="freewheel.backends.vllm.engine:VllmEngine")
        return cls()


def load(path: str) -> Loaded:
    """The object behind `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
