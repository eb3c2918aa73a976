"""Find out how a model may be run: the fastest way that gives the stock model's results.

Called once at start, on the full model, before it is sharded.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from transformers import PreTrainedModel

from freewheel.sampling_filters import NO_FILTERS
from freewheel.trainer.attention import PACKED, UnsupportedAttentionError
from freewheel.trainer.batching import MicroBatch, Sample, pack
from freewheel.trainer.policy import Forward, Policy, vocabulary_size

_LENGTHS = (9, 9, 5, 3)
_TOLERANCE = 2e-4
"""Largest difference of log-probabilities that still counts as the same model; another model
differs by far more, float32 on any device by less."""


@torch.no_grad()
def choose_forward(policy: Policy, *, device: torch.device) -> Forward:
    """Set `policy.how` to the fastest way whose log-probabilities agree with the stock model's.

    Leaves the model with the attention that this way needs. A padded batch with the model's own
    logits is the stock model itself, so there is always one.
    """
    # Without filters: next to one's threshold, rounding decides whether a token stays.
    filters, policy.filters = policy.filters, NO_FILTERS
    try:
        return _choose(policy, device)
    finally:
        policy.filters = filters


def _choose(policy: Policy, device: torch.device) -> Forward:
    stock = _attention_of(policy.model)
    micro = _probe_batch(policy.model, device)
    expected = _stock_logprobs(policy, micro)
    for how in _ways(policy.model):
        policy.model.set_attn_implementation(PACKED if how.packed else stock)
        policy.how = how
        if _agrees(policy, micro, expected):
            return how
    policy.how = Forward(packed=False, split=False)
    return policy.how


def _ways(model: PreTrainedModel) -> Iterator[Forward]:
    for packed, split in product((True, False), (True, False)):
        if (_may_pack(model) or not packed) and (_may_split(model) or not split):
            yield Forward(packed=packed, split=split)


def _attention_of(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)  # pyright: ignore[reportPrivateUsage]  # no getter


def _may_pack(model: PreTrainedModel) -> bool:
    """False for what the probe's short sequences would not show, such as attention in chunks."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and getattr(config, "attention_chunk_size", None) is None
        and layer_types <= {"full_attention", "sliding_attention"}
    )


def _may_split(model: PreTrainedModel) -> bool:
    """False for a cap on the logits, which bends them too little to show where they are small."""
    config = model.config.get_text_config()
    return getattr(config, "final_logit_softcapping", None) is None


def _agrees(policy: Policy, micro: MicroBatch, expected: torch.Tensor) -> bool:
    if policy.how.packed and _attention_of(policy.model) != PACKED:
        return False
    try:
        logprobs, _ = policy.score(micro)
    except (UnsupportedAttentionError, AttributeError, TypeError):
        # The model has no such keyword, or no such split.
        return False
    return bool(torch.allclose(logprobs, expected, rtol=0, atol=_TOLERANCE))


def _stock_logprobs(policy: Policy, micro: MicroBatch) -> torch.Tensor:
    """Log-probabilities of the targets by the stock model, one sequence at a time."""
    logits = [
        policy.model(input_ids=ids[None], use_cache=False).logits[0]
        for ids in micro.input_ids[0].split(list(micro.lengths))
    ]
    rows = torch.cat(logits)[micro.rows_N].float() / policy.temperature
    return torch.log_softmax(rows, -1).gather(-1, micro.targets_N[:, None]).squeeze(-1)


def _probe_batch(model: PreTrainedModel, device: torch.device) -> MicroBatch:
    vocabulary = vocabulary_size(model)
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    for index, length in enumerate(_LENGTHS):
        tokens = random.integers(0, vocabulary, size=length + 1)
        samples.append(
            Sample(
                index=index,
                sample_id=f"probe-{index}",
                input_ids=tokens[:-1],
                rows=np.arange(length),
                targets=tokens[1:],
                rollout_logprobs=np.zeros(length, dtype=np.float32),
                versions=np.zeros(length, dtype=np.int64),
                advantage=0.0,
                weight=0.0,
            )
        )
    return pack(samples, with_grad=False, counts=False, device=device)
