"""Advantages and losses: cases worked by hand, and a float64 reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.trainer.losses import (
    clipped_policy_loss,
    group_advantages,
    selected_logprobs_and_entropy,
    sequence_weights,
    truncated_importance_weights,
)

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def test_advantages_by_hand() -> None:
    # Mean 1, sample variance ((1 + 0 + 1) / 2) = 1.
    normalized = group_advantages([0.0, 1.0, 2.0], normalize_by_std=True, eps=0.0)
    assert normalized.tolist() == [-1.0, 0.0, 1.0]
    assert group_advantages([0.0, 0.0, 3.0], normalize_by_std=False).tolist() == [-1, -1, 2]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.0], [], [1e9, 1e9]])
def test_equal_rewards_give_exactly_zero(rewards: list[float], normalize: bool) -> None:
    # 0.1 has a mean that differs from it in the last bit, which the deviation would blow up.
    advantages = group_advantages(rewards, normalize_by_std=normalize)
    assert advantages.tolist() == [0.0] * len(rewards)


def test_sequence_weights_by_hand() -> None:
    lengths = [1, 3, 0]
    assert sequence_weights(lengths, "token-mean").tolist() == [0.25, 0.25, 0.25]
    # The sequence without a sampled token does not count.
    assert sequence_weights(lengths, "seq-mean-token-sum").tolist() == [0.5, 0.5, 0.5]
    assert sequence_weights(lengths, "seq-mean-token-mean")[:2].tolist() == [0.5, 1 / 6]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_aggregation_is_the_textbook_mean_however_it_is_cut(
    lengths: list[int], cut: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    losses = [random.normal(size=length) for length in lengths]
    expected = {
        "token-mean": np.concatenate(losses).mean(),
        "seq-mean-token-sum": np.mean([values.sum() for values in losses]),
        "seq-mean-token-mean": np.mean([values.mean() for values in losses]),
    }
    for mode in MODES:
        weights = sequence_weights(lengths, mode)
        terms = [weight * values.sum() for weight, values in zip(weights, losses, strict=True)]
        assert sum(terms[:cut]) + sum(terms[cut:]) == pytest.approx(expected[mode])


def test_clipped_loss_by_hand() -> None:
    """Low 0.2, high 0.3, ratios truncated at 2: each row is one case of the definition."""
    cases = [
        # advantage, ratio, loss, gradient by logprob, clipped, bounded
        (1.0, 1.0, -1.0, -1.0, False, False),
        (1.0, 1.2, -1.2, -1.2, False, False),
        (1.0, 1.5, -1.3, 0.0, True, False),
        (1.0, 0.5, -0.5, -0.5, False, False),
        (-1.0, 0.9, 0.9, 0.9, False, False),
        (-1.0, 0.5, 0.8, 0.0, True, False),
        (-1.0, 1.6, 1.6, 1.6, False, False),
        (-2.0, 5.0, 4.0, 0.0, False, True),
        (1.0, 5.0, -1.3, 0.0, True, False),
    ]
    advantages, ratios, losses, gradients, clipped, bounded = (
        torch.tensor(column) for column in zip(*cases, strict=True)
    )
    old = torch.full_like(ratios, -1.0)
    logprobs = (old + ratios.log()).requires_grad_()
    result = clipped_policy_loss(
        logprobs, old, advantages, clip_ratio_low=0.2, clip_ratio_high=0.3, max_ratio=2.0
    )
    result.losses_N.sum().backward()
    torch.testing.assert_close(result.losses_N.detach(), losses)
    torch.testing.assert_close(logprobs.grad, gradients)
    assert result.clipped_N.tolist() == clipped.tolist()
    assert result.bounded_N.tolist() == bounded.tolist()


def reference_loss(
    logprob: float, old: float, advantage: float, low: float, high: float, limit: float
) -> float:
    ratio = min(math.exp(logprob - old), limit)
    clipped = min(max(ratio, 1 - low), 1 + high)
    return max(-advantage * ratio, -advantage * clipped)


def test_loss_and_gradient_agree_with_a_float64_reference() -> None:
    random = np.random.default_rng(0)
    logprobs, old = -5 * random.random((2, 500))
    advantages = random.normal(size=500)
    arguments = (0.2, 0.28, 3.0)
    step = 1e-6
    expected, slopes = [], []
    for values in zip(logprobs, old, advantages, strict=True):
        expected.append(reference_loss(*values, *arguments))
        above, below = (
            reference_loss(values[0] + delta, *values[1:], *arguments) for delta in (step, -step)
        )
        slopes.append((above - below) / (2 * step))
    leaf = torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    result = clipped_policy_loss(
        leaf,
        torch.tensor(old, dtype=torch.float32),
        torch.tensor(advantages, dtype=torch.float32),
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        max_ratio=3.0,
    )
    result.losses_N.sum().backward()
    np.testing.assert_allclose(result.losses_N.detach(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(leaf.grad, slopes, rtol=1e-4, atol=1e-5)


def test_extreme_ratios_keep_loss_and_gradient_finite() -> None:
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, 0.0])
    result = clipped_policy_loss(
        logprobs,
        old,
        torch.tensor([-1.0, -1.0]),
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        max_ratio=2.0,
    )
    result.losses_N.sum().backward()
    assert result.losses_N.tolist() == pytest.approx([2.0, 0.8])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_importance_weights_are_truncated_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -3.0, -1.0])
    weights = truncated_importance_weights(old, rollout, threshold=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-2)])
    assert not weights.requires_grad


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_logprobs_and_entropy_agree_with_float64(entropy_grad: bool) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(20, 7)).requires_grad_()
    targets = torch.randint(0, 7, (20,))
    logprobs, entropy = selected_logprobs_and_entropy(logits, targets, entropy_grad=entropy_grad)
    exact = logits.detach().double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=exact)
    torch.testing.assert_close(logprobs.double(), distribution.log_prob(targets), check_dtype=False)
    torch.testing.assert_close(entropy.double(), distribution.entropy())
    share = 1.0 if entropy_grad else 0.0
    (logprobs + (entropy if entropy_grad else 0)).sum().backward()
    (distribution.log_prob(targets) + share * distribution.entropy()).sum().backward()
    torch.testing.assert_close(logits.grad, exact.grad.float())
    assert entropy.requires_grad is entropy_grad


def test_excluded_tokens_add_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    _, entropy = selected_logprobs_and_entropy(logits, torch.tensor([0]), entropy_grad=False)
    assert entropy.item() == pytest.approx(math.log(2))
