"""The compiled kernels as Python sees them: weights in panels, and products with them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freewheel.engine.compiled.build import load

_MIN_OPERATIONS = 20_000_000
"""Multiplications and additions below which a second thread costs more than it gains."""

_STORE, _ADD, _GATE = range(3)

_int, _pointer = ctypes.c_int64, ctypes.c_void_p


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "fw_pack": (_pointer, _pointer, _int, _int, _pointer, ctypes.c_int),
    "fw_linear": (
        *(_pointer, _pointer, _int, _pointer, _pointer, _pointer, _int),
        *(ctypes.c_int, ctypes.c_int),
    ),
    "fw_step": (_pointer, _pointer, _pointer, _pointer, ctypes.c_int, ctypes.c_int),
}


class LinearStruct(ctypes.Structure):
    """`linear_t`."""

    _fields_ = (("weights", _pointer), ("bias", _pointer), ("inputs", _int), ("outputs", _int))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """A layer's weights in the kernels' order. `struct` points into the tensors beside it."""

    struct: LinearStruct
    weights: torch.Tensor
    bias: torch.Tensor | None
    is_gated: bool

    @property
    def num_outputs(self) -> int:
        """Numbers that one row gives."""
        outputs: int = self.struct.outputs
        return outputs // 2 if self.is_gated else outputs

    @property
    def num_weights(self) -> int:
        """Numbers in the matrix, those that fill the last panel included."""
        return self.weights.numel()


class Kernels:
    """The library, loaded. All tensors are float32 on the CPU and contiguous.

    Args:
        num_threads: threads that a call may use.

    Raises:
        CompileError: it cannot be compiled, or not be loaded.
    """

    def __init__(self, num_threads: int) -> None:
        self.lib = load()
        for name, types in _ARGUMENTS.items():
            getattr(self.lib, name).argtypes = types
        self._num_threads = num_threads
        self._width: int = self.lib.fw_panel_width()

    def num_threads(self, num_rows: int, num_weights: int) -> int:
        """Threads that make a product of so many rows with so many weights fast."""
        return self._num_threads if 2 * num_rows * num_weights >= _MIN_OPERATIONS else 1

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Panels:
        """Panels of a matrix (N, K), and its bias (N,)."""
        num_panels = -(-len(weight) // self._width)
        panels = self._packed(weight, None, num_panels)
        if bias is not None:
            bias = _filled(bias, num_panels * self._width)
        return self._panels(weight, panels, bias, num_outputs=len(weight), is_gated=False)

    def pack_gated(
        self, gate: torch.Tensor, up: torch.Tensor, biases: Sequence[torch.Tensor] = ()
    ) -> Panels:
        """Panels of two matrices (N, K) with both biases or none, for `silu(x G^T) * (x U^T)`."""
        half = self._width // 2
        num_panels = -(-len(gate) // half)
        panels = self._packed(gate, up, num_panels)
        bias = None
        if biases:
            rows = [_filled(each, num_panels * half).view(-1, half) for each in biases]
            bias = torch.stack(rows, dim=1).flatten()
        return self._panels(gate, panels, bias, num_outputs=2 * len(gate), is_gated=True)

    def apply(
        self, panels: Panels, x: torch.Tensor, base: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(T, K) to (T, N): the layer's output, added to `base` (T, N) if there is one."""
        x = x.contiguous()
        base = base if base is None else base.contiguous()
        y = torch.empty(len(x), panels.num_outputs)
        blocks = torch.empty_like(x)
        plain = _STORE if base is None else _ADD
        self.lib.fw_linear(
            ctypes.byref(panels.struct),
            _pointer(x.data_ptr()),
            _int(len(x)),
            _pointer(blocks.data_ptr()),
            _pointer(None if base is None else base.data_ptr()),
            _pointer(y.data_ptr()),
            _int(panels.num_outputs),
            _GATE if panels.is_gated else plain,
            self.num_threads(len(x), panels.num_weights),
        )
        return y

    def _packed(
        self, matrix: torch.Tensor, other: torch.Tensor | None, num_panels: int
    ) -> torch.Tensor:
        num_inputs = matrix.shape[1]
        matrix = matrix.contiguous()
        other = other if other is None else other.contiguous()
        packed = torch.empty(num_panels * num_inputs * self._width)
        self.lib.fw_pack(
            _pointer(matrix.data_ptr()),
            _pointer(None if other is None else other.data_ptr()),
            _int(len(matrix)),
            _int(num_inputs),
            _pointer(packed.data_ptr()),
            self._num_threads,
        )
        return packed

    def _panels(
        self,
        matrix: torch.Tensor,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        num_outputs: int,
        is_gated: bool,
    ) -> Panels:
        struct = LinearStruct(
            weights=packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inputs=matrix.shape[1],
            outputs=num_outputs,
        )
        return Panels(struct=struct, weights=packed, bias=bias, is_gated=is_gated)


def _filled(vector: torch.Tensor, size: int) -> torch.Tensor:
    """A vector with zeros behind it."""
    result = torch.zeros(size)
    result[: len(vector)] = vector
    return result
