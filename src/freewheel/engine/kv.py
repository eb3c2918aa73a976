"""Keys and values of requests: a rectangle of rows whose newest tokens share a column.

R rows, H key-value heads, C columns, D head dimension. All rows end at column `end`; a row of n
tokens lies in columns [end - n, end). So one decode step writes a single column, joining is a
copy that ends there, and a row that leaves costs nothing but the move of the last row into its
place. When the columns are used up the rectangle is laid out anew, without the unused ones.

What lies left of a row's tokens is masked by the caller; it is always finite.
"""

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
    """The rectangle. `keys[i]` and `values[i]` are (R, H, C, D) of layer i."""

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
        self._options = {"dtype": dtype, "device": device}
        self.num_rows = num_rows
        self.num_columns = num_columns
        self.end = 0
        self.keys = [self._zeros(layer.num_heads, layer.key_dim) for layer in layers]
        self.values = [self._zeros(layer.num_heads, layer.value_dim) for layer in layers]

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
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                new = self._zeros(old.shape[1], old.shape[3])
                if num_used and longest:
                    new[:num_used, :, :longest] = old[:num_used, :, first : self.end]
                tensors[i] = new
        self.end = longest

    def shift(self, num_used: int, longest: int, end: int) -> None:
        """Move all rows right, so that a longer row can join."""
        for tensor in (*self.keys, *self.values):
            source = tensor[:num_used, :, self.end - longest : self.end].clone()
            tensor[:num_used, :, end - longest : end] = source
        self.end = end

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the row `source` of `length` tokens over the row `target`."""
        columns = slice(self.end - length, self.end)
        for tensor in (*self.keys, *self.values):
            tensor[target, :, columns] = tensor[source, :, columns]

    def join(self, prefill: "KVRows", first_row: int, num_rows: int) -> None:
        """Copy the one row of `prefill` into `num_rows` rows."""
        length = prefill.end
        columns = slice(self.end - length, self.end)
        rows = slice(first_row, first_row + num_rows)
        for ours, theirs in (
            *zip(self.keys, prefill.keys, strict=True),
            *zip(self.values, prefill.values, strict=True),
        ):
            ours[rows, :, columns] = theirs[:1, :, :length]

    def _zeros(self, num_heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(self.num_rows, num_heads, self.num_columns, dim, **self._options)
