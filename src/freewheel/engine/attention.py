"""Attention of decoded rows: one query token a row, over the keys and values of its rectangle.

B rows, H query heads, K key-value heads, D head dimension, C columns of the rectangle. In float32
on a CPU two batched products over all rows and heads take about half the time of torch's own
attention, which calls a product for each row and head; elsewhere torch's own is used.

Memory is what this costs, and reading a row of keys that is followed by a gap takes two to three
times as long, byte for byte, as reading on and on (measured: 128 heads, 95 of 100 columns 251 us,
128 of 128 columns 117 us). So the products run over all columns, the unused ones masked.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from freewheel.engine.decoder import DecodeInput

_MAX_UNUSED = 3
"""The columns in use are cut out if there are more than so many times as many."""


class RowAttention:
    """Call `begin` once a step, then the object itself once a layer."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._head_dim, self._scale = head_dim, scale
        self._dtype, self._device = dtype, device
        self._uses_products = device.type == "cpu" and dtype == torch.float32
        self._mask = torch.empty(0)
        self._starts: list[int] = []
        self._end = -1
        self._seen_mask = self._mask
        self._first = self._count = 0
        self._is_ragged = False
        self._decode: DecodeInput | None = None

    def begin(self, decode: DecodeInput) -> None:
        """Note what this step sees, for all of its layers."""
        if not decode.lengths:
            return
        self._decode, rows = decode, decode.rows
        end, longest = rows.end, max(decode.lengths)
        starts = [end + 1 - length for length in decode.lengths]
        # While no row comes, goes or moves, the mask of the step before needs one column more.
        grows = end == self._end + 1 and starts == self._starts
        if not grows or self._mask.shape[2] != rows.num_columns:
            self._mask = self._make_mask(starts, end, rows.num_columns)
        self._mask.select(2, end).zero_()
        self._starts, self._end = starts, end
        self._is_ragged = min(decode.lengths) != longest
        self._first, self._count = end + 1 - longest, longest
        if self._uses_products and longest * _MAX_UNUSED >= rows.num_columns:
            self._first, self._count = 0, rows.num_columns
        self._seen_mask = self._mask.narrow(2, self._first, self._count)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write the new keys and values, then attend.

        Args:
            layer: its index.
            qkv: (B, H + 2K, D), turned by the rotary embedding.

        Returns:
            (B, H * D).
        """
        assert self._decode is not None
        rows, count = self._decode.rows, len(qkv)
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._head_dim
        new = qkv.narrow(1, heads, 2 * kv_heads).view(count, 2, kv_heads, dim).transpose(0, 1)
        rows.joint(layer).select(3, rows.end).narrow(1, 0, count).copy_(new)
        seen = rows.flat(layer).narrow(1, 0, count * kv_heads)
        keys, values = seen.narrow(2, self._first, self._count).unbind()
        queries = qkv.narrow(1, 0, heads).reshape(count * kv_heads, -1, dim)
        if self._uses_products:
            scores = torch.baddbmm(
                self._seen_mask, queries, keys.transpose(1, 2), alpha=self._scale
            )
            return torch.bmm(scores.softmax(-1), values).view(count, -1)
        mixed = F.scaled_dot_product_attention(
            queries.unflatten(0, (count, kv_heads)),
            keys.unflatten(0, (count, kv_heads)),
            values.unflatten(0, (count, kv_heads)),
            attn_mask=self._seen_mask.unflatten(0, (count, kv_heads)) if self._is_ragged else None,
            scale=self._scale,
        )
        return mixed.reshape(count, -1)

    def _make_mask(self, starts: Sequence[int], end: int, num_columns: int) -> torch.Tensor:
        """(B * K, 1, C): 0 where a row's tokens are, in columns [start, end); -inf elsewhere."""
        columns = torch.arange(num_columns, device=self._device)
        first = torch.tensor(starts, device=self._device).unsqueeze(1)
        hidden = (columns < first) | (columns >= end)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(self._num_kv_heads, 0).unsqueeze(1)
