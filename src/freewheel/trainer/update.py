"""Optimizer steps: forward, loss, backward over micro-batches, check, clip, step.

Shapes: N sampled tokens of a micro-batch, S samples of a mini-batch.
"""

import torch

from freewheel.config.sections import Config
from freewheel.errors import TrainingDivergedError
from freewheel.trainer.batching import MicroBatch, MiniBatch
from freewheel.trainer.distributed import Ranks, drop_gathered, full
from freewheel.trainer.losses import (
    PolicyLoss,
    clipped_policy_loss,
    truncated_importance_weights,
)
from freewheel.trainer.metrics import TokenMetrics
from freewheel.trainer.optim import learning_rate, set_learning_rate
from freewheel.trainer.policy import Policy

_NUM_WORST = 4


class Updater:
    """Owns the optimizer and counts its steps."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        device: torch.device,
        total_steps: int | None,
        optimizer_steps: int,
    ) -> None:
        self.optimizer = optimizer
        self.optimizer_steps = optimizer_steps
        self._actor = config.actor
        self._correction = config.algorithm.rollout_correction
        self._policy = policy
        self._ranks = ranks
        self._device = device
        self._total_steps = total_steps

    def run(
        self, step: int, mini_batches: list[MiniBatch], tokens: TokenMetrics
    ) -> dict[str, float]:
        """All optimizer steps of a trainer step; returns its metrics by name.

        Raises:
            TrainingDivergedError: loss or gradient is not finite.
        """
        decoupled = self._correction.mode == "decoupled"
        old = [self._old_logprobs(mini) if decoupled else None for mini in mini_batches]
        norms: list[float] = []
        for _ in range(self._actor.ppo_epochs):
            for place, mini in enumerate(mini_batches):
                name = f"step {step}, mini-batch {place}"
                norms.append(self._update(name, mini, old[place], tokens))
                tokens.version = None
        tokens.num_mini_batches = len(norms)
        sums, maxima = tokens.vectors(self._device)
        metrics = tokens.result(self._ranks.sum(sums), self._ranks.max(maxima))
        metrics["actor/grad_norm"] = sum(norms) / len(norms)
        metrics["actor/lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["actor/num_optimizer_steps"] = float(self.optimizer_steps)
        return metrics

    @torch.no_grad()
    def _old_logprobs(self, mini: MiniBatch) -> list[torch.Tensor]:
        """The trainer's log-probabilities before the step, of each micro-batch."""
        return [self._policy(micro)[0] for micro in mini.micro_batches]

    def _update(
        self,
        name: str,
        mini: MiniBatch,
        old: list[torch.Tensor] | None,
        tokens: TokenMetrics,
    ) -> float:
        """One optimizer step; returns the norm of the gradient before clipping."""
        self._zero_grad()
        loss_S = torch.zeros(len(mini.samples), device=self._device)
        for place, micro in enumerate(mini.micro_batches):
            old_N = micro.rollout_logprobs_N if old is None else old[place]
            self._accumulate(micro, old_N, tokens, loss_S)
        drop_gathered(self._policy)
        tokens.num_tokens += mini.num_targets
        tokens.num_sequences += sum(1 for sample in mini.samples if sample.num_targets)
        self._ranks.sum(loss_S)
        norm = self._gradient_norm()
        self._check_finite(name, mini, loss_S, norm)
        self._clip(norm)
        lr = learning_rate(self._actor.optim, self.optimizer_steps, self._total_steps)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer_steps += 1
        return float(norm)

    def _accumulate(
        self,
        micro: MicroBatch,
        old_N: torch.Tensor,
        tokens: TokenMetrics,
        loss_S: torch.Tensor,
    ) -> None:
        """Forward of one micro-batch, and backward where it has a gradient."""
        with torch.set_grad_enabled(micro.with_grad):
            logprobs_N, entropy_N = self._policy(micro)
            loss = self._loss(micro, logprobs_N, old_N)
            objective_N = loss.losses_N
            if self._actor.entropy_coeff:
                objective_N = objective_N - self._actor.entropy_coeff * entropy_N
            weighted_N = objective_N * micro.weights_N
            if micro.with_grad:
                weighted_N.sum().backward()
        if micro.counts:
            loss_S.index_add_(0, micro.samples_N, weighted_N.detach())
        tokens.add(micro, loss, logprobs_N, old_N, entropy_N)

    def _loss(self, micro: MicroBatch, logprobs_N: torch.Tensor, old_N: torch.Tensor) -> PolicyLoss:
        """The clipped loss with the configured correction.

        Bypass: the ratio against the rollout's logprobs is itself the importance weight, so the
        ratio is truncated. Decoupled: a weight beside the ratio corrects from rollout to old.
        """
        truncate = self._correction.rollout_is == "token"
        threshold = self._correction.rollout_is_threshold
        bypass = self._correction.mode == "bypass"
        weights_N = None
        if truncate and not bypass:
            weights_N = truncated_importance_weights(
                old_N, micro.rollout_logprobs_N, threshold=threshold
            )
        return clipped_policy_loss(
            logprobs_N,
            old_N,
            micro.advantages_N,
            clip_ratio_low=self._actor.clip_ratio_low,
            clip_ratio_high=self._actor.clip_ratio_high,
            max_ratio=threshold if truncate and bypass else None,
            importance_weights_N=weights_N,
        )

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _zero_grad(self) -> None:
        # Zeros, not None: a mini-batch without any gradient still moves by AdamW's momentum.
        for parameter in self._parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.zero_grad(set_to_none=False)

    def _gradient_norm(self) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        return full(torch.nn.utils.get_total_norm(gradients))

    def _clip(self, norm: torch.Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(self._parameters(), self._actor.grad_clip, norm)

    def _check_finite(
        self, name: str, mini: MiniBatch, loss_S: torch.Tensor, norm: torch.Tensor
    ) -> None:
        """Raise before the optimizer step if the loss or the norm of the gradient is not finite."""
        loss = float(loss_S.sum())
        if torch.isfinite(norm) and torch.isfinite(loss_S).all():
            return
        raise TrainingDivergedError(
            f"{name}: loss {loss}, gradient norm {float(norm)}; "
            f"worst samples (loss): {_worst(mini, loss_S)}"
        )


def _worst(mini: MiniBatch, loss_S: torch.Tensor) -> str:
    """The samples with the largest loss, those without a finite one first."""
    key_S = loss_S.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    order = key_S.argsort(descending=True, stable=True)[:_NUM_WORST].tolist()
    return ", ".join(f"{mini.samples[i].sample_id} ({float(loss_S[i])})" for i in order)
