"""What a checkpoint's folder has to hold beside the control state, by name.

The trainer writes under these names; the store refuses a checkpoint that lacks one of them. Its
process may be another, on another machine: that it answered proves no file.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from freewheel.errors import CheckpointError
from freewheel.models import INDEX_FILE

HF = "hf"
OPTIMIZER = "trainer/optimizer.safetensors"
STATE = "trainer/state.json"
TRAJECTORIES = "trajectories.parquet"
ADAPTER = "adapter"
ADAPTER_WEIGHTS = f"{ADAPTER}/adapter_model.safetensors"

_MODEL_CONFIG = f"{HF}/config.json"
_MODEL_WEIGHTS = f"{HF}/model.safetensors"
_MODEL_INDEX = f"{HF}/{INDEX_FILE}"
_ADAPTER_CONFIG = f"{ADAPTER}/adapter_config.json"


def version_file(version: int) -> str:
    """Where a published version lies that a resumed run needs beside the trainer's weights."""
    return f"trainer/version_{version:06d}.safetensors"


def missing_files(folder: Path, names: Collection[str], control: dict[str, Any]) -> list[str]:
    """Names that a checkpoint has to have, and has not.

    Args:
        folder: of the checkpoint.
        names: of the files in it, relative to it.
        control: the control state that goes with them.

    Raises:
        CheckpointError: the index of sharded weights is not one.
        OSError: it cannot be read.
    """
    wanted = [_MODEL_CONFIG, *_weight_files(folder, names), OPTIMIZER, STATE, TRAJECTORIES]
    wanted += [version_file(version) for version in control["held_versions"]]
    if control["structure"].get("model.lora_rank"):
        wanted += [_ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    return [name for name in wanted if name not in names]


def _weight_files(folder: Path, names: Collection[str]) -> list[str]:
    """One file, or the shards that the index names."""
    if _MODEL_INDEX not in names:
        return [_MODEL_WEIGHTS]
    try:
        index = json.loads((folder / _MODEL_INDEX).read_text(encoding="utf-8"))
        return sorted({f"{HF}/{shard}" for shard in index["weight_map"].values()})
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / _MODEL_INDEX}: is not an index of weights: {error!r}"
        ) from error
