"""The policy in training: a Hugging Face causal LM that scores sampled tokens.

Invariant: what it returns equals `log_softmax(filters(logits / temperature))` of the stock model on
each sequence alone: the distribution that rollouts are sampled from, but that a token which was
sampled is never filtered out. Two shortcuts
rest on properties of a model that cannot be read off its class, so `probe.choose_forward` tries
them on short sequences and takes only what gives the stock result: packed rows (no padding; needs
our attention and no state that crosses sequences), and the head applied to chosen hidden states
alone (needs logits = head(hidden states), without a cap or scale).

Shapes: T tokens of a row, N sampled tokens, V vocabulary, E hidden size, S sequences, L longest.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from freewheel.sampling_filters import NO_FILTERS, Filters
from freewheel.trainer.batching import MicroBatch
from freewheel.trainer.losses import selected_logprobs_and_entropy

MAX_LOGITS_BYTES = 1 << 28
"""Most memory of one chunk of float32 logits; more tokens are done in several chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """How the model runs: `packed` row or padded batch; `split` head or the model's own logits."""

    packed: bool
    split: bool


class Policy(torch.nn.Module):
    """The model with temperature, number format and the chosen way to run it.

    Args:
        model: the Hugging Face model, in float32.
        temperature: of the sampling distribution; 0 (greedy) counts as 1, without filters.
        filters: of the sampling distribution. With any of them on, a copy of the logits is made
            and searched for the tokens that stay.
        autocast_dtype: number format of matrix products; None for float32.
        entropy_grad: whether the entropy carries a gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        filters: Filters = NO_FILTERS,
        autocast_dtype: torch.dtype | None = None,
        entropy_grad: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.how = Forward(packed=False, split=False)
        self.temperature = temperature or 1.0
        self.filters = filters if temperature else NO_FILTERS
        self._autocast_dtype = autocast_dtype
        self._entropy_grad = entropy_grad

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the targets and entropies, float32 (N,) each, in the row's order."""
        with self._autocast(micro.input_ids.device):
            return self.score(micro)

    def score(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in the number format of the weights."""
        if not self.how.split:
            return self._score(self._logits(micro), micro.targets_N)
        return self._score_in_chunks(self._hidden_states(micro), micro.targets_N)

    def _hidden_states(self, micro: MicroBatch) -> torch.Tensor:
        inputs, rows_N = self._inputs(micro)
        output = self.model.base_model(**inputs, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)[rows_N]

    def _logits(self, micro: MicroBatch) -> torch.Tensor:
        inputs, rows_N = self._inputs(micro)
        if self.how.packed:
            output = self.model(**inputs, use_cache=False, logits_to_keep=rows_N)
            return output.logits[0]
        return self.model(**inputs, use_cache=False).logits.flatten(0, 1)[rows_N]

    def _inputs(self, micro: MicroBatch) -> tuple[dict[str, object], torch.Tensor]:
        """Keyword arguments of the model, and the places of the targets in the flat output."""
        if self.how.packed:
            inputs = {"input_ids": micro.input_ids, "position_ids": micro.position_ids}
            return {**inputs, "packing": micro.packing}, micro.rows_N
        return _padded(micro)

    def _score_in_chunks(
        self, hidden_NE: torch.Tensor, targets_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = cast("torch.nn.Module", self.model.get_output_embeddings())
        chunk = max(1, MAX_LOGITS_BYTES // (4 * vocabulary_size(self.model)))
        if targets_N.numel() <= chunk:
            return self._score(head(hidden_NE), targets_N)

        def score(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._score(head(hidden), targets)

        parts = [
            checkpoint(score, hidden, targets, use_reentrant=False)
            for hidden, targets in zip(hidden_NE.split(chunk), targets_N.split(chunk), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self, logits_NV: torch.Tensor, targets_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NV = logits_NV.float()
        if self.temperature != 1.0:
            logits_NV = logits_NV / self.temperature
        if self.filters.any:
            logits_NV = self.filters.apply_but_to(targets_N, logits_NV)
        return selected_logprobs_and_entropy(logits_NV, targets_N, entropy_grad=self._entropy_grad)

    def _autocast(self, device: torch.device) -> torch.autocast | nullcontext[None]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self._autocast_dtype)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the embedding, which may be more than the tokenizer has tokens."""
    return cast("torch.nn.Embedding", model.get_input_embeddings()).weight.shape[0]


def _padded(micro: MicroBatch) -> tuple[dict[str, object], torch.Tensor]:
    """The row as a right-padded batch (S, L), and the places of the targets in it, flattened."""
    device = micro.input_ids.device
    longest = max(micro.lengths)
    lengths_S = torch.tensor(micro.lengths, device=device)
    mask_SL = torch.arange(longest, device=device) < lengths_S[:, None]
    ids_SL = torch.zeros(mask_SL.shape, dtype=torch.int64, device=device)
    ids_SL[mask_SL] = micro.input_ids[0]
    places_T = mask_SL.flatten().nonzero().squeeze(1)
    inputs: dict[str, object] = {"input_ids": ids_SL, "attention_mask": mask_SL.long()}
    return inputs, places_T[micro.rows_N]
