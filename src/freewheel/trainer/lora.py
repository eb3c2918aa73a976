"""LoRA in the trainer: a model whose base is frozen and whose adapter trains, by `peft`.

The layers are put into the model in place, so it stays the Hugging Face model that the rest of the
trainer knows. A checkpoint holds the adapter in peft's own format, beside the merged model, and
training goes on from the adapter and the base model's folder.

Shapes: M rows and N columns of a matrix, R rank of the adapter.
"""

import importlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from freewheel import files
from freewheel.adapter import LEFT, RIGHT
from freewheel.checkpoint.contents import ADAPTER, ADAPTER_WEIGHTS
from freewheel.config.sections import ModelConfig
from freewheel.errors import CheckpointError, ConfigError
from freewheel.models import INSTALL_PEFT

Factors: TypeAlias = Mapping[str, torch.Tensor]
"""By name, as `named_factors` gives them."""

_NAME = "default"
_PREFIX = "base_model.model."
_TOLERANCE = 1e-5
"""Of a merge, against the largest number of the matrix: another order of additions, not other
weights."""


def inject(model: PreTrainedModel, config: ModelConfig, *, seed: int) -> None:
    """Freeze the model and put a fresh adapter into it, which does not change what it computes.

    Args:
        model: in float32, on the CPU; changed in place.
        config: rank, alpha and target modules.
        seed: of the adapter's first factors.

    Raises:
        ConfigError: peft is not installed, or the target modules cannot be trained this way.
    """
    peft = _peft()
    counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns that it takes Conv1D (GPT-2) the other way round, which is what we want, and of
        # layers with shared weights, which are refused below.
        warnings.filterwarnings("ignore", message="fan_in_fan_out|Model has `tie_word_embeddings")
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(_peft_config(config), model, adapter_name=_NAME)
        except ValueError as error:
            raise ConfigError(f"{_target(config)}: {error}") from error
    for name, layer in _layers(model):
        base: torch.nn.Module = layer.get_base_layer()
        if not isinstance(base, torch.nn.Linear | Conv1D):
            raise ConfigError(
                f"{_target(config)}: {name} is a {type(base).__name__}; allowed: linear layers"
            )
        if counts[id(base.weight)] > 1:
            raise ConfigError(
                f"{_target(config)}: {name} shares its weights with another layer, and an adapter "
                "would change only one of the two; leave it out"
            )


def named_factors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Factors of each matrix with an adapter, by the matrix' name in the base model's state dict.

    Views of the parameters; with sharded parameters, sharded tensors.
    """
    for name, layer in _layers(model):
        a_RN, b_MR = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        left, right = (a_RN.T, b_MR.T) if layer.fan_in_fan_out else (b_MR, a_RN)
        yield f"{name}.weight{LEFT}", left
        yield f"{name}.weight{RIGHT}", right


def write_adapter(
    folder: Path, model: PreTrainedModel, config: ModelConfig, base_path: Path, factors: Factors
) -> None:
    """Write the adapter as peft does: `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        folder: of the checkpoint; exists.
        model: for the kinds of its layers alone.
        config: rank and alpha.
        base_path: folder of the base model, which the configuration names.
        factors: what `named_factors` gave, or a copy.
    """
    target = folder / ADAPTER
    files.make_subfolder(target)
    layers = list(_layers(model))
    saved = _peft_config(config)
    saved.target_modules = [name for name, _ in layers]
    saved.base_model_name_or_path = str(base_path)
    saved.inference_mode = True
    saved.fan_in_fan_out = any(layer.fan_in_fan_out for _, layer in layers)
    saved.save_pretrained(target)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers:
        left, right = factors[f"{name}.weight{LEFT}"], factors[f"{name}.weight{RIGHT}"]
        a_RN, b_MR = (left.T, right.T) if layer.fan_in_fan_out else (right, left)
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a_RN.contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b_MR.contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Put a checkpoint's adapter into a model that has one of the same shape.

    Raises:
        CheckpointError: it is missing, damaged or of another model.
    """
    path = folder / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    ours = {
        f"{_PREFIX}{name}.{kind}.weight": getattr(layer, kind)[_NAME].weight
        for name, layer in _layers(model)
        for kind in ("lora_A", "lora_B")
    }
    if ours.keys() != tensors.keys():
        other = sorted(ours.keys() ^ tensors.keys())
        raise CheckpointError(f"{path}: is of another adapter: {len(other)} names, {other[0]}, ...")
    for name, parameter in ours.items():
        if parameter.shape != tensors[name].shape:
            shapes = f"{tuple(tensors[name].shape)}, not {tuple(parameter.shape)}"
            raise CheckpointError(f"{path}: {name} is {shapes}")
        with torch.no_grad():
            parameter.copy_(tensors[name])


def check_base(
    expected: Iterable[tuple[str, torch.Tensor]], saved: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Refuse a base model that is not the one which the checkpoint's adapter was trained on.

    Args:
        expected: the checkpoint's adapter merged into the base model.
        saved: weights of the merged model in the checkpoint.
        folder: of the checkpoint.

    Raises:
        CheckpointError: merging does not give the saved model.
    """
    for name, tensor in expected:
        other = saved.get(name)
        if other is None or not _is_close(tensor.float(), other.float()):
            raise CheckpointError(
                f"{folder}: its model is not model.path with the adapter merged ({name} differs): "
                "the adapter was trained on other base weights"
            )


def _is_close(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    limit = _TOLERANCE * float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(tensor, other, rtol=0, atol=limit)


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter, by the base layer's name."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "get_base_layer"):
            yield name, module


def _peft_config(config: ModelConfig) -> Any:
    targets = config.target_modules
    return _peft().LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # Recorded logprobs have no dropout in them, so neither has training.
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _peft() -> Any:
    """The library, typed in part only; a run without an adapter does not need it."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"model.lora_rank: peft cannot be imported: {error}; type: {INSTALL_PEFT}"
        ) from error


def _target(config: ModelConfig) -> str:
    targets = config.target_modules
    return f"model.target_modules={targets if isinstance(targets, str) else list(targets)}"
