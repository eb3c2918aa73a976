"""The weights of a model's folder by their names in the state dict, without a copy if possible.

The tensors are views of the mapped files: processes on one machine share the memory, and nothing is
read before it is used. Never write to them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from freewheel.engine.facts import WeightNames
from freewheel.errors import CheckpointError
from freewheel.models import INDEX_FILE
from freewheel.trainer.state import load_model, named_weights

_SINGLE_FILE = "model.safetensors"


def read_base(folder: Path, *, trust_remote_code: bool) -> dict[str, torch.Tensor]:
    """All parameters (tied ones once) and persistent buffers.

    In the files' number format; a model whose files hold other names or shapes than its state dict
    is built by transformers instead, in float32 and in memory of its own.

    Raises:
        CheckpointError: the folder is missing, damaged, of no known model, or lacks weights.
    """
    try:
        names = _names(folder, trust_remote_code)
        stored = dict(_stored(folder))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: no weights can be read: {error}") from error
    chosen = _choose(names, stored)
    if chosen is not None:
        return chosen
    model = load_model(folder, trust_remote_code=trust_remote_code)
    return {name: tensor.detach() for name, tensor in named_weights(model)}


def _names(folder: Path, trust: bool) -> WeightNames:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    with torch.device("meta"):
        return WeightNames.of(AutoModelForCausalLM.from_config(config, trust_remote_code=trust))


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """What lies in the files, mapped."""
    for path in _files(folder):
        opened: Any = safe_open(path, framework="pt", device="cpu")
        with opened as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                yield name, file.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        return [folder / _SINGLE_FILE]
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return [folder / name for name in sorted(set(weight_map.values()))]


def _choose(
    names: WeightNames, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """One tensor for each parameter, and the buffers; None if the files hold something else."""
    tied = set[str]().union(*names.parameters)
    groups = [*names.parameters, *(frozenset({n}) for n in names.shapes if n not in tied)]
    chosen: dict[str, torch.Tensor] = {}
    for group in groups:
        found = [name for name in names.shapes if name in group and name in stored]
        if not found or tuple(stored[found[0]].shape) != names.shapes[found[0]]:
            return None
        chosen[found[0]] = stored[found[0]]
    return chosen
