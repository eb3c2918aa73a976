"""The seam between deciding and computing: what the engine asks of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from freewheel.engine.kv import KVRows, LayerShape

HFObject: TypeAlias = Any
"""A model, configuration or tokenizer of transformers, whose classes depend on the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkInput:
    """Prompt tokens to run: int32 (n,), at positions from `start`, into the one row of `kv`.

    Logits are wanted after its last token if `is_last`.
    """

    token_ids: npt.NDArray[np.int32]
    start: int
    kv: KVRows
    is_last: bool

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInput:
    """One token for each of the first B rows of `rows`.

    `token_ids` are the tokens to feed; `lengths` count each row's tokens with it. Its keys and
    values go to column `rows.end`, which the engine then moves.
    """

    token_ids: Sequence[int]
    lengths: Sequence[int]
    rows: KVRows


class Decoder(Protocol):
    """A model that computes over keys and values that the engine owns."""

    vocab_size: int
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors that were checked before. Tied ones may come under either name.

        They must not change until `is_settled`: a decoder may compute from them where they are.
        """
        ...

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do that makes the loaded weights faster."""
        ...

    def settle(self, max_elements: int) -> None:
        """Do a part of what is left: some `max_elements` numbers of the weights."""
        ...

    def forward(self, decode: DecodeInput, chunks: Sequence[ChunkInput]) -> torch.Tensor:
        """Logits (B + last chunks, V): the decoded rows, then the chunks that are the last."""
        ...
