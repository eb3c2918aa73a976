"""A linear layer whose weights are replaced while it is in use.

Weights are packed, into the order in which the compiled kernels read them. Where those cannot be
compiled a large float32 layer is packed for oneDNN's, which run it 1.3 to 2 times as fast as the
plain call at 8 to 64 rows on a CPU (measured: 576 by 49152, 32 rows, 20 against 35 ms); small
layers are faster plain. Packing takes longer than a copy, so it is a step of its own: a layer
computes from the matrices as they came until it is packed.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from freewheel.engine.compiled.kernels import Kernels, Panels

_PACK_MIN_ELEMENTS = 1 << 17
_PACK_ROWS = 32
"""The batch size oneDNN packs for. Other sizes then run within a few percent of their own best."""


class Packable(Protocol):
    """What `pack` makes faster."""

    def pack(self) -> int:
        """Bring the weights into the kernels' order; returns how many numbers that were."""
        ...


class Linear:
    """`y = x W^T + b`, with W put together from several matrices.

    `panels` are its weights as the compiled kernels read them, once it is packed for them.
    """

    def __init__(
        self, *, dtype: torch.dtype, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self.panels: Panels | None = None
        self._weight: torch.Tensor | None = None
        self._transposed: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None

    def load(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> None:
        """Take matrices (out, in), one under the other.

        A layer that is to be packed may keep a matrix as it is given until `pack`; one that is not
        copies them. The first call allocates.
        """
        self._bias = self._copy(biases, self._bias) if biases else None
        self._packed = self.panels = None
        self._weight = self._dense(weights) if self.packs(weights) else self._own(weights)
        self._transposed = self._weight.t()

    def unpacked(self) -> Iterator[Packable]:
        """The layers in it that `pack` would make faster."""
        if self._weight is not None and self.packs([self._weight]):
            yield self

    def pack(self) -> int:
        """Bring the weights into the kernels' order; returns how many numbers that were."""
        weight, bias = self.give_up()
        if self._kernels is not None:
            self.panels = self._kernels.pack(weight, bias)
            return weight.numel()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        return weight.numel()

    def give_up(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix and bias, of which the matrix is forgotten: whoever takes it packs it."""
        assert self._weight is not None
        weight, self._weight, self._transposed = self._weight, None, None
        return weight, self._bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, in) to (T, out)."""
        if self._kernels is not None and self.panels is not None:
            return self._kernels.apply(self.panels, x)
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        assert self._transposed is not None
        if self._bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self._bias, x, self._transposed)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """`silu(y)`, (T, out), in one pass where there is one."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "swish", [], "")
        return F.silu(self(x))

    def times(self, factor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`factor * y`, (T, out), in one pass where there is one."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, factor, self._packed, self._bias, "mul"
            )
        return self(x).mul_(factor)

    def added_to(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`base + y`, (T, out), in one call where there is one."""
        if self._kernels is not None and self.panels is not None:
            return self._kernels.apply(self.panels, x, base)
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, base, self._packed, self._bias, "add"
            )
        if self._bias is not None:
            return base + self(x)
        assert self._transposed is not None
        return torch.addmm(base, x, self._transposed)

    def packs(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether matrices, one under the other, would be packed."""
        return self._kernels is not None or (
            self._device.type == "cpu"
            and self._dtype == torch.float32
            and sum(weight.numel() for weight in weights) >= _PACK_MIN_ELEMENTS
            and torch.backends.mkldnn.is_available()
        )

    def _dense(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole matrix to pack from: the given one if there is one."""
        only = parts[0]
        if len(parts) == 1 and only.dtype == self._dtype and only.is_contiguous():
            return only
        return self._copy(parts, None)

    def _own(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole matrix in memory of its own, always the same."""
        return self._copy(parts, self._weight)

    def _copy(self, parts: Sequence[torch.Tensor], into: torch.Tensor | None) -> torch.Tensor:
        if into is None:
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            into = torch.empty(shape, dtype=self._dtype, device=self._device)
        row = 0
        for part in parts:
            into[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        return into


class GatedLinear:
    """`silu(x G^T) * (x U^T)`, the gated half of an MLP.

    The compiled kernels take both matrices at once. For oneDNN's, large ones are packed apart: they
    then apply the function and the factor while they write, which saves two passes and, with
    several threads, two meetings of all threads.
    """

    def __init__(
        self, *, dtype: torch.dtype, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        self._gate = Linear(dtype=dtype, device=device, kernels=kernels)
        self._up = Linear(dtype=dtype, device=device, kernels=kernels)
        self._joint = Linear(dtype=dtype, device=device)
        self._is_split = False
        self._kernels = kernels
        self.panels: Panels | None = None

    def load(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> None:
        """As `Linear.load`: the gate's and the other matrix, with both biases or none."""
        self.panels = None
        self._is_split = all(self._gate.packs([weight]) for weight in weights)
        if not self._is_split:
            self._joint.load(weights, biases)
            return
        self._gate.load(weights[:1], biases[:1])
        self._up.load(weights[1:], biases[1:])

    def unpacked(self) -> Iterator[Packable]:
        """The layers in it that `pack` would make faster."""
        if self._kernels is not None:
            yield self
            return
        for linear in (self._gate, self._up, self._joint):
            yield from linear.unpacked()

    def pack(self) -> int:
        """Bring both matrices into the compiled kernels' order."""
        assert self._kernels is not None
        (gate, gate_bias), (up, up_bias) = self._gate.give_up(), self._up.give_up()
        biases = [bias for bias in (gate_bias, up_bias) if bias is not None]
        self.panels = self._kernels.pack_gated(gate, up, biases)
        return gate.numel() + up.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, in) to (T, out)."""
        if self._kernels is not None and self.panels is not None:
            return self._kernels.apply(self.panels, x)
        if self._is_split:
            return self._up.times(self._gate.silu(x), x)
        gate, up = self._joint(x).unflatten(1, (2, -1)).unbind(1)
        return F.silu(gate).mul_(up)
