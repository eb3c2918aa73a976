"""A whole step of a model of Llama's shape in one call of the kernels.

T tokens, E hidden size, H query heads, K key-value heads, D head dimension.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from freewheel.engine.compiled.kernels import Kernels, LinearStruct, Panels
from freewheel.engine.decoder import ChunkInput, DecodeInput
from freewheel.engine.kv import KVRows
from freewheel.errors import InvariantError

_APART_MAX_WEIGHTS = 4_000_000
"""Up to this size threads take rows of their own through all layers: they meet once a step, and
each reads all weights, which stay in its cache. Larger models they compute together."""

_ROW_BYTES = 5 * 8
"""Of `row_t`, five numbers."""

_int, _pointer, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("norm_in", _pointer),
        ("norm_mlp", _pointer),
        ("norm_q", _pointer),
        ("norm_k", _pointer),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("hidden", _int),
        ("inner", _int),
        ("heads", _int),
        ("kv_heads", _int),
        ("head_dim", _int),
        ("num_layers", _int),
        ("scale", _float),
        ("eps", _float),
        ("embed", _pointer),
        ("norm", _pointer),
        ("turns", _pointer),
        ("head", LinearStruct),
        ("layers", _pointer),
    )


class _Store(ctypes.Structure):
    _fields_ = (("layers", _pointer), ("num_rows", _int), ("columns", _int))


class _Step(ctypes.Structure):
    _fields_ = (
        ("count", _int),
        ("num_sampled", _int),
        ("has_prompts", _int),
        ("rows", _pointer),
        ("stores", _pointer),
        ("sampled", _pointer),
    )


class _Scratch(ctypes.Structure):
    _fields_ = (
        ("x", _pointer),
        ("blocks", _pointer),
        ("qkv", _pointer),
        ("wide", _pointer),
        ("scores", _pointer),
        ("width", _int),
        ("columns", _int),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. The norms of queries and keys, where the model has them, are per head."""

    qkv: Panels
    out: Panels
    gate_up: Panels
    down: Panels
    norm_in: torch.Tensor
    norm_mlp: torch.Tensor
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A model. `embed` is (V, E), `turns` complex64 (positions, D / 2) by position."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    embed: torch.Tensor
    norm: torch.Tensor
    turns: torch.Tensor
    head: Panels
    layers: Sequence[LayerWeights]


