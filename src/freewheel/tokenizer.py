"""A model's tokenizer, as transformers' `AutoTokenizer` gives it, without torch where that can be.

`AutoTokenizer` imports torch, which takes longer than all else that a rollout worker does when it
starts, and 150 MB. Many folders name the general class, which needs no torch.
"""

import json
from pathlib import Path
from typing import Any, TypeAlias, cast

from transformers import PreTrainedTokenizerFast

Tokenizer: TypeAlias = Any
"""A tokenizer of transformers, whose class depends on the folder."""

_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the general class: before and since transformers 5."""
_MODEL_TYPES = ("llama",)
"""For these `AutoTokenizer` takes the general class where it is named; for some others it knows
better than the folder."""


def load_tokenizer(model_path: Path, *, trust_remote_code: bool) -> Tokenizer:
    """Load the tokenizer in a model's folder. Nothing is downloaded.

    Raises:
        Exception: whatever transformers raises if it cannot.
    """
    if _is_general(model_path):
        return PreTrainedTokenizerFast.from_pretrained(str(model_path), local_files_only=True)
    from transformers import AutoTokenizer  # imports torch

    return AutoTokenizer.from_pretrained(
        str(model_path), trust_remote_code=trust_remote_code, local_files_only=True
    )


def _is_general(model_path: Path) -> bool:
    """Whether `AutoTokenizer` would give the general class."""
    model, tokenizer = (
        _read(model_path / name) for name in ("config.json", "tokenizer_config.json")
    )
    return (
        (model_path / "tokenizer.json").is_file()
        and model.get("model_type") in _MODEL_TYPES
        and tokenizer.get("tokenizer_class") in _GENERAL
        and "auto_map" not in model
        and "auto_map" not in tokenizer
    )


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is not there or is none, of which transformers tells."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}
