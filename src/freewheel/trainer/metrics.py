"""Metrics of a trainer step, by verl's names.

Sums and maxima are kept as tensors on the device, one vector each, so that a step costs one
synchronization with it however many micro-batches it has; ranks add theirs up before that.

Shapes: N sampled tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from freewheel.trainer.batching import MicroBatch
from freewheel.trainer.losses import PolicyLoss
from freewheel.types import Trajectory

_PER_TOKEN = (
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/entropy",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_ratio_fraction_high",
    "training/rollout_probs_diff_mean",
)
_PER_SEQUENCE = ("rollout_corr/training_log_ppl", "rollout_corr/rollout_log_ppl")
_LOSSES = ("actor/pg_loss", "actor/entropy_loss")
MISMATCH_TOKENS = "engine_mismatch/num_tokens"
MISMATCH_MEAN = "engine_mismatch/logprobs_diff_mean"
_MISMATCH_MAX = "engine_mismatch/logprobs_diff_max"
_MISMATCH = (MISMATCH_TOKENS, MISMATCH_MEAN, "engine_mismatch/k3_kl")
"""Between engine and trainer on the tokens that were sampled under the very weights that the
trainer has: no staleness in it, only what the two compute differently."""
_SUMS = (*_LOSSES, *_PER_TOKEN, *_PER_SEQUENCE, *_MISMATCH)
_MAXIMA = ("training/rollout_probs_diff_max", "rollout_corr/rollout_is_max", _MISMATCH_MAX)

_MAX_LOG_RATIO = 20.0


@dataclass(slots=True, kw_only=True)
class TokenMetrics:
    """Running sums and maxima over micro-batches of one step, on this rank.

    `version` is the policy version whose weights the trainer has, None once they have moved on.
    """

    is_threshold: float
    version: int | None = None
    sums: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    maxima: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    num_tokens: int = 0
    num_sequences: int = 0
    num_mini_batches: int = 0

    @torch.no_grad()
    def add(
        self,
        micro: MicroBatch,
        loss: PolicyLoss,
        logprobs_N: torch.Tensor,
        old_logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
    ) -> None:
        """Count one micro-batch; all tensors float32 (N,). Stand-ins are left out."""
        if not micro.counts:
            return
        logprobs_N = logprobs_N.detach()
        entropy_N = entropy_N.detach()
        log_ratio_N = logprobs_N - micro.rollout_logprobs_N
        ratio_N = log_ratio_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        difference_N = (logprobs_N.exp() - micro.rollout_logprobs_N.exp()).abs()
        per_token = [
            loss.clipped_N.float(),
            loss.bounded_N.float(),
            old_logprobs_N - logprobs_N,
            entropy_N,
            -log_ratio_N,
            ratio_N - log_ratio_N - 1,
            ratio_N.square() - 1,
            ratio_N.clamp(max=self.is_threshold),
            (ratio_N > self.is_threshold).float(),
            difference_N,
        ]
        losses = [
            (loss.losses_N.detach() * micro.weights_N).sum(),
            (entropy_N * micro.weights_N).sum(),
        ]
        sequences = [
            -(logprobs_N * micro.per_sequence_N).sum(),
            -(micro.rollout_logprobs_N * micro.per_sequence_N).sum(),
        ]
        own_N = torch.zeros_like(log_ratio_N)
        if self.version is not None:
            own_N = (micro.versions_N == self.version).float()
        gap_N = own_N * log_ratio_N.abs()
        mismatch = [own_N.sum(), gap_N.sum(), (own_N * (ratio_N - log_ratio_N - 1)).sum()]
        sums = [*losses, *torch.stack(per_token).sum(1), *sequences, *mismatch]
        self.sums.append(torch.stack(sums))
        self.maxima.append(torch.stack([difference_N.max(), ratio_N.max(), gap_N.max()]))

    def vectors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums and maxima of this rank, float32; zeros if it has none."""
        sums = self.sums or [torch.zeros(len(_SUMS), device=device)]
        maxima = self.maxima or [torch.zeros(len(_MAXIMA), device=device)]
        return torch.stack(sums).sum(0), torch.stack(maxima).amax(0)

    def result(self, sums: torch.Tensor, maxima: torch.Tensor) -> dict[str, float]:
        """Metrics by name from the sums and maxima of all ranks."""
        metrics: dict[str, float] = dict(zip(_SUMS, sums.tolist(), strict=True))
        metrics |= dict(zip(_MAXIMA, maxima.tolist(), strict=True))
        num_own = metrics[MISMATCH_TOKENS]
        for names, count in (
            (_LOSSES, self.num_mini_batches),
            (_PER_TOKEN, self.num_tokens),
            (_PER_SEQUENCE, self.num_sequences),
            (_MISMATCH[1:], num_own),
        ):
            for name in names:
                metrics[name] /= max(1, count)
        metrics["rollout_corr/log_ppl_diff"] = (
            metrics["rollout_corr/rollout_log_ppl"] - metrics["rollout_corr/training_log_ppl"]
        )
        if not num_own:  # nothing was measured, which is not a difference of zero
            for name in (*_MISMATCH[1:], _MISMATCH_MAX):
                del metrics[name]
        return metrics


def batch_metrics(
    groups: Sequence[list[Trajectory]],
    advantages: Sequence[float],
    *,
    max_response_length: int,
    policy_version: int,
) -> dict[str, float]:
    """Metrics of the data alone: rewards, advantages, lengths in tokens, staleness in versions.

    Args:
        groups: all groups of the step.
        advantages: of all trajectories, in order.
        max_response_length: responses of this length count as cut off.
        policy_version: of the trainer when it consumed them.
    """
    flat = [trajectory for group in groups for trajectory in group]
    # The prompt ends at the first sampled token; what an environment says later is response.
    prompts = np.array([_num_prompt_tokens(t) for t in flat], dtype=np.float64)
    responses = np.array([t.token_ids.size for t in flat]) - prompts
    staleness = np.array([policy_version - _min_version(t, policy_version) for t in flat])
    return {
        **_spread("critic/rewards", np.array([t.reward for t in flat])),
        **_spread("critic/score", np.array([t.reward for t in flat])),
        **_spread("critic/advantages", np.asarray(advantages)),
        **_spread("response_length", responses),
        "response_length/clip_ratio": float((responses >= max_response_length).mean()),
        **_spread("prompt_length", prompts),
        **_spread("fully_async/staleness", staleness),
        "perf/total_num_tokens": float(prompts.sum() + responses.sum()),
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _num_prompt_tokens(trajectory: Trajectory) -> int:
    sampled = np.flatnonzero(trajectory.loss_mask)
    return int(sampled[0]) if sampled.size else int(trajectory.token_ids.size)


def _min_version(trajectory: Trajectory, default: int) -> int:
    versions = trajectory.versions[trajectory.loss_mask]
    return int(versions.min()) if versions.size else default