class CompiledStep:
    """Computes steps under weights that stay as they are while it is in use.

    Raises:
        InvariantError: the weights' shapes do not belong together, or the kernels were not made for
            this code.
    """

    def __init__(self, kernels: Kernels, weights: ModelWeights) -> None:
        _check(weights)
        self._kernels, self._weights = kernels, weights
        self._num_queries, self._vector = _agreed(kernels)
        layers = [_layer_struct(layer) for layer in weights.layers]
        self._layers = (_Layer * len(layers))(*layers)
        first = weights.layers[0]
        self._model = _Model(
            hidden=weights.embed.shape[1],
            inner=first.gate_up.num_outputs,
            heads=weights.num_heads,
            kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            num_layers=len(layers),
            scale=weights.scale,
            eps=weights.eps,
            embed=weights.embed.data_ptr(),
            norm=weights.norm.data_ptr(),
            turns=weights.turns.data_ptr(),
            head=weights.head.struct,
            layers=ctypes.addressof(self._layers),
        )
        self._hidden: int = weights.embed.shape[1]
        self._qkv_width = (weights.num_heads + 2 * weights.num_kv_heads) * weights.head_dim
        self._width = max(first.gate_up.num_outputs, weights.num_heads * weights.head_dim)
        self._num_weights = weights.head.num_weights + sum(
            panels.num_weights
            for layer in weights.layers
            for panels in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        self._room = torch.empty(0)

    def __call__(self, decode: DecodeInput, chunks: Sequence[ChunkInput]) -> torch.Tensor:
        """As `Decoder.forward`."""
        rows, sampled = _rows(decode, chunks), _sampled(decode, chunks)
        kept = [decode.rows, *(chunk.kv for chunk in chunks)]
        pointers = [self._pointers(kv) for kv in kept]
        stores = (_Store * len(kept))(
            *(
                _Store(ctypes.addressof(layers), kv.num_rows, kv.num_columns)
                for layers, kv in zip(pointers, kept, strict=True)
            )
        )
        step = _Step(
            count=len(rows),
            num_sampled=len(sampled),
            has_prompts=bool(chunks),
            rows=rows.ctypes.data,
            stores=ctypes.addressof(stores),
            sampled=sampled.ctypes.data,
        )
        num_threads = self._kernels.num_threads(len(rows), self._num_weights)
        scratch = self._scratch(len(rows), max(kv.num_columns for kv in kept), num_threads)
        logits = torch.empty(len(sampled), self._weights.head.num_outputs)
        self._kernels.lib.fw_step(
            ctypes.byref(self._model),
            ctypes.byref(step),
            ctypes.byref(scratch),
            _pointer(logits.data_ptr()),
            num_threads,
            not chunks and self._num_weights <= _APART_MAX_WEIGHTS,
        )
        return logits

    def _pointers(self, kv: KVRows) -> "ctypes.Array[Any]":
        """Where each layer's keys and values lie."""
        count = len(self._weights.layers)
        return (_pointer * count)(*(kv.joint(layer).data_ptr() for layer in range(count)))

    def _scratch(self, count: int, columns: int, num_threads: int) -> _Scratch:
        """Room for the numbers in between, which is kept for later steps."""
        sizes = [
            count * self._hidden,
            count * self._hidden,
            count * self._qkv_width,
            count * self._width,
            num_threads * self._num_queries * (columns + self._vector),
        ]
        if sum(sizes) > len(self._room):
            self._room = torch.empty(sum(sizes))
        offsets = np.cumsum([0, *sizes[:-1]]) * self._room.itemsize + self._room.data_ptr()
        x, blocks, qkv, wide, scores = offsets.tolist()
        return _Scratch(x, blocks, qkv, wide, scores, self._width, columns)


def _agreed(kernels: Kernels) -> tuple[int, int]:
    """Query heads and numbers for which the kernels need room in their scores."""
    structs = (LinearStruct, _Layer, _Model, _Store, None, _Step, _Scratch)
    ours = [_ROW_BYTES if struct is None else ctypes.sizeof(struct) for struct in structs]
    queries, vector, *theirs = (kernels.lib.fw_agreed(i) for i in range(2 + len(ours)))
    if ours != theirs:
        raise InvariantError(f"structures of {ours} bytes, but the kernels' have {theirs}")
    return queries, vector


def _check(weights: ModelWeights) -> None:
    """The kernels look at no bound: what does not belong together must not reach them."""
    heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    hidden, inner = weights.embed.shape[1], weights.layers[0].gate_up.num_outputs
    shapes = {"head": (weights.head, hidden, len(weights.embed))}
    sizes = {"norm": (weights.norm, hidden), "turns": (weights.turns[0], dim // 2)}
    for i, layer in enumerate(weights.layers):
        shapes |= {
            f"layer {i} qkv": (layer.qkv, hidden, (heads + 2 * kv_heads) * dim),
            f"layer {i} out": (layer.out, heads * dim, hidden),
            f"layer {i} gate_up": (layer.gate_up, hidden, inner),
            f"layer {i} down": (layer.down, inner, hidden),
        }
        sizes |= {
            f"layer {i} norm_in": (layer.norm_in, hidden),
            f"layer {i} norm_mlp": (layer.norm_mlp, hidden),
        }
        if layer.norm_q is not None and layer.norm_k is not None:
            sizes |= {
                f"layer {i} norm_q": (layer.norm_q, dim),
                f"layer {i} norm_k": (layer.norm_k, dim),
            }
    problems = [
        f"{name} is {(panels.struct.inputs, panels.num_outputs)}, not {(inputs, outputs)}"
        for name, (panels, inputs, outputs) in shapes.items()
        if (panels.struct.inputs, panels.num_outputs) != (inputs, outputs)
    ]
    problems += [
        f"{name} has {tensor.numel()} numbers, not {size}"
        for name, (tensor, size) in sizes.items()
        if tensor.numel() != size or not tensor.is_contiguous()
    ]
    if heads % kv_heads or dim % 2:
        problems.append(f"{heads} heads of {dim} for {kv_heads} of keys")
    if problems:
        raise InvariantError(f"weights that do not belong together: {'; '.join(problems[:4])}")


def _layer_struct(layer: LayerWeights) -> _Layer:
    return _Layer(
        qkv=layer.qkv.struct,
        out=layer.out.struct,
        gate_up=layer.gate_up.struct,
        down=layer.down.struct,
        norm_in=layer.norm_in.data_ptr(),
        norm_mlp=layer.norm_mlp.data_ptr(),
        norm_q=None if layer.norm_q is None else layer.norm_q.data_ptr(),
        norm_k=None if layer.norm_k is None else layer.norm_k.data_ptr(),
    )


def _rows(decode: DecodeInput, chunks: Sequence[ChunkInput]) -> npt.NDArray[np.int64]:
    """`row_t` of each token, (T, 5): token, length, store, row and column in it."""
    first, num_decoded = 0, len(decode.lengths)
    rows = np.empty((num_decoded + sum(len(c.token_ids) for c in chunks), 5), dtype=np.int64)
    if num_decoded:
        rows[:num_decoded, 0] = decode.token_ids
        rows[:num_decoded, 1] = decode.lengths
        rows[:num_decoded, 2] = 0
        rows[:num_decoded, 3] = np.arange(num_decoded)
        rows[:num_decoded, 4] = decode.rows.end
        first = num_decoded
    for index, chunk in enumerate(chunks):
        part = rows[first : first + len(chunk.token_ids)]
        part[:, 0] = chunk.token_ids
        part[:, 1] = np.arange(chunk.start + 1, chunk.stop + 1)
        part[:, 2] = index + 1
        part[:, 3] = 0
        part[:, 4] = np.arange(chunk.start, chunk.stop)
        first += len(chunk.token_ids)
    return rows


def _sampled(decode: DecodeInput, chunks: Sequence[ChunkInput]) -> npt.NDArray[np.int64]:
    """Rows whose logits are wanted: all decoded ones, and the last of each prompt."""
    ends = len(decode.lengths) + np.cumsum([len(chunk.token_ids) for chunk in chunks])
    last = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.is_last]
    return np.concatenate([np.arange(len(decode.lengths)), last]).astype(np.int64)
