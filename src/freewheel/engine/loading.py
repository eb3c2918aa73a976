"""From a model's folder to a decoder without weights."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from freewheel.config.sections import Config, RolloutConfig
from freewheel.engine.compiled.build import CompileError
from freewheel.engine.compiled.kernels import Kernels
from freewheel.engine.decoder import Decoder, HFObject
from freewheel.engine.facts import ModelFacts, WeightNames
from freewheel.engine.known_facts import facts_of
from freewheel.engine.llama import LlamaDecoder
from freewheel.errors import ConfigError

logger = logging.getLogger(__name__)

_PARAMETERS_PER_THREAD = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder without weights, with what the engine must know of its model.

    `load_tokenizer` is None for a model without one. It takes a second where nothing else in the
    process needs transformers.
    """

    decoder: Decoder
    weight_names: WeightNames
    eos_token_ids: frozenset[int]
    load_tokenizer: Callable[[], HFObject] | None

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


def read_facts(config: Config, model_path: Path) -> ModelFacts:
    """What an engine that brings its own forward must know of a model; no weights are read.

    Raises:
        ConfigError: no causal LM can be built from the folder, or it does not reach as far as the
            configured lengths.
    """
    facts = facts_of(model_path, trust_remote_code=config.model.trust_remote_code)
    length = config.rollout.max_prompt_length + config.rollout.max_response_length
    if facts.max_positions is not None and length > facts.max_positions:
        raise ConfigError(
            f"rollout.max_prompt_length + rollout.max_response_length is {length}, but the "
            f"model has {facts.max_positions} positions"
        )
    return facts


def load_model(config: Config, model_path: Path, *, fast: bool = True) -> LoadedModel:
    """Read a model's structure; its weights are not read.

    Args:
        config: `model`, and of `rollout` the lengths, device and number format.
        model_path: folder of a Hugging Face causal LM.
        fast: use our own forward where there is one.

    Raises:
        ConfigError: as `read_facts`, or the model is not one the engine can run.
    """
    device = _device(config.rollout)
    dtype = _dtype(config.rollout, device)
    facts = read_facts(config, model_path)
    if fast and facts.llama is not None:
        decoder: Decoder = LlamaDecoder(
            facts.llama,
            dtype=dtype,
            device=device,
            max_length=config.rollout.max_prompt_length + config.rollout.max_response_length,
            kernels=_kernels(config.rollout, dtype, device),
        )
    else:
        decoder = _generic(model_path, config.model.trust_remote_code, dtype, device)
    return LoadedModel(
        decoder=decoder,
        weight_names=facts.weight_names,
        eos_token_ids=facts.eos_token_ids,
        load_tokenizer=_tokenizer_loader(config, model_path) if facts.has_tokenizer else None,
    )


def _generic(model_path: Path, trust: bool, dtype: torch.dtype, device: torch.device) -> Decoder:
    from freewheel.engine.generic import GenericDecoder  # these two import transformers' models
    from freewheel.engine.inspection import build_model

    model = build_model(model_path, trust_remote_code=trust)
    return GenericDecoder(model, dtype=dtype, device=device)


def _tokenizer_loader(config: Config, model_path: Path) -> Callable[[], HFObject]:
    def load() -> HFObject:
        from freewheel.tokenizer import load_tokenizer  # imports transformers

        return load_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)

    return load


def _kernels(rollout: RolloutConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Compiled kernels, where there are any for this device and format and they are wanted."""
    if device.type != "cpu" or dtype != torch.float32 or rollout.enforce_eager:
        return None
    try:
        return Kernels(rollout.num_threads)
    except CompileError as error:
        logger.warning("the engine runs without compiled kernels, which is slower: %s", error)
        return None


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
