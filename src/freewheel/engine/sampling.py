"""Sampling: from logits to tokens and the log-probabilities under which they were drawn.

N rows, V vocabulary. Each token takes one uniform number that depends on its request's seed and
its position alone, and inverts the cumulative distribution with it. So a request's tokens do not
depend on what else is in the batch (beyond the rounding of the model's own logits).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from freewheel.engine.request import Request
from freewheel.sampling_filters import Filters
from freewheel.types import SamplingParams

_BLOCK = 256
"""Tokens of a block whose probabilities are summed together."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens and log-probabilities of N requests. A logprob is NaN where the logits are."""

    token_ids: list[int]
    logprobs: list[float]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float32]:
    """One number of 24 bits in [0, 1) for each (seed, position): a counter-based generator.

    Source: two rounds of the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(seed) + position * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def sample(logits_NV: torch.Tensor, requests: Sequence[Request]) -> Sampled:
    """Draw one token for each request.

    Args:
        logits_NV: (N, V), any float type; may be overwritten.
        requests: N requests, in the order of the rows.

    Returns:
        Log-probabilities are those of the distribution that was drawn from, after temperature and
        filters; for a greedy request those of the model itself (temperature 1, no filter).
    """
    logits = logits_NV.float()
    draws = uniforms([r.seed for r in requests], [r.length for r in requests])
    draws_N = torch.from_numpy(draws).to(logits.device)
    if len({request.filters for request in requests}) == 1:
        tokens, logprobs = _draw(logits, draws_N, requests[0].sampling)
        return Sampled(tokens.tolist(), logprobs.tolist())
    groups: dict[tuple[float, float, int, float], list[int]] = {}
    for row, request in enumerate(requests):
        groups.setdefault(request.filters, []).append(row)
    token_ids, all_logprobs = [0] * len(requests), [0.0] * len(requests)
    for rows in groups.values():
        index = torch.tensor(rows, device=logits.device)
        drawn = _draw(logits[index], draws_N[index], requests[rows[0]].sampling)
        for row, token, logprob in zip(rows, drawn[0].tolist(), drawn[1].tolist(), strict=True):
            token_ids[row], all_logprobs[row] = token, logprob
    return Sampled(token_ids, all_logprobs)


def _draw(
    logits_NV: torch.Tensor, draws_N: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (N,) and logprobs (N,) of rows that share their sampling parameters."""
    if sampling.temperature == 0:
        top = logits_NV.max(dim=-1)
        return top.indices, top.values - torch.logsumexp(logits_NV, dim=-1)
    if sampling.temperature != 1:
        logits_NV = logits_NV.div_(sampling.temperature)
    filters = Filters(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    logits_NV = filters.apply_(logits_NV)
    probs_NV = torch.softmax(logits_NV, dim=-1)
    tokens_N1 = _invert(probs_NV, draws_N.unsqueeze(1))
    return tokens_N1.squeeze(1), probs_NV.gather(1, tokens_N1).log_().squeeze(1)


def _invert(probs_NV: torch.Tensor, draws_N1: torch.Tensor) -> torch.Tensor:
    """Tokens (N, 1) at which the cumulative distribution passes the draws.

    A running sum over a whole vocabulary cannot use the processor's vectors, sums of blocks can: so
    first the block is found, then the token in it.
    """
    vocab_size = probs_NV.shape[1]
    if vocab_size < 2 * _BLOCK:
        return _search(probs_NV.cumsum(dim=-1), draws_N1, scaled=True)[0]
    whole = vocab_size // _BLOCK * _BLOCK
    sums_NB = probs_NV[:, :whole].unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    if whole < vocab_size:
        sums_NB = torch.cat([sums_NB, probs_NV[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    blocks_N1, rests_N1 = _search(sums_NB.cumsum(dim=-1), draws_N1, scaled=True)
    index_NC = blocks_N1 * _BLOCK + torch.arange(_BLOCK, device=probs_NV.device)
    block_NC = probs_NV.gather(1, index_NC.clamp(max=vocab_size - 1))
    block_NC = block_NC.masked_fill_(index_NC >= vocab_size, 0)
    places_N1, _ = _search(block_NC.cumsum(dim=-1), rests_N1, scaled=False)
    return (blocks_N1 * _BLOCK + places_N1).clamp_(max=vocab_size - 1)


def _search(
    cumulative_NC: torch.Tensor, targets_N1: torch.Tensor, *, scaled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where running sums pass targets (shares of the total, if `scaled`), and what is left there.

    A target stays below the total, so that no item of probability 0 is ever found.
    """
    total_N1 = cumulative_NC[:, -1:]
    targets_N1 = targets_N1 * total_N1 if scaled else targets_N1
    targets_N1 = torch.minimum(targets_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    found_N1 = torch.searchsorted(cumulative_NC, targets_N1, right=True)
    found_N1 = found_N1.clamp_(max=cumulative_NC.shape[1] - 1)
    before_N1 = cumulative_NC.gather(1, (found_N1 - 1).clamp_(min=0)).masked_fill_(found_N1 == 0, 0)
    return found_N1, targets_N1 - before_N1


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
