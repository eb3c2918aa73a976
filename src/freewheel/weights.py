"""Weights as bytes with an index: what the trainer publishes and engines load.

A bundle keeps the memory of the tensors that it is made from where it can, so that publishing costs
one copy: the one into shared memory, which readers then view without another. Tied tensors are sent
once. Names are those of the Hugging Face state dict.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What one tensor's bytes mean; `dtype` is torch's name (`float32`, `bfloat16`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class WeightBundle:
    """All tensors of one policy version; `arrays` are their bytes, uint8 (num_bytes,) each."""

    specs: tuple[TensorSpec, ...]
    arrays: tuple[npt.NDArray[np.uint8], ...]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)


def pack_weights(
    named_tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype | None = None
) -> WeightBundle:
    """A bundle of tensors. It changes with them where they lie in CPU memory in its own format.

    Args:
        named_tensors: (name, tensor on any device); a tensor that shares its memory with an earlier
            one (tied weights) is left out.
        dtype: convert floating-point tensors to it; None keeps each as it is.
    """
    specs: list[TensorSpec] = []
    arrays: list[npt.NDArray[np.uint8]] = []
    for name, tensor in distinct(named_tensors):
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        content = tensor.detach().to(device="cpu", dtype=kind).contiguous()
        array = content.reshape(-1).view(torch.uint8).numpy()
        specs.append(
            TensorSpec(
                name=name,
                dtype=str(kind).removeprefix("torch."),
                shape=tuple(tensor.shape),
                num_bytes=array.nbytes,
            )
        )
        arrays.append(array)
    return WeightBundle(specs=tuple(specs), arrays=tuple(arrays))


def distinct(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out tensors that share their memory with an earlier one."""
    # By address and shape. Memory that is gone again leaves its address to another tensor; it is
    # not kept, as the gathered tensors of a sharded model would fill a GPU.
    seen: dict[tuple[int, tuple[int, ...]], StorageWeakRef] = {}
    for name, tensor in named_tensors:
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen and not seen[key].expired():
            continue
        seen[key] = StorageWeakRef(tensor.untyped_storage())
        yield name, tensor


def unpack_weights(bundle: WeightBundle) -> dict[str, torch.Tensor]:
    """Views of the bundle's memory by name. Never write to them: the memory may be shared."""
    with warnings.catch_warnings():
        # torch warns of read-only memory; the promise not to write is this function's.
        warnings.simplefilter("ignore", UserWarning)
        parts = [torch.from_numpy(array) for array in bundle.arrays]
    return {
        spec.name: part.view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, part in zip(bundle.specs, parts, strict=True)
    }
