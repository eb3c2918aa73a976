"""Attention of decoded rows: one query token a row, over the keys and values of its rectangle.

B rows, H query heads, K key-value heads, D head dimension, L columns seen. In float32 on a CPU two
batched products over all rows and heads take about half the time of torch's own attention, which
calls a product for each row and head; elsewhere torch's own is used.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from freewheel.engine.decoder import DecodeInput

_SPARE_COLUMNS = 64
"""Columns a mask reaches further than needed now, so that it serves as many steps."""


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
        self._skips: list[int] = []
        self._full_mask = torch.empty(0, 1, 0)
        self._mask = self._full_mask
        self._decode: DecodeInput | None = None
        self._first = self._longest = 0

    def begin(self, decode: DecodeInput) -> None:
        """Note what this step sees, for all of its layers."""
        self._decode = decode
        self._longest = longest = max(decode.lengths, default=0)
        self._first = decode.rows.end + 1 - longest
        skips = [longest - length for length in decode.lengths]
        # While no row comes or goes all grow alike, and the mask of the step before still fits.
        if skips != self._skips or longest > self._full_mask.shape[2]:
            self._skips = skips
            self._full_mask = self._make_mask(skips, longest + _SPARE_COLUMNS)
        self._mask = self._full_mask.narrow(2, 0, longest)

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
        keys, values = seen.narrow(2, self._first, self._longest).unbind()
        queries = qkv.narrow(1, 0, heads).reshape(count * kv_heads, -1, dim)
        if self._uses_products:
            scores = torch.baddbmm(self._mask, queries, keys.transpose(1, 2), alpha=self._scale)
            return torch.bmm(scores.softmax(-1), values).view(count, -1)
        mixed = F.scaled_dot_product_attention(
            queries.unflatten(0, (count, kv_heads)),
            keys.unflatten(0, (count, kv_heads)),
            values.unflatten(0, (count, kv_heads)),
            attn_mask=self._mask.view(count, kv_heads, 1, -1) if any(self._skips) else None,
            scale=self._scale,
        )
        return mixed.reshape(count, -1)

    def _make_mask(self, skips: Sequence[int], num_columns: int) -> torch.Tensor:
        """(B * K, 1, C): -inf left of each row's tokens, 0 from there on."""
        first = torch.tensor(skips, device=self._device).unsqueeze(1)
        hidden = torch.arange(num_columns, device=self._device) < first
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(self._num_kv_heads, 0).unsqueeze(1)
