"""Weights as one flat buffer with an index: what the trainer publishes and engines load.

One buffer means one copy to publish, one object in shared memory, and views without a copy for the
readers. Tied tensors are sent once. Names are those of the Hugging Face state dict.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in the buffer; `dtype` is torch's name (`float32`, `bfloat16`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBundle:
    """All tensors of one policy version. `buffer` is uint8 (num_bytes,)."""

    specs: tuple[TensorSpec, ...]
    buffer: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return int(self.buffer.nbytes)


def pack_weights(
    named_tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype | None = None
) -> WeightBundle:
    """Copy tensors into one buffer.

    Args:
        named_tensors: (name, tensor on any device); a tensor that shares its memory with an earlier
            one (tied weights) is left out.
        dtype: convert floating-point tensors to it; None keeps each as it is.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in named_tensors:
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor.detach()
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in tensors.items():
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        num_bytes = tensor.numel() * kind.itemsize
        specs.append(
            TensorSpec(
                name=name,
                dtype=str(kind).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=offset,
                num_bytes=num_bytes,
            )
        )
        offset += -(-num_bytes // _ALIGN) * _ALIGN
    buffer = np.empty(offset, dtype=np.uint8)
    flat = torch.from_numpy(buffer)
    for spec in specs:
        _view(flat, spec).copy_(tensors[spec.name])
    return WeightBundle(specs=tuple(specs), buffer=buffer)


def unpack_weights(bundle: WeightBundle) -> dict[str, torch.Tensor]:
    """Views into the buffer by name. Never write to them: the memory may be shared."""
    with warnings.catch_warnings():
        # torch warns of read-only memory; the promise not to write is this function's.
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.from_numpy(bundle.buffer)
    return {spec.name: _view(flat, spec) for spec in bundle.specs}


def _view(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return flat[spec.offset : spec.offset + spec.num_bytes].view(dtype).view(spec.shape)
