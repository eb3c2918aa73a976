"""From a model's folder to a decoder without weights, the checks on weights, and the end tokens."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from freewheel.config.sections import Config, RolloutConfig
from freewheel.engine.compiled.build import CompileError
from freewheel.engine.compiled.kernels import Kernels
from freewheel.engine.decoder import Decoder, HFObject
from freewheel.engine.generic import GenericDecoder
from freewheel.engine.llama import LlamaDecoder, is_llama_like
from freewheel.errors import ConfigError, InvariantError
from freewheel.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_PARAMETERS_PER_THREAD = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """What a bundle of weights must hold: one name of each parameter, and perhaps its buffers."""

    shapes: dict[str, tuple[int, ...]]
    parameters: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, model: HFObject) -> "WeightNames":
        """Names and shapes of a model; names that share a parameter are tied."""
        groups: dict[int, set[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), set()).add(name)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return cls(shapes=shapes, parameters=tuple(frozenset(group) for group in groups.values()))

    @property
    def num_parameters(self) -> int:
        """Numbers in the model, tied ones counted once."""
        return sum(math.prod(self.shapes[min(names)]) for names in self.parameters)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse a bundle that does not fit this model.

        Raises:
            InvariantError: names what is missing, unknown or of another shape.
        """
        problems = [f"unknown {name}" for name in tensors if name not in self.shapes]
        problems += [
            f"{name} is {tuple(tensor.shape)}, not {self.shapes[name]}"
            for name, tensor in tensors.items()
            if name in self.shapes and tuple(tensor.shape) != self.shapes[name]
        ]
        problems += [
            f"missing {min(names)}" for names in self.parameters if names.isdisjoint(tensors)
        ]
        if problems:
            shown = "; ".join(problems[:5])
            raise InvariantError(f"{len(problems)} weights do not fit the model: {shown}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder without weights, with what the engine must know of its model."""

    decoder: Decoder
    weight_names: WeightNames
    eos_token_ids: frozenset[int]
    tokenizer: HFObject | None

    def num_useful_threads(self, limit: int) -> int:
        """How many of `limit` CPU threads make a step of torch's operations faster: at least one.

        Threads meet several times in each layer, and a small layer is done before they have met. A
        model of 0.8 million parameters decodes 17,000 tokens/s with two threads and 12,000 with one
        at 32 rows, but 400 and 1,500 at one row, and it prefills half as fast with two.
        """
        return max(1, min(limit, self.weight_names.num_parameters // _PARAMETERS_PER_THREAD))

    def without_eos(self) -> "LoadedModel":
        """The same model, whose requests run to their limits: for benchmarks."""
        return replace(self, eos_token_ids=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an engine that brings its own forward must know of a model.

    `vocab_size` counts the rows of the embedding. Without a tokenizer no stop string can be used.
    """

    weight_names: WeightNames
    eos_token_ids: frozenset[int]
    vocab_size: int
    has_tokenizer: bool


def read_facts(config: Config, model_path: Path) -> ModelFacts:
    """Look at a model's folder; no weights are read and none are made.

    Raises:
        ConfigError: as `load_model`.
    """
    trust = config.model.trust_remote_code
    hf_config, model = _structure(model_path, trust)
    _check_reach(hf_config, config.rollout.max_prompt_length + config.rollout.max_response_length)
    tokenizer = _tokenizer(model_path, trust=trust)
    return ModelFacts(
        weight_names=WeightNames.of(model),
        eos_token_ids=_eos_token_ids(model_path, hf_config, tokenizer),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        has_tokenizer=tokenizer is not None,
    )


def load_model(config: Config, model_path: Path, *, fast: bool = True) -> LoadedModel:
    """Read a model's structure and tokenizer; its weights are not read.

    Args:
        config: `model`, and of `rollout` the lengths, device and number format.
        model_path: folder of a Hugging Face causal LM.
        fast: use our own forward where there is one.

    Raises:
        ConfigError: the folder cannot be read, the model is not one the engine can run, or it does
            not reach as far as the configured lengths.
    """
    trust = config.model.trust_remote_code
    device = _device(config.rollout)
    dtype = _dtype(config.rollout, device)
    max_length = config.rollout.max_prompt_length + config.rollout.max_response_length
    hf_config, model = _structure(model_path, trust)
    _check_reach(hf_config, max_length)
    names = WeightNames.of(model)
    if fast and is_llama_like(model):
        decoder: Decoder = LlamaDecoder(
            model,
            dtype=dtype,
            device=device,
            max_length=max_length,
            kernels=_kernels(config.rollout, dtype, device),
        )
    else:
        decoder = GenericDecoder(_real_model(hf_config, trust), dtype=dtype, device=device)
    tokenizer = _tokenizer(model_path, trust=trust)
    return LoadedModel(
        decoder=decoder,
        weight_names=names,
        eos_token_ids=_eos_token_ids(model_path, hf_config, tokenizer),
        tokenizer=tokenizer,
    )


def _structure(model_path: Path, trust: bool) -> tuple[HFObject, HFObject]:
    """A model's configuration, and the model without memory for its weights."""
    try:
        hf_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust)
        with torch.device("meta"):
            return hf_config, AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"model.path: no causal LM can be built from {model_path}: {error}"
        ) from error


def _kernels(rollout: RolloutConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Compiled kernels, where there are any for this device and format and they are wanted."""
    if device.type != "cpu" or dtype != torch.float32 or rollout.enforce_eager:
        return None
    try:
        return Kernels(rollout.num_threads)
    except CompileError as error:
        logger.warning("the engine runs without compiled kernels, which is slower: %s", error)
        return None


def _real_model(hf_config: HFObject, trust: bool) -> HFObject:
    """A model in memory; the random weights it starts with leave the generator as it was."""
    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust)


def _check_reach(hf_config: HFObject, max_length: int) -> None:
    reach = getattr(hf_config, "max_position_embeddings", None)
    if reach is not None and max_length > reach:
        raise ConfigError(
            f"rollout.max_prompt_length + rollout.max_response_length is {max_length}, but the "
            f"model has {reach} positions"
        )


def _tokenizer(model_path: Path, *, trust: bool) -> HFObject | None:
    """The tokenizer, or None where the folder has none (then no stop string can be used)."""
    if not any(
        (model_path / name).exists() for name in ("tokenizer_config.json", "tokenizer.json")
    ):
        return None
    return load_tokenizer(model_path, trust_remote_code=trust)


def _eos_token_ids(
    model_path: Path, hf_config: HFObject, tokenizer: HFObject | None
) -> frozenset[int]:
    """End tokens by the generation configuration, the model's configuration and the tokenizer."""
    sources: list[Any] = [getattr(hf_config, "eos_token_id", None)]
    if (model_path / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(model_path).eos_token_id)
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for source in sources:
        if isinstance(source, int):
            ids.add(source)
        elif source is not None:
            ids.update(source)
    return frozenset(ids)


def _device(rollout: RolloutConfig) -> torch.device:
    if rollout.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if rollout.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("rollout.device: cuda, but torch finds no GPU; allowed here: cpu, auto")
    return torch.device(rollout.device)


def rollout_dtype(rollout: RolloutConfig) -> torch.dtype:
    """The engine's number format on this machine.

    Raises:
        ConfigError: `rollout.device` is a GPU, and there is none.
    """
    return _dtype(rollout, _device(rollout))


def _dtype(rollout: RolloutConfig, device: torch.device) -> torch.dtype:
    if rollout.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if rollout.dtype == "bfloat16" else torch.float32
