"""Advantages and losses as pure functions.

Everything per token is flat: only sampled (response) tokens are here, those of many sequences one
after the other. A loss of a mini-batch is `sum(weights_N * losses_N)`, where the weights come from
the sequence lengths of the whole mini-batch; so it does not matter how the tokens are spread over
micro-batches or ranks.

Shapes: N sampled tokens, S sequences, G members of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

LossAggMode: TypeAlias = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]

_MAX_LOG_RATIO = 20.0
"""exp(20) is far beyond any clip range; beyond it exp would overflow and its gradient be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Loss of each token and what happened to it; all (N,).

    `clipped` marks tokens whose loss is the clipped one, `bounded` those whose ratio was truncated.
    """

    losses_N: torch.Tensor
    ratios_N: torch.Tensor
    clipped_N: torch.Tensor
    bounded_N: torch.Tensor


def group_advantages(
    rewards_G: npt.ArrayLike, *, normalize_by_std: bool, eps: float = 1e-6
) -> npt.NDArray[np.float64]:
    """Advantage of each member of a group relative to the group.

    Equal rewards give exactly zero, and so does a group of one.

    Args:
        rewards_G: (G,) scalar rewards.
        normalize_by_std: divide by the sample standard deviation plus `eps`.
        eps: added to the standard deviation, in units of reward.

    Returns:
        float64 (G,).

    Source: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision:
        A_i = (r_i - mean(r)) / std(r). Without the division: Liu et al. 2025, Understanding
        R1-Zero-Like Training (arXiv:2503.20783), section 3.2 (Dr. GRPO).
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.size == 0 or rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if not normalize_by_std:
        return centred
    return centred / (rewards.std(ddof=1) + eps)


def sequence_weights(num_tokens_S: Sequence[int], mode: LossAggMode) -> npt.NDArray[np.float64]:
    """Weight of each token of a sequence in the mini-batch's loss, one number a sequence.

    Sequences without a sampled token do not count.

    Args:
        num_tokens_S: sampled tokens of every sequence of the whole mini-batch.
        mode: `token-mean` gives each token 1 / (all tokens); `seq-mean-token-sum` 1 / (number of
            sequences); `seq-mean-token-mean` 1 / (number of sequences * tokens of its sequence).

    Returns:
        float64 (S,).

    Source: `token-mean` is Yu et al. 2025, DAPO (arXiv:2503.14476), equation 8;
        `seq-mean-token-mean` is DeepSeekMath (arXiv:2402.03300), equation 3;
        `seq-mean-token-sum` is the sum over tokens of Dr. GRPO (arXiv:2503.20783), section 3.2.
    """
    num_tokens = np.asarray(num_tokens_S, dtype=np.float64)
    num_sequences = max(1, int(np.count_nonzero(num_tokens)))
    if mode == "token-mean":
        return np.full_like(num_tokens, 1.0 / max(1.0, num_tokens.sum()))
    if mode == "seq-mean-token-sum":
        return np.full_like(num_tokens, 1.0 / num_sequences)
    return 1.0 / (num_sequences * np.maximum(num_tokens, 1.0))


def clipped_policy_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    max_ratio: float | None = None,
    importance_weights_N: torch.Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate loss of each token.

    With r = exp(logprobs - old_logprobs), loss = max(-A r, -A clip(r, 1 - low, 1 + high)).
    `max_ratio` truncates r first, which bounds the loss also where the advantage is negative (there
    the clipping does not); for `max_ratio > 1 + clip_ratio_high` that equals the dual clip.

    Args:
        logprobs_N: float32 (N,), under the weights in training; carries the gradient.
        old_logprobs_N: float32 (N,), denominator of the ratio.
        advantages_N: float32 (N,).
        clip_ratio_low: ratios are clipped below 1 minus this.
        clip_ratio_high: ratios are clipped above 1 plus this.
        max_ratio: truncation of the ratio; None for none.
        importance_weights_N: float32 (N,), multiplied with the loss; carries no gradient.

    Source: Schulman et al. 2017, PPO (arXiv:1707.06347), equation 7; separate clips: Yu et al.
        2025, DAPO (arXiv:2503.14476), equation 8; dual clip: Ye et al. 2020 (arXiv:1912.09729),
        section on dual-clip PPO.
    """
    log_ratios_N = (logprobs_N - old_logprobs_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratios_N = log_ratios_N.exp()
    free_N = ratios_N.detach()
    bounded_N = torch.zeros_like(free_N, dtype=torch.bool)
    if max_ratio is not None:
        bounded_N = (free_N > max_ratio) & (advantages_N < 0)
        ratios_N = ratios_N.clamp(max=max_ratio)
    plain_N = -advantages_N * ratios_N
    clipped_N = -advantages_N * ratios_N.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses_N = torch.maximum(plain_N, clipped_N)
    if importance_weights_N is not None:
        losses_N = losses_N * importance_weights_N
    return PolicyLoss(
        losses_N=losses_N,
        ratios_N=free_N,
        clipped_N=(clipped_N > plain_N).detach(),
        bounded_N=bounded_N,
    )


def truncated_importance_weights(
    old_logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor, *, threshold: float
) -> torch.Tensor:
    """Weight of each token for having been sampled elsewhere: min(exp(old - rollout), C).

    Args:
        old_logprobs_N: float32 (N,), the trainer's at the start of the step.
        rollout_logprobs_N: float32 (N,), recorded when the token was sampled.
        threshold: C, at least 1.

    Returns:
        float32 (N,), without gradient.

    Source: Ionides 2008, Truncated Importance Sampling; per token with C as in Yao et al. 2025,
        Your Efficient RL Framework Secretly Brings You Off-Policy RL Training.
    """
    log_weights_N = (old_logprobs_N - rollout_logprobs_N).detach()
    return log_weights_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp().clamp(max=threshold)


def selected_logprobs_and_entropy(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, *, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and entropy of each distribution in nats; both float32 (N,).

    Args:
        logits_NV: float32 (N, V), after the sampling distribution's temperature and filters.
        targets_N: int64 (N,).
        entropy_grad: whether the entropy carries a gradient (costs a second (N, V) tensor).
    """
    log_distribution_NV = torch.log_softmax(logits_NV, dim=-1)
    logprobs_N = log_distribution_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    source_NV = log_distribution_NV if entropy_grad else log_distribution_NV.detach()
    # A token that the model excludes has logit -inf; its share of the entropy is 0, not 0 * inf.
    finite_NV = source_NV.clamp(min=torch.finfo(source_NV.dtype).min)
    entropy_N = -(source_NV.exp() * finite_NV).sum(-1)
    return logprobs_N, entropy_N
