"""The trainer's state: copied in memory, written from the copy, read back. No pickle.

A checkpoint's folder holds `hf/` (a Hugging Face model folder with float32 weights, which
transformers and vLLM load), `trainer/optimizer.safetensors` (AdamW's moments by parameter name),
`trainer/state.json` (steps and random state) and `trajectories.parquet`. A published version that
rollouts or a validation still need, and that the trainer's own weights no longer are, lies in
`trainer/version_NNNNNN.safetensors`, as it was published. `trainer.lora` adds an adapter.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from freewheel import files
from freewheel.checkpoint.contents import HF, OPTIMIZER, STATE, version_file
from freewheel.errors import CheckpointError
from freewheel.trainer.distributed import full, like
from freewheel.weights import WeightBundle, pack_weights, unpack_weights

OLD_PUBLISHED = "trainer/published.safetensors"
"""Where earlier checkpoints keep the one version that they carry."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MODEL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Numbers of the state: last trainer step, optimizer steps done, random state as hex."""

    step: int
    optimizer_steps: int
    rng: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """A copy in CPU memory: tensors by parameter name."""

    progress: Progress
    model: dict[str, torch.Tensor]
    """All weights, or with LoRA the adapter's."""
    moments: dict[str, torch.Tensor]


def copy_state(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    weights: Iterator[tuple[str, torch.Tensor]],
    keep: bool,
) -> StateCopy:
    """Copy everything to CPU memory. Collective over ranks; those that `keep` hold the copy.

    `weights` are what training changes: the model's, or those of its adapter.
    """

    def copied(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        whole = ((name, full(tensor.detach())) for name, tensor in tensors)
        return {name: tensor.to("cpu", copy=True) for name, tensor in whole if keep}

    return StateCopy(
        progress=progress,
        model=copied(weights),
        moments=copied(_named_moments(model, optimizer)),
    )


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (tied ones once) and persistent buffers, by their names in the state dict."""
    yield from model.named_parameters()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name not in parameters:
            yield name, tensor


def _named_moments(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        for moment in _MOMENTS:
            if moment in optimizer.state.get(parameter, {}):
                yield f"{moment}.{name}", optimizer.state[parameter][moment]


def random_state() -> dict[str, str]:
    """State of torch's random generators, as hex, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: state.cpu().numpy().tobytes().hex() for device, state in states.items()}


def restore_random_state(folder: Path, states: dict[str, str]) -> None:
    """Undo `random_state`. A device that this process lacks is passed over.

    Args:
        folder: of the checkpoint that they come from.
        states: hex by device.

    Raises:
        CheckpointError: one of them is not the state of a generator.
    """
    setters: dict[str, Callable[[torch.Tensor], None]] = {"cpu": torch.set_rng_state}
    if torch.cuda.is_available():
        setters["cuda"] = torch.cuda.set_rng_state
    for device, setter in setters.items():
        if device in states:
            try:
                setter(torch.frombuffer(bytearray.fromhex(states[device]), dtype=torch.uint8))
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"{folder / STATE}: random state of {device} cannot be restored: {error}"
                ) from error


def write_copy(
    copy: StateCopy,
    folder: Path,
    model: PreTrainedModel,
    source: Path,
    weights: dict[str, torch.Tensor],
) -> None:
    """Write `hf/` and `trainer/` from a copy. Touches neither weights nor optimizer in use.

    Args:
        copy: of optimizer and progress.
        folder: of the checkpoint; exists.
        model: for its configuration and class alone.
        source: model folder whose tokenizer files go along.
        weights: float32, all of the model's by name: the copy's, or merged from it.
    """
    files.make_subfolder(folder / HF)
    files.make_subfolder(folder / "trainer")
    _copy_model_files(source, folder / HF)
    _skeleton(model).save_pretrained(folder / HF, state_dict=weights)
    save_file(copy.moments, folder / OPTIMIZER)
    content: dict[str, Any] = {
        "step": copy.progress.step,
        "optimizer_steps": copy.progress.optimizer_steps,
        "rng": copy.progress.rng,
    }
    files.write_text(folder / STATE, json.dumps(content, indent=1) + "\n")


def write_version(folder: Path, version: int, bundle: WeightBundle) -> None:
    """Write a published version in the replicas' number format."""
    save_file(unpack_weights(bundle), _version_path(folder, version))


def read_version(folder: Path, version: int) -> WeightBundle:
    """Read what `write_version` wrote.

    Raises:
        CheckpointError: the file is missing or broken.
    """
    path = _version_path(folder, version)
    if not path.exists() and (folder / OLD_PUBLISHED).exists():
        path = folder / OLD_PUBLISHED
    try:
        return pack_weights(load_file(path).items())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _version_path(folder: Path, version: int) -> Path:
    return folder / version_file(version)


def _skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The model without memory, so that saving cannot touch weights that another thread trains."""
    with torch.device("meta"):
        skeleton = type(model)._from_config(model.config, dtype=torch.float32)  # pyright: ignore[reportPrivateUsage]  # the class's own way, without a registry
    skeleton.generation_config = model.generation_config
    if hasattr(model, "_weight_conversions"):
        # How names and shapes on disk differ from those in memory; save_pretrained undoes it.
        skeleton._weight_conversions = model._weight_conversions  # pyright: ignore[reportPrivateUsage]  # kept by from_pretrained for this
    return skeleton


def _copy_model_files(source: Path, target: Path) -> None:
    for pattern in _MODEL_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                files.copy_file(file, target / file.name)


def load_model(path: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """The causal LM in float32, on the CPU.

    Raises:
        CheckpointError: the folder is missing, damaged, of no known model, or lacks weights.
    """
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path}: no model can be loaded: {error}") from error
    model, found = loaded
    # By itself transformers goes on with random values for what is missing.
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(f"{path}: {len(missing)} weights are missing: {missing[0]}, ...")
    return model


def load_progress(folder: Path) -> Progress:
    """Numbers of the state.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = folder / STATE
    try:
        content = json.loads(path.read_text())
        return Progress(
            step=int(content["step"]),
            optimizer_steps=int(content["optimizer_steps"]),
            rng={device: bytes.fromhex(hexed).hex() for device, hexed in content["rng"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: trainer state cannot be read: {error!r}") from error


def load_moments(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, optimizer_steps: int
) -> None:
    """Put AdamW's moments back, sharded as the parameters are.

    Raises:
        CheckpointError: the file is missing, damaged or of another model.
    """
    path = folder / OPTIMIZER
    try:
        tensors = load_file(path)
        if not optimizer_steps:
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            if id(parameter) in trained:
                whole = {m: _of_shape(tensors, f"{m}.{name}", parameter) for m in _MOMENTS}
                moments = {m: like(tensor, parameter) for m, tensor in whole.items()}
                optimizer.state[parameter] = {"step": _steps(optimizer, optimizer_steps, parameter)}
                optimizer.state[parameter].update(moments)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: optimizer state cannot be read: {error!r}") from error


def _of_shape(tensors: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> torch.Tensor:
    """One of the tensors, if it has the parameter's (whole) shape."""
    if tensors[name].shape != parameter.shape:
        ours, theirs = tuple(tensors[name].shape), tuple(parameter.shape)
        raise ValueError(f"{name} is {ours}, the model's parameter {theirs}")
    return tensors[name]


def _steps(
    optimizer: torch.optim.Optimizer, optimizer_steps: int, parameter: torch.Tensor
) -> torch.Tensor:
    """AdamW's own counter; its fused form keeps it on the parameter's device."""
    device = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
    return torch.tensor(float(optimizer_steps), device=device)
