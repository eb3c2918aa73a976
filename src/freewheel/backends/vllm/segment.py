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

MAX_CHUNK_BYTES = 1 << 28
"""Largest chunk, unless one tensor alone is larger: 256 MiB keep the memory small and the calls
few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tensors that lie one after the other in a bundle: bytes `start` to `stop` of its buffer."""

    specs: tuple[TensorSpec, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size in the segment."""
        return self.stop - self.start


def plan_chunks(
    specs: Sequence[TensorSpec], *, max_bytes: int = MAX_CHUNK_BYTES
) -> tuple[Chunk, ...]:
    """Cut a bundle into chunks of whole tensors.

    Args:
        specs: in the order of their offsets.
        max_bytes: of a chunk; a tensor that is larger gets one of its own.
    """
    chunks: list[Chunk] = []
    part: list[TensorSpec] = []
    for spec in specs:
        if part and spec.offset + spec.num_bytes - part[0].offset > max_bytes:
            chunks.append(_chunk(part))
            part = []
        part.append(spec)
    if part:
        chunks.append(_chunk(part))
    return tuple(chunks)


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
        np.copyto(target, bundle.buffer[chunk.start : chunk.stop])

    def update_info(self, chunk: Chunk) -> dict[str, Any]:
        """What the reader must know of a chunk, in types that travel as JSON would."""
        tensors = [
            [spec.name, spec.dtype, list(spec.shape), spec.offset - chunk.start, spec.num_bytes]
            for spec in chunk.specs
        ]
        return {"path": self.path, "num_bytes": chunk.num_bytes, "tensors": tensors}

    def close(self) -> None:
        """Give the memory back once the readers have. Idempotent."""
        if self._descriptor >= 0:
            self._map.close()
            os.close(self._descriptor)
            self._descriptor = -1


def _chunk(specs: Sequence[TensorSpec]) -> Chunk:
    last = specs[-1]
    return Chunk(specs=tuple(specs), start=specs[0].offset, stop=last.offset + last.num_bytes)
