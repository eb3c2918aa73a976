"""Weights that stay where the trainer has them, and are read from there by whoever needs them.

The way of the weights for engines on GPUs (`rollout.weight_transfer=nixl`): the trainer copies what
it publishes within its own device's memory, and each engine reads it from there by itself, through
NIXL: over NVLink or shared memory on one machine, over the network between two. Nothing goes
through the object store or, on GPUs, through the host's memory, and no reader waits for another.

A publication lasts until it is dropped; its memory then serves a later one. A reader whose source
dies gets an error, never a part of the weights as if it were all.
"""

import base64
import importlib
import os
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from freewheel.config.sections import Config
from freewheel.errors import ConfigError, InvariantError, WeightsLostError
from freewheel.weights import TensorSpec, WeightBundle, distinct, pack_weights

INSTALL = "type: pip install 'freewheel[nixl]'"

_SEGMENT_BYTES = 1 << 28
"""Least size of a piece of the source's memory; a larger tensor has one of its own."""
_ALIGN = 64
_POLL_S = 0.0005

Memory = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWeights:
    """All tensors of one policy version, by where they lie in the source's memory.

    `addresses` has the first byte of each; `agent` and `metadata` are what NIXL must know of the
    source, `publication` is what it calls these weights.
    """

    publication: int
    agent: str
    metadata: bytes
    memory: Memory
    device_index: int
    specs: tuple[TensorSpec, ...]
    addresses: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)

    def place(self, start: int, stop: int) -> dict[str, Any]:
        """Where tensors `start` to `stop` lie, in types that travel as JSON would."""
        place = Place(
            agent=self.agent,
            metadata=base64.b64encode(self.metadata).decode(),
            memory=self.memory,
            device_index=self.device_index,
            addresses=list(self.addresses[start:stop]),
        )
        return asdict(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a reader must know of tensors in a source's memory; `metadata` in base64."""

    agent: str
    metadata: str
    memory: Memory
    device_index: int
    addresses: list[int]


@dataclass(slots=True, kw_only=True, eq=False)
class _Segment:
    """A piece of the source's memory, known to NIXL as long as the source lives."""

    memory: torch.Tensor
    used: int = 0

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """Room for a tensor; None if there is too little left."""
        start = -(-self.used // _ALIGN) * _ALIGN
        if start + num_bytes > len(self.memory):
            return None
        self.used = start + num_bytes
        return self.memory[start : self.used]


class WeightSource:
    """The trainer's end: keeps publications until they are dropped. Any thread may call.

    Memory: one copy of the weights for each publication that somebody still needs, and one to take
    the next.

    Raises:
        ConfigError: NIXL is not installed, or cannot be used on this machine.
    """

    def __init__(self, config: Config) -> None:
        os.environ.update(network_environment(config))
        self._agent = _make_agent("source")
        self._lock = threading.Lock()
        self._next = 0
        self._free: list[_Segment] = []
        self._published: dict[int, tuple[RemoteWeights, list[_Segment]]] = {}

    def publish(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype
    ) -> RemoteWeights:
        """Copy tensors to where readers find them, all on one device; tied ones once.

        Args:
            named_tensors: (name, tensor).
            dtype: convert floating-point tensors to it.
        """
        with self._lock:
            return self._publish(named_tensors, dtype)

    def drop(self, publication: int) -> None:
        """Let a publication's memory serve another. What is dropped already is ignored."""
        with self._lock:
            _, segments = self._published.pop(publication, (None, []))
            self._free += segments

    def on_host(self, weights: RemoteWeights) -> WeightBundle:
        """A copy in the host's memory.

        Raises:
            WeightsLostError: another source published them, or they were dropped.
        """
        with self._lock:
            kept, segments = self._published.get(weights.publication, (None, []))
            if kept is None or kept.agent != weights.agent:
                raise WeightsLostError(
                    f"publication {weights.publication} of {weights.agent} is not in the memory of "
                    f"{self._agent.name}"
                )
            return pack_weights(
                (spec.name, _view(segments, address, spec).to("cpu", copy=True))
                for spec, address in zip(kept.specs, kept.addresses, strict=True)
            )

    def _publish(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
    ) -> RemoteWeights:
        segments: list[_Segment] = []
        try:
            weights = self._fill(segments, named_tensors, dtype)
        except BaseException:
            self._free += segments
            raise
        self._published[weights.publication] = (weights, segments)
        return weights

    def _fill(
        self,
        segments: list[_Segment],
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
    ) -> RemoteWeights:
        specs: list[TensorSpec] = []
        addresses: list[int] = []
        devices: set[torch.device] = set()
        for name, tensor in distinct(named_tensors):
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            spec = TensorSpec(
                name=name,
                dtype=str(kind).removeprefix("torch."),
                shape=tuple(tensor.shape),
                num_bytes=tensor.numel() * kind.itemsize,
            )
            place = self._room(segments, spec.num_bytes, tensor.device)
            place.view(kind).view(spec.shape).copy_(tensor)
            specs.append(spec)
            addresses.append(place.data_ptr())
            devices.add(tensor.device)
        if len(devices) != 1:
            raise InvariantError(f"weights are published from one device, not from {devices}")
        (device,) = devices
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # readers wait for no stream of ours
        self._next += 1
        return RemoteWeights(
            publication=self._next,
            agent=self._agent.name,
            metadata=self._agent.get_agent_metadata(),
            memory="cuda" if device.type == "cuda" else "cpu",
            device_index=device.index or 0,
            specs=tuple(specs),
            addresses=tuple(addresses),
        )

    def _room(self, segments: list[_Segment], num_bytes: int, device: torch.device) -> torch.Tensor:
        """Room in the publication's last segment, or in one more."""
        place = segments[-1].take(num_bytes) if segments else None
        if place is None:
            segments.append(self._segment(num_bytes, device))
            place = segments[-1].take(num_bytes)
        assert place is not None
        return place

    def _segment(self, num_bytes: int, device: torch.device) -> _Segment:
        """The first free segment that is large enough, or a new one.

        Publications are alike, so each finds what an earlier one had, in the same order.
        """
        for segment in self._free:
            if len(segment.memory) >= num_bytes and segment.memory.device == device:
                self._free.remove(segment)
                segment.used = 0
                return segment
        size = max(num_bytes, _SEGMENT_BYTES)
        segment = _Segment(memory=torch.empty(size, dtype=torch.uint8, device=device))
        self._agent.register_memory([segment.memory])
        return segment


class WeightReader:
    """An engine's end. One thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._agent = _make_agent("reader")
        self._buffer: torch.Tensor | None = None
        self._known: str | None = None
        """Metadata that the agent was given; it changes when the source takes more memory."""
        self._source = ""

    def read(self, place: Place, ranges: Sequence[tuple[int, int]], num_bytes: int) -> torch.Tensor:
        """Bytes (num_bytes,) on the reader's device, valid until the next read.

        Args:
            place: where the tensors lie.
            ranges: where each goes, (first byte, number of bytes).
            num_bytes: end of the last one.

        Raises:
            WeightsLostError: the source is gone.
        """
        try:
            return self._read(place, ranges, num_bytes)
        except _errors() as error:
            raise WeightsLostError(f"weights in the memory of {place.agent}: {error}") from error

    def forget(self) -> None:
        """End the connection with the source. Idempotent."""
        if self._known is not None:
            self._agent.remove_remote_agent(self._source)
            self._known = None

    def _read(
        self, place: Place, ranges: Sequence[tuple[int, int]], num_bytes: int
    ) -> torch.Tensor:
        if self._known != place.metadata:
            self.forget()
            self._agent.add_remote_agent(base64.b64decode(place.metadata))
            self._known, self._source = place.metadata, place.agent
        buffer = self._room(num_bytes)
        here = [
            (buffer.data_ptr() + start, size, self._device.index or 0) for start, size in ranges
        ]
        there = [
            (address, size, place.device_index)
            for address, (_, size) in zip(place.addresses, ranges, strict=True)
        ]
        memory = "cuda" if self._device.type == "cuda" else "cpu"
        transfer = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(here, mem_type=memory),
            self._agent.get_xfer_descs(there, mem_type=place.memory),
            place.agent,
            b"",
        )
        try:
            state = self._agent.transfer(transfer)
            while state == "PROC":
                time.sleep(_POLL_S)  # noqa: TID251  # in the engine's own thread, which waits
                state = self._agent.check_xfer_state(transfer)
        finally:
            self._agent.release_xfer_handle(transfer)
        if state != "DONE":
            raise WeightsLostError(f"weights in the memory of {place.agent}: state {state}")
        return buffer[:num_bytes]

    def _room(self, num_bytes: int) -> torch.Tensor:
        """Memory that NIXL knows; it only grows, to the size of the largest chunk."""
        if self._buffer is None or len(self._buffer) < num_bytes:
            if self._buffer is not None:
                self._agent.deregister_memory(self._agent.get_reg_descs([self._buffer]))
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._agent.register_memory([self._buffer])
        return self._buffer


def network_environment(config: Config) -> dict[str, str]:
    """Variables that keep NIXL from listening beyond this machine, unless a cluster is joined.

    What the user has set stays as it is.
    """
    if config.ray.address is not None or "UCX_NET_DEVICES" in os.environ:
        return {}
    return {"UCX_NET_DEVICES": "lo"}


def _view(segments: Sequence[_Segment], address: int, spec: TensorSpec) -> torch.Tensor:
    """The tensor at an address in one of the segments."""
    for segment in segments:
        start = address - segment.memory.data_ptr()
        if start >= 0 and start + spec.num_bytes <= len(segment.memory):
            part = segment.memory[start : start + spec.num_bytes]
            return part.view(getattr(torch, spec.dtype)).view(spec.shape)
    raise InvariantError(f"{spec.name} lies in none of its publication's segments")


def _make_agent(kind: str) -> Any:
    """An agent of NIXL, with a name of its own in the cluster."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        api: Any = importlib.import_module("nixl._api")
        settings = api.nixl_agent_config(backends=["UCX"])
        return api.nixl_agent(f"freewheel-{kind}-{uuid.uuid4().hex}", settings)
    except ImportError as error:
        raise ConfigError(f"rollout.weight_transfer=nixl: {error}; {INSTALL}") from error
    except Exception as error:
        raise ConfigError(f"rollout.weight_transfer=nixl: NIXL cannot be used: {error}") from error


def _errors() -> tuple[type[Exception], ...]:
    """What NIXL raises when the other side is gone."""
    bindings: Any = importlib.import_module("nixl._bindings")
    names = ("nixlRemoteDisconnectError", "nixlBackendError", "nixlNotFoundError")
    return tuple(getattr(bindings, name) for name in names)
