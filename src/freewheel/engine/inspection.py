"""Reads what an engine must know off a model's folder, by transformers' own classes."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from freewheel.engine.decoder import HFObject
from freewheel.engine.facts import LlamaShape, ModelFacts, WeightNames
from freewheel.errors import ConfigError
from freewheel.tokenizer import load_tokenizer


def inspect_folder(model_path: Path, *, trust_remote_code: bool) -> ModelFacts:
    """Build the model without memory for its weights, and look at it.

    Raises:
        ConfigError: no causal LM can be built from the folder.
    """
    hf_config = _config(model_path, trust_remote_code)
    with torch.device("meta"):
        model = _build(model_path, hf_config, trust_remote_code)
    tokenizer = None
    if any((model_path / name).exists() for name in ("tokenizer_config.json", "tokenizer.json")):
        tokenizer = load_tokenizer(model_path, trust_remote_code=trust_remote_code)
    return ModelFacts(
        weight_names=WeightNames.of(model),
        eos_token_ids=_eos_token_ids(model_path, hf_config, tokenizer),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        max_positions=getattr(hf_config, "max_position_embeddings", None),
        has_tokenizer=tokenizer is not None,
        llama=LlamaShape.of(model),
    )


def build_model(model_path: Path, *, trust_remote_code: bool) -> HFObject:
    """A model in memory; the random weights it starts with leave the generator as it was.

    Raises:
        ConfigError: no causal LM can be built from the folder.
    """
    with torch.random.fork_rng():
        return _build(model_path, _config(model_path, trust_remote_code), trust_remote_code)


def _config(model_path: Path, trust: bool) -> HFObject:
    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=trust)
    except (OSError, ValueError, ImportError) as error:
        raise _no_model(model_path, error) from error


def _build(model_path: Path, hf_config: HFObject, trust: bool) -> HFObject:
    try:
        return AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust)
    except (OSError, ValueError, ImportError) as error:
        raise _no_model(model_path, error) from error


def _no_model(model_path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"model.path: no causal LM can be built from {model_path}: {error}")


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
