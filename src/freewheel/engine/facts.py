"""What an engine must know of a model besides its weights, as plain data.

Reading it off a folder takes transformers' model classes, whose import is most of a replica's
start; as plain data it can be kept (`known_facts`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from freewheel.engine.decoder import HFObject
from freewheel.errors import InvariantError

_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the length of the sequence."""


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

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse weights, of these names and shapes, that do not fit this model.

        Raises:
            InvariantError: names what is missing, unknown or of another shape.
        """
        problems = [f"unknown {name}" for name in shapes if name not in self.shapes]
        problems += [
            f"{name} is {shape}, not {self.shapes[name]}"
            for name, shape in shapes.items()
            if name in self.shapes and shape != self.shapes[name]
        ]
        problems += [
            f"missing {min(names)}" for names in self.parameters if names.isdisjoint(shapes)
        ]
        if problems:
            shown = "; ".join(problems[:5])
            raise InvariantError(f"{len(problems)} weights do not fit the model: {shown}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """A model that `LlamaDecoder` computes.

    `inv_freq` holds the angle per position of each pair of numbers that the rotary embedding turns,
    exact float32 values; `rope_scale` multiplies its sines and cosines.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    norm_eps: float
    inv_freq: tuple[float, ...]
    rope_scale: float

    @classmethod
    def of(cls, model: HFObject) -> "LlamaShape | None":
        """The shape of a transformers model; None unless `LlamaDecoder` computes exactly that."""
        if not _is_llama_like(model):
            return None
        config = model.config
        attention = model.model.layers[0].self_attn
        rotary = type(model.model.rotary_emb)(config=config)
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=attention.head_dim,
            attention_scale=attention.scaling,
            norm_eps=config.rms_norm_eps,
            inv_freq=tuple(rotary.inv_freq.float().tolist()),
            rope_scale=rotary.attention_scaling,
        )

    def rotary_table(self, length: int) -> torch.Tensor:
        """complex64 (length, D / 2): what the pairs of numbers at each position are multiplied by.

        Computed as transformers does, to the last bit.
        """
        angles = torch.outer(torch.arange(length).float(), torch.tensor(self.inv_freq))
        return torch.complex(angles.cos() * self.rope_scale, angles.sin() * self.rope_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """See the module.

    `vocab_size` counts the rows of the embedding. `max_positions` is None where a model states no
    limit. Without a tokenizer no stop string can be used. `llama` is None for all models that only
    transformers' own forward computes.
    """

    weight_names: WeightNames
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_positions: int | None
    has_tokenizer: bool
    llama: LlamaShape | None

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes an equal one."""
        return {
            "shapes": self.weight_names.shapes,
            "parameters": [sorted(names) for names in self.weight_names.parameters],
            "eos_token_ids": sorted(self.eos_token_ids),
            "vocab_size": self.vocab_size,
            "max_positions": self.max_positions,
            "has_tokenizer": self.has_tokenizer,
            "llama": self.llama and asdict(self.llama),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ModelFacts":
        """What `to_json` gave.

        Raises:
            KeyError, TypeError, AttributeError: the data is something else.
        """
        llama = data["llama"]
        return cls(
            weight_names=WeightNames(
                shapes={name: tuple(shape) for name, shape in data["shapes"].items()},
                parameters=tuple(frozenset(names) for names in data["parameters"]),
            ),
            eos_token_ids=frozenset(data["eos_token_ids"]),
            vocab_size=data["vocab_size"],
            max_positions=data["max_positions"],
            has_tokenizer=data["has_tokenizer"],
            llama=llama and LlamaShape(**llama | {"inv_freq": tuple(llama["inv_freq"])}),
        )


def _is_llama_like(model: HFObject) -> bool:
    """Whether this model computes exactly what `LlamaDecoder` does."""
    config = model.config
    rope: dict[str, Any] = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    kinds: list[str] = getattr(config, "layer_types", None) or []
    windowed = getattr(config, "sliding_window", None) is not None and getattr(
        config, "use_sliding_window", True
    )
    return bool(
        type(model).__name__ in _CLASSES
        and type(model).__module__.startswith("transformers.models.")
        and config.hidden_act == "silu"
        and set(kinds) <= {"full_attention"}
        and not windowed
        and rope.get("rope_type", rope.get("type", "default")) in _ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )
