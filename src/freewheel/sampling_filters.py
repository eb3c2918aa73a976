"""Top-k, top-p and min-p: which tokens may be sampled. Shared by the engine and the trainer.

The engine records the log-probability of a token under the distribution that it was drawn from,
filters included; for importance ratios to be right the trainer's distribution needs the same ones.

Shapes: N rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch

_NUM_CANDIDATES = 1024
"""Top-p looks at so many likeliest tokens first; sorting a whole vocabulary costs far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of one sampling distribution, after temperature; none by default."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def any(self) -> bool:
        """Whether they may remove a token."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def apply_(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Min-p, top-k, then top-p over what they leave: removed tokens become -inf.

        The order is vLLM's, so that the trainer's distribution is that of either engine.

        Args:
            logits_NV: float32 (N, V), divided by the temperature; may be overwritten.
        """
        if self.min_p > 0:
            floor_N1 = logits_NV.amax(dim=-1, keepdim=True) + math.log(self.min_p)
            logits_NV = logits_NV.masked_fill_(logits_NV < floor_N1, -torch.inf)
        if 0 < self.top_k < logits_NV.shape[1]:
            kth_N1 = logits_NV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_NV = logits_NV.masked_fill_(logits_NV < kth_N1, -torch.inf)
        if self.top_p < 1:
            logits_NV = _filter_top_p(logits_NV, self.top_p)
        return logits_NV

    def apply_but_to(self, targets_N: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
        """As `apply_`, with gradient, and the targets are never removed.

        A token that was sampled under older weights may lie outside of what the filters leave now;
        removing it would make its ratio 0 and its logarithm infinite.

        Args:
            targets_N: int64 (N,).
            logits_NV: float32 (N, V), divided by the temperature; not changed.
        """
        with torch.no_grad():
            removed_NV = self.apply_(logits_NV.detach().clone()) == -torch.inf
            removed_NV.scatter_(1, targets_N.unsqueeze(1), value=False)
        return logits_NV.masked_fill(removed_NV, -torch.inf)


NO_FILTERS = Filters()


def _filter_top_p(logits_NV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens whose probability reaches `top_p`.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, section 3.1.
    """
    total_N1 = torch.logsumexp(logits_NV, dim=-1, keepdim=True)
    count = min(_NUM_CANDIDATES, logits_NV.shape[1])
    top_NK, index_NK = logits_NV.topk(count, dim=-1)
    probs_NK = (top_NK - total_N1).exp()
    if count < logits_NV.shape[1] and bool((probs_NK.sum(dim=-1) < top_p).any()):
        top_NK, index_NK = logits_NV.sort(dim=-1, descending=True)
        probs_NK = (top_NK - total_N1).exp()
    before_NK = probs_NK.cumsum(dim=-1) - probs_NK
    kept_NK = top_NK.masked_fill(before_NK >= top_p, -torch.inf)
    return torch.full_like(logits_NV, -torch.inf).scatter_(1, index_NK, kept_NK)
