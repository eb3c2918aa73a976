"""Attention over a packed row: sequences one after the other, none sees another, none is padded.

Registered with transformers under `PACKED`; the model hands its queries, keys and values here with
the keyword `packing` that the caller of the model gave. Sequences of equal length lie side by side,
so that each run of them is one batched call.

Shapes: B = 1, H query heads, K key-value heads, T tokens of the row, D head dimension, C sequences
of length L in one run.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "freewheel_packed"


class UnsupportedAttentionError(Exception):
    """The model asks for a kind of attention that the packed form does not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where the sequences of a packed row lie: runs of (number of sequences, their length)."""

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: list[int]) -> "Packing":
        """From the lengths in the row's order."""
        return cls(runs=tuple((len(list(run)), length) for length, run in groupby(lengths)))

    @property
    def run_tokens(self) -> list[int]:
        """Tokens of each run."""
        return [count * length for count, length in self.runs]


def packed_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of the row; the signature is transformers' interface.

    Returns:
        (B, T, H, D) and None for the attention weights.

    Raises:
        UnsupportedAttentionError: there is no packing, or the model asks for a soft cap, attention
            sinks, a position bias, a mask of its own or attention that is not causal.
    """
    _refuse_unsupported(module, packing, attention_mask, kwargs)
    assert packing is not None
    sizes = packing.run_tokens
    pieces = [
        _attend(run, query, key, value, scaling, sliding_window)
        for run, query, key, value in zip(
            packing.runs,
            query_BHTD.transpose(1, 2).split(sizes, dim=1),
            key_BKTD.transpose(1, 2).split(sizes, dim=1),
            value_BKTD.transpose(1, 2).split(sizes, dim=1),
            strict=True,
        )
    ]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)), None


def _refuse_unsupported(
    module: torch.nn.Module,
    packing: Packing | None,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, object],
) -> None:
    asked = [
        name
        for name in ("softcap", "s_aux", "position_bias", "cache_position_bias")
        if kwargs.get(name) is not None
    ]
    if packing is None:
        asked.append("a call without packing")
    if attention_mask is not None:
        asked.append("attention_mask")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        asked.append("is_causal=False")
    if asked:
        raise UnsupportedAttentionError(f"packed attention does not compute: {', '.join(asked)}")


def _attend(
    run: tuple[int, int],
    query_BTHD: torch.Tensor,
    key_BTKD: torch.Tensor,
    value_BTKD: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attention of one run of equally long sequences, as one batch; (1, C * L, H, D)."""
    count, length = run
    query, key, value = (
        tensor.reshape(count, length, *tensor.shape[2:]).transpose(1, 2)
        for tensor in (query_BTHD, key_BTKD, value_BTKD)
    )
    mask = None
    if sliding_window is not None and length > sliding_window:
        mask = _window_mask(length, sliding_window, query.device)
    out_CHLD = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_CHLD.transpose(1, 2).reshape(1, count * length, *query_BTHD.shape[2:])


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Bool (L, L): a token sees itself and the `window - 1` tokens before it."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(PACKED, packed_attention)
