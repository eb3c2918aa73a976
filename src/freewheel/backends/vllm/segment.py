"""Shared memory that carries weights from a replica's process into vLLM's.

The memory has no name in any file system: vLLM's processes, which are children of the replica's,
reach it through the replica's descriptor. So nothing is left behind, however the processes end.
A bundle goes through it in chunks, so that it takes no more memory than its largest chunk.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freewheel.weights import TensorSpec, WeightBundle

_ALIGN = 64
MAX_CHUNK_BYTES = 1 << 28
"""Largest chunk, unless one tensor alone is larger: 256 MiB keep the memory small and the calls
few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tensors `start` to `stop` of a bundle; each begins at its offset in the segment, in bytes."""

    start: int
    stop: int
    offsets: tuple[int, ...]
    num_bytes: int


def plan_chunks(
    specs: Sequence[TensorSpec], *, max_bytes: int = MAX_CHUNK_BYTES
) -> tuple[Chunk, ...]:
    """Cut a bundle into chunks of whole tensors.

    Args:
        specs: the bundle's.
        max_bytes: of a chunk; a tensor that is larger gets one of its own.
    """
    chunks: list[Chunk] = []
    start, offsets, end = 0, list[int](), 0
    for i, spec in enumerate(specs):
        offset = -(-end // _ALIGN) * _ALIGN
        if offsets and offset + spec.num_bytes > max_bytes:
            chunks.append(Chunk(start=start, stop=i, offsets=tuple(offsets), num_bytes=end))
            start, offsets, offset = i, [], 0
        offsets.append(offset)
        end = offset + spec.num_bytes
    if offsets:
        chunks.append(Chunk(start=start, stop=len(specs), offsets=tuple(offsets), num_bytes=end))
    return tuple(chunks)


def describe_tensors(specs: Sequence[TensorSpec], chunk: Chunk) -> list[list[Any]]:
    """What the reader must know of a chunk's tensors, in types that travel as JSON would."""
    return [
        [spec.name, spec.dtype, list(spec.shape), offset, spec.num_bytes]
        for spec, offset in zip(specs[chunk.start : chunk.stop], chunk.offsets, strict=True)
    ]


class WeightSegment:
    """The writer's end. Linux only, as vLLM is."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._descriptor = os.memfd_create("freewheel-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, num_bytes)
        self._map = mmap.mmap(self._descriptor, num_bytes)

    @property
    def path(self) -> str:
        """Where a process of the same user opens it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, bundle: WeightBundle, chunk: Chunk) -> None:
        """Copy a chunk to the beginning of the segment."""
        target = np.frombuffer(self._map, dtype=np.uint8, count=chunk.num_bytes)
        for offset, array in zip(
            chunk.offsets, bundle.arrays[chunk.start : chunk.stop], strict=True
        ):
            np.copyto(target[offset : offset + array.nbytes], array)

    def close(self) -> None:
        """Give the memory back once the readers have. Idempotent."""
        if self._descriptor >= 0:
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1
