"""Keys and values of requests: a rectangle of rows whose newest tokens share a column.

R rows, H key-value heads, C columns, D head dimension. All rows end at column `end`; a row of n
tokens lies in columns [end - n, end). So one decode step writes a single column, joining is a
copy that ends there, and a row that leaves costs nothing but the move of the last row into its
place. When the columns are used up the rectangle is laid out anew, without the unused ones.

What lies left of a row's tokens is masked by the caller; it is always finite.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of one layer's keys and values for one token."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def size(self) -> int:
        """Elements for one token."""
        return self.num_heads * (self.key_dim + self.value_dim)


def cell_bytes(layers: tuple[LayerShape, ...], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values, with room to lay out one layer anew beside the rest."""
    sizes = [layer.size for layer in layers]
    return (sum(sizes) + max(sizes)) * dtype.itemsize


class KVRows:
    """The rectangle. `keys[i]` and `values[i]` are (R, H, C, D) of layer i.

    Where keys and values are equally wide they are halves of one tensor (2, R, H, C, D), keys
    first, which `joint(i)` gives: half as many calls. `flat(i)` is the same as (2, R * H, C, D).
    """

    def __init__(
        self,
        layers: tuple[LayerShape, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int = 0,
        num_columns: int = 0,
    ) -> None:
        self._layers = layers
        self._dtype, self._device = dtype, device
        self.num_rows = num_rows
        self.num_columns = num_columns
        self.end = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._flats: list[torch.Tensor] = []
        self._stores: list[tuple[torch.Tensor, ...]] = [self._allocate(layer) for layer in layers]
        for tensor in self._tensors():
            tensor.zero_()
        self._cut()

    @property
    def num_cells(self) -> int:
        """Cells allocated."""
        return self.num_rows * self.num_columns

    def fit(self, *, num_used: int, longest: int, num_rows: int, num_columns: int) -> None:
        """Lay the rectangle out anew, with its tokens to the left.

        Args:
            num_used: rows to keep.
            longest: tokens of the longest row to keep.
            num_rows: rows of the new rectangle.
            num_columns: columns of the new rectangle; `end` becomes `longest`.
        """
        first = self.end - longest
        self.num_rows, self.num_columns = num_rows, num_columns
        # Views would keep the old memory alive while the next layers are allocated.
        self.keys, self.values, self._flats = [], [], []
        for i, layer in enumerate(self._layers):
            olds, self._stores[i] = self._stores[i], self._allocate(layer)
            for old, new in zip(olds, self._stores[i], strict=True):
                new[..., :num_used, :, :longest, :] = old[..., :num_used, :, first : self.end, :]
                new[..., :num_used, :, longest:, :] = 0
                new[..., num_used:, :, :, :] = 0
            del olds
        self._cut()
        self.end = longest

    def shift(self, num_used: int, longest: int, end: int) -> None:
        """Move all rows right, so that a longer row can join."""
        for tensor in self._tensors():
            source = tensor[..., :num_used, :, self.end - longest : self.end, :].clone()
            tensor[..., :num_used, :, end - longest : end, :] = source
        self.end = end

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the row `source` of `length` tokens over the row `target`."""
        columns = slice(self.end - length, self.end)
        for tensor in self._tensors():
            tensor[..., target, :, columns, :] = tensor[..., source, :, columns, :]

    def join(self, prefill: "KVRows", first_row: int, num_rows: int) -> None:
        """Copy the one row of `prefill` into `num_rows` rows."""
        length = prefill.end
        columns = slice(self.end - length, self.end)
        rows = slice(first_row, first_row + num_rows)
        for ours, theirs in zip(self._tensors(), prefill._tensors(), strict=True):
            ours[..., rows, :, columns, :] = theirs[..., :1, :, :length, :]

    def joint(self, layer: int) -> torch.Tensor:
        """Keys and values of a layer as one tensor (2, R, H, C, D)."""
        (store,) = self._stores[layer]
        return store

    def flat(self, layer: int) -> torch.Tensor:
        """Keys and values of a layer as one tensor (2, R * H, C, D)."""
        return self._flats[layer]

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for store in self._stores for tensor in store)

    def _allocate(self, layer: LayerShape) -> tuple[torch.Tensor, ...]:
        if layer.key_dim == layer.value_dim:
            return (self._empty(2, self.num_rows, layer.num_heads, layer.key_dim),)
        return (
            self._empty(self.num_rows, layer.num_heads, layer.key_dim),
            self._empty(self.num_rows, layer.num_heads, layer.value_dim),
        )

    def _cut(self) -> None:
        """Make `keys`, `values` and the flat ones views of what is stored."""
        halves = [s if len(s) == 2 else s[0].unbind() for s in self._stores]
        self.keys = [keys for keys, _ in halves]
        self.values = [values for _, values in halves]
        self._flats = [store[0].flatten(1, 2) for store in self._stores if len(store) == 1]

    def _empty(self, *sizes: int) -> torch.Tensor:
        *rows, dim = sizes
        shape = (*rows, self.num_columns, dim)
        return torch.empty(shape, dtype=self._dtype, device=self._device)
