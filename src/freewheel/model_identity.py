"""Whether two model folders hold the same kind of model: architecture, shapes, vocabulary.

Weights are not compared, nor where the folders lie. What may differ without a checkpoint becoming
another model's (generation settings, chat template, end tokens) is let through.
"""

import json
from pathlib import Path
from typing import Any, cast

from freewheel.errors import CheckpointError
from freewheel.models import TOKENIZER_FILES

ARCHITECTURE_KEYS = (
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "tie_word_embeddings",
    "layer_types",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "state_size",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
)
"""Keys of `config.json` that decide what the weights are."""

_TEXT_CONFIG = "text_config"
_VOCABULARY_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer")


def model_differences(saved: Path, model: Path) -> list[str]:
    """In what two Hugging Face folders differ, in words; empty if they hold the same model.

    Args:
        saved: the `hf` folder of a checkpoint.
        model: the folder that `model.path` means.

    Raises:
        CheckpointError: a configuration cannot be read.
    """
    ours, theirs = _read_json(saved / "config.json"), _read_json(model / "config.json")
    found = [*_architecture(ours, theirs, "")]
    our_text, their_text = ours.get(_TEXT_CONFIG), theirs.get(_TEXT_CONFIG)
    if isinstance(our_text, dict) and isinstance(their_text, dict):
        found += _architecture(our_text, their_text, f"{_TEXT_CONFIG}.")
    return found or _vocabulary(saved, model)


def _architecture(ours: dict[str, Any], theirs: dict[str, Any], prefix: str) -> list[str]:
    """A key that one of them leaves to its default is not compared: only transformers knows it."""
    return [
        f"{prefix}{key} {ours[key]!r}, not {theirs[key]!r}"
        for key in ARCHITECTURE_KEYS
        if ours.get(key) is not None and theirs.get(key) is not None and ours[key] != theirs[key]
    ]


def _vocabulary(saved: Path, model: Path) -> list[str]:
    for name in TOKENIZER_FILES:
        ours, theirs = saved / name, model / name
        if not (ours.is_file() and theirs.is_file()) or _same_vocabulary(ours, theirs):
            continue
        return [f"another vocabulary ({name})"]
    return []


def _same_vocabulary(ours: Path, theirs: Path) -> bool:
    if ours.read_bytes() == theirs.read_bytes():
        return True
    if ours.name != "tokenizer.json":
        return False
    parts = [_read_json(path) for path in (ours, theirs)]
    return all(parts[0].get(key) == parts[1].get(key) for key in _VOCABULARY_PARTS)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return cast("dict[str, Any]", content)
