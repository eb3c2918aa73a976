"""The fast path: models of Llama's shape (Llama, Qwen2, Qwen3, Mistral), by a forward of our own.

T tokens of all requests together, decoded and prefilled alike, run flat through the linear layers,
so nothing is padded. H query heads, K key-value heads, D head dimension.

Where there are compiled kernels a step is one call of theirs, from the moment that all weights are
packed for them; until then it is made of torch's operations and single products of theirs, and
elsewhere of torch's.

Query and key rows are stored permuted, so that the two numbers that the rotary embedding turns
stand side by side: one complex product turns them all. Attention scores do not change, since
queries and keys are permuted alike.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from freewheel.engine.attention import RowAttention
from freewheel.engine.compiled.kernels import Kernels, Panels
from freewheel.engine.compiled.step import CompiledStep, LayerWeights, ModelWeights
from freewheel.engine.decoder import ChunkInput, DecodeInput
from freewheel.engine.facts import LlamaShape
from freewheel.engine.kv import LayerShape
from freewheel.engine.linear import GatedLinear, Linear, Packable


class _Layer:
    """Weights of one layer."""

    def __init__(self, decoder: "LlamaDecoder") -> None:
        dtype, device, kernels = decoder.dtype, decoder.device, decoder.kernels
        self.qkv = Linear(dtype=dtype, device=device, kernels=kernels)
        self.out = Linear(dtype=dtype, device=device, kernels=kernels)
        self.gate_up = GatedLinear(dtype=dtype, device=device, kernels=kernels)
        self.down = Linear(dtype=dtype, device=device, kernels=kernels)
        self.norm_in = torch.empty(decoder.hidden_size, dtype=dtype, device=device)
        self.norm_mlp = torch.empty(decoder.hidden_size, dtype=dtype, device=device)
        self.norm_q: torch.Tensor | None = None
        self.norm_k: torch.Tensor | None = None


class LlamaDecoder:
    """See the module. Weights are copied in by `load_weights`; until then it cannot run."""

    def __init__(
        self,
        shape: LlamaShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        kernels: Kernels | None = None,
    ) -> None:
        self.dtype, self.device, self.kernels = dtype, device, kernels
        self.vocab_size = shape.vocab_size
        self.hidden_size = shape.hidden_size
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self._scale = shape.attention_scale
        self._eps = shape.norm_eps
        self._mean: torch.Tensor | None = None
        if device.type == "cpu" and dtype == torch.float32:
            self._mean = torch.full((self.hidden_size, 1), 1 / self.hidden_size)
        self._eps_11 = torch.full((1, 1), self._eps)
        layer = LayerShape(
            num_heads=self.num_kv_heads, key_dim=self.head_dim, value_dim=self.head_dim
        )
        self.layers = (layer,) * shape.num_layers
        self._attend_rows = RowAttention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self._scale,
            dtype=dtype,
            device=device,
        )
        self._rotary = shape.rotary_table(max_length).to(device)
        self._pairs = torch.arange(self.head_dim).view(2, -1).T.reshape(-1)
        self._layers = [_Layer(self) for _ in self.layers]
        self._norm = torch.empty(self.hidden_size, dtype=dtype, device=device)
        self._embed = torch.empty(self.vocab_size, self.hidden_size, dtype=dtype, device=device)
        self._head = Linear(dtype=dtype, device=device, kernels=kernels)
        self._unpacked: deque[Packable] = deque()
        self._step: CompiledStep | None = None

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors, under their Hugging Face names; large matrices stay where they are."""
        self._step = None
        embed = tensors.get("model.embed_tokens.weight")
        head = tensors.get("lm_head.weight", embed)
        embed = head if embed is None else embed
        assert embed is not None
        assert head is not None
        self._embed.copy_(embed)
        self._head.load([head])
        self._norm.copy_(tensors["model.norm.weight"])
        for i, layer in enumerate(self._layers):
            self._load_layer(layer, f"model.layers.{i}", tensors)
        self._unpacked = deque(self._head.unpacked())
        for layer in self._layers:
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
                self._unpacked.extend(linear.unpacked())

    @property
    def is_settled(self) -> bool:
        """Whether every layer is packed that gains by it."""
        return not self._unpacked

    def settle(self, max_elements: int) -> None:
        """Pack layers until they have so many numbers, at least one layer."""
        while self._unpacked and max_elements > 0:
            max_elements -= self._unpacked.popleft().pack()
        if not self._unpacked and self.kernels is not None and self._step is None:
            self._step = CompiledStep(self.kernels, self._model_weights())

    def forward(self, decode: DecodeInput, chunks: Sequence[ChunkInput]) -> torch.Tensor:
        """Logits of the decoded rows and of the last chunks."""
        if self._step is not None:
            return self._step(decode, chunks)
        x_TE = F.embedding(self._token_ids(decode, chunks), self._embed)
        turns = self._rotary.index_select(0, self._positions(decode, chunks)).unsqueeze(1)
        self._attend_rows.begin(decode)
        chunk_masks = [self._chunk_mask(chunk) for chunk in chunks]
        for index, layer in enumerate(self._layers):
            h_TE = self._normed(x_TE, layer.norm_in)
            qkv = self._turned_qkv(layer, h_TE, turns)
            mixed_TE = self._attend(index, qkv, decode, chunks, chunk_masks)
            x_TE = layer.out.added_to(x_TE, mixed_TE)
            h_TE = self._normed(x_TE, layer.norm_mlp)
            x_TE = layer.down.added_to(x_TE, layer.gate_up(h_TE))
        if chunks:
            x_TE = x_TE[self._sampled_rows(decode, chunks)]
        return self._head(self._normed(x_TE, self._norm))

    def _normed(self, x_TE: torch.Tensor, weight_E: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm; on a CPU in fewer passes than torch's own takes."""
        if self._mean is None:
            return F.rms_norm(x_TE, (self.hidden_size,), weight_E, self._eps)
        mean_T1 = torch.addmm(self._eps_11, x_TE * x_TE, self._mean)
        return (x_TE * mean_T1.rsqrt_()).mul_(weight_E)

    def _turned_qkv(self, layer: _Layer, h_TE: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """(T, H + 2K, D): queries and keys with the rotary embedding, and values."""
        qkv = layer.qkv(h_TE).view(len(h_TE), -1, self.head_dim)
        qk = qkv[:, : self.num_heads + self.num_kv_heads]
        if layer.norm_q is not None:
            q = qk.narrow(1, 0, self.num_heads)
            k = qk.narrow(1, self.num_heads, self.num_kv_heads)
            q.copy_(F.rms_norm(q, (self.head_dim,), layer.norm_q, self._eps))
            k.copy_(F.rms_norm(k, (self.head_dim,), layer.norm_k, self._eps))
        wide = qk if self.dtype == torch.float32 else qk.float()
        torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(turns)
        if wide is not qk:
            qk.copy_(wide)
        return qkv

    def _attend(
        self,
        index: int,
        qkv: torch.Tensor,
        decode: DecodeInput,
        chunks: Sequence[ChunkInput],
        masks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """(T, H * D): the decoded rows, then the chunks."""
        stop = len(decode.lengths)
        if not chunks:
            return self._attend_rows(index, qkv)
        parts = [self._attend_rows(index, qkv[:stop])] if stop else []
        for chunk, mask in zip(chunks, masks, strict=True):
            start, stop = stop, stop + len(chunk.token_ids)
            parts.append(self._attend_chunk(index, qkv[start:stop], chunk, mask))
        return torch.cat(parts)

    def _attend_chunk(
        self, index: int, qkv: torch.Tensor, chunk: ChunkInput, mask: torch.Tensor
    ) -> torch.Tensor:
        """(n, H * D): a prompt's queries over its keys so far; query heads lie side by side."""
        heads, kv_heads, count = self.num_heads, self.num_kv_heads, len(qkv)
        keys, values = chunk.kv.keys[index], chunk.kv.values[index]
        keys[0, :, chunk.start : chunk.stop] = qkv[:, heads : heads + kv_heads].transpose(0, 1)
        values[0, :, chunk.start : chunk.stop] = qkv[:, heads + kv_heads :].transpose(0, 1)
        queries = qkv[:, :heads].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(
            queries.reshape(1, kv_heads, -1, self.head_dim),
            keys[:, :, : chunk.stop],
            values[:, :, : chunk.stop],
            attn_mask=mask,
            scale=self._scale,
        )
        return mixed.view(kv_heads, -1, count, self.head_dim).permute(2, 0, 1, 3).reshape(count, -1)

    def _chunk_mask(self, chunk: ChunkInput) -> torch.Tensor:
        """(1, 1, H / K * n, start + n), causal, repeated for the query heads of a key head."""
        rows = torch.arange(chunk.start, chunk.stop, device=self.device).unsqueeze(1)
        hidden = torch.arange(chunk.stop, device=self.device) > rows
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill_(hidden, -torch.inf)
        return mask.repeat(self.num_heads // self.num_kv_heads, 1)[None, None]

    def _token_ids(self, decode: DecodeInput, chunks: Sequence[ChunkInput]) -> torch.Tensor:
        parts = [torch.tensor(decode.token_ids, dtype=torch.int32)]
        parts += [torch.from_numpy(chunk.token_ids) for chunk in chunks]
        return (torch.cat(parts) if chunks else parts[0]).to(self.device)

    def _positions(self, decode: DecodeInput, chunks: Sequence[ChunkInput]) -> torch.Tensor:
        parts = [torch.tensor(decode.lengths, dtype=torch.int64) - 1]
        parts += [torch.arange(chunk.start, chunk.stop) for chunk in chunks]
        return (torch.cat(parts) if chunks else parts[0]).to(self.device)

    def _sampled_rows(self, decode: DecodeInput, chunks: Sequence[ChunkInput]) -> torch.Tensor:
        rows = list(range(len(decode.lengths)))
        end = len(rows)
        for chunk in chunks:
            end += len(chunk.token_ids)
            if chunk.is_last:
                rows.append(end - 1)
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _load_layer(self, layer: _Layer, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        layer.norm_in.copy_(tensors[f"{name}.input_layernorm.weight"])
        layer.norm_mlp.copy_(tensors[f"{name}.post_attention_layernorm.weight"])
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        if f"{attention}.q_norm.weight" in tensors:
            layer.norm_q = self._paired(tensors[f"{attention}.q_norm.weight"])
            layer.norm_k = self._paired(tensors[f"{attention}.k_norm.weight"])
        for linear, prefix, parts in (
            (layer.qkv, attention, ("q_proj", "k_proj", "v_proj")),
            (layer.out, attention, ("o_proj",)),
            (layer.gate_up, mlp, ("gate_proj", "up_proj")),
            (layer.down, mlp, ("down_proj",)),
        ):
            weights, biases = (
                [
                    self._paired(tensors[key]) if part in ("q_proj", "k_proj") else tensors[key]
                    for part in parts
                    if (key := f"{prefix}.{part}.{kind}") in tensors
                ]
                for kind in ("weight", "bias")
            )
            linear.load(weights, biases)

    def _model_weights(self) -> ModelWeights:
        return ModelWeights(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self._scale,
            eps=self._eps,
            embed=self._embed,
            norm=self._norm,
            turns=self._rotary,
            head=_panels(self._head),
            layers=[
                LayerWeights(
                    qkv=_panels(layer.qkv),
                    out=_panels(layer.out),
                    gate_up=_panels(layer.gate_up),
                    down=_panels(layer.down),
                    norm_in=layer.norm_in,
                    norm_mlp=layer.norm_mlp,
                    norm_q=layer.norm_q,
                    norm_k=layer.norm_k,
                )
                for layer in self._layers
            ],
        )

    def _paired(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with the rows of each head permuted as the module says."""
        heads = tensor.unflatten(0, (-1, self.head_dim))[:, self._pairs.to(tensor.device)]
        return heads.flatten(0, 1).to(dtype=self.dtype, device=self.device)


def _panels(linear: Linear | GatedLinear) -> Panels:
    """A layer's weights, packed for the compiled kernels."""
    assert linear.panels is not None
    return linear.panels
