"""The general path: any Hugging Face causal LM whose state is keys and values, by its own forward.

The model sees ordinary left-padded batches: a two-dimensional attention mask, explicit positions,
and a cache whose layers write into the engine's own rows.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from freewheel.engine.decoder import ChunkInput, DecodeInput, HFObject
from freewheel.engine.kv import KVRows, LayerShape
from freewheel.errors import ConfigError


class _Window:
    """Which part of which rows a forward pass sees: rows [0, count), columns [first, stop)."""

    def __init__(self) -> None:
        self.kv: KVRows | None = None
        self.count = self.first = self.start = self.stop = 0

    def set(self, kv: KVRows, *, count: int, first: int, start: int, stop: int) -> None:
        """New tokens go to columns [start, stop); attention looks at [first, stop)."""
        self.kv, self.count = kv, count
        self.first, self.start, self.stop = first, start, stop


class _RowsLayer(DynamicLayer):
    """One layer of transformers' cache, kept in the engine's rows."""

    def __init__(self, window: _Window, index: int) -> None:
        super().__init__()
        self._window, self._index = window, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._window
        assert window.kv is not None
        keys, values = window.kv.keys[self._index], window.kv.values[self._index]
        keys[: window.count, :, window.start : window.stop] = key_states
        values[: window.count, :, window.start : window.stop] = value_states
        seen = slice(window.first, window.stop)
        return keys[: window.count, :, seen], values[: window.count, :, seen]

    def get_seq_length(self, *_: object) -> int:
        return self._window.start - self._window.first

    def get_mask_sizes(  # pyright: ignore[reportIncompatibleMethodOverride]  # see below
        self, *_: object
    ) -> tuple[int, int]:
        # Its argument changed its name and type between releases of transformers.
        return self._window.stop - self._window.first, 0


class GenericDecoder:
    """See the module. Owns the Hugging Face model; weights are copied into its parameters."""

    def __init__(self, model: HFObject, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1
        self._has_positions = "position_ids" in names
        self.layers = self._probe()
        self._window = _Window()
        self._cache = Cache(layers=[_RowsLayer(self._window, i) for i in range(len(self.layers))])

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the model; a tied one reaches all of its names."""
        state = self._model.state_dict()
        for name, tensor in tensors.items():
            state[name].copy_(tensor)

    @property
    def is_settled(self) -> bool:
        """True: loading leaves nothing to do."""
        return True

    def settle(self, max_elements: int) -> None:
        """Nothing is left to do."""

    def forward(self, decode: DecodeInput, chunks: Sequence[ChunkInput]) -> torch.Tensor:
        """Logits of the decoded rows and of the last chunks."""
        parts = [self._decode(decode)] if decode.lengths else []
        for chunk in chunks:
            logits = self._prefill(chunk)
            if chunk.is_last:
                parts.append(logits)
        if not parts:
            return torch.empty(0, self.vocab_size, device=self.device)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, decode: DecodeInput) -> torch.Tensor:
        end, longest = decode.rows.end, max(decode.lengths)
        self._window.set(
            decode.rows,
            count=len(decode.lengths),
            first=end + 1 - longest,
            start=end,
            stop=end + 1,
        )
        lengths = torch.tensor(decode.lengths, device=self.device).unsqueeze(1)
        columns = torch.arange(longest, device=self.device)
        mask = (columns >= longest - lengths).long()
        token_ids = torch.tensor(decode.token_ids, device=self.device).unsqueeze(1)
        return self._run(token_ids, lengths - 1, mask)

    def _prefill(self, chunk: ChunkInput) -> torch.Tensor:
        self._window.set(chunk.kv, count=1, first=0, start=chunk.start, stop=chunk.stop)
        token_ids = torch.from_numpy(chunk.token_ids).long().to(self.device).unsqueeze(0)
        positions = torch.arange(chunk.start, chunk.stop, device=self.device).unsqueeze(0)
        mask = torch.ones(1, chunk.stop, dtype=torch.long, device=self.device)
        return self._run(token_ids, positions, mask)

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Logits (rows, V) after the last column."""
        inputs: dict[str, Any] = {self._cache_name: self._cache}
        if self._has_positions:
            inputs["position_ids"] = positions
        output = self._model(token_ids, attention_mask=mask, **inputs, **self._options)
        return output.logits[:, -1]

    @torch.inference_mode()
    def _probe(self) -> tuple[LayerShape, ...]:
        """Shapes of keys and values, from a forward pass over one token."""
        cache = DynamicCache()
        inputs: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        self._model(torch.zeros(1, 1, dtype=torch.long, device=self.device), **inputs)
        shapes: list[LayerShape] = []
        for layer in cache.layers:
            if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
                raise ConfigError(
                    f"model.path: {type(self._model).__name__} keeps a {type(layer).__name__}, "
                    "and the embedded engine knows keys and values only; use rollout.engine=vllm"
                )
            _, num_heads, _, key_dim = layer.keys.shape
            shapes.append(
                LayerShape(num_heads=num_heads, key_dim=key_dim, value_dim=layer.values.shape[-1])
            )
        if not shapes:
            raise ConfigError(
                f"model.path: {type(self._model).__name__} does not use the cache it is given; "
                "use rollout.engine=vllm"
            )
        return tuple(shapes)
