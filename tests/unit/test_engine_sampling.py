"""Sampling alone: frequencies, filters, the generator of uniform numbers."""

import numpy as np
import pytest
import torch

from freewheel.engine.request import Request
from freewheel.engine.sampling import sample, uniforms
from tests.unit.engine_models import _distribution, request


def _requests(count, **sampling):
    return [Request.of(request(str(i), [5], **({"seed": i} | sampling))) for i in range(count)]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.6},
        {"top_p": 0.7},
        {"top_k": 3},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.4},
        # The order of the filters matters: here top-p first would keep one token more.
        {"top_p": 0.8, "min_p": 0.3},
    ],
)
def test_frequencies_follow_the_distribution(sampling):
    count = 20000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.2])
    requests = _requests(count, **sampling)
    drawn = sample(logits.repeat(count, 1), requests)
    expected = _distribution(logits.double(), requests[0].sampling).exp().numpy()
    found = np.bincount(drawn.token_ids, minlength=8) / count
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / count)
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    np.testing.assert_allclose(drawn.logprobs, np.log(expected[drawn.token_ids]), atol=1e-5)


def test_top_p_over_a_large_vocabulary_equals_a_full_sort():
    generator = torch.Generator().manual_seed(1)
    flat = torch.rand(4, 5000, generator=generator)
    peaked = torch.randn(4, 5000, generator=generator) * 4
    for logits in (flat, peaked):
        requests = _requests(4, top_p=0.95)
        drawn = sample(logits.clone(), requests)
        for row, token, logprob in zip(logits, drawn.token_ids, drawn.logprobs, strict=True):
            expected = _distribution(row.double(), requests[0].sampling)
            assert abs(float(expected[token]) - logprob) < 1e-4


def test_rows_may_have_parameters_of_their_own():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    kinds = [{}, {"temperature": 0.0}, {"top_k": 1}, {}, {"temperature": 0.5}, {"top_k": 1}]
    requests = [
        Request.of(request(str(i), [5], **({"seed": i} | kind))) for i, kind in enumerate(kinds)
    ]
    together = sample(logits.clone(), requests)
    for i, item in enumerate(requests):
        alone = sample(logits[i : i + 1].clone(), [item])
        assert alone.token_ids == together.token_ids[i : i + 1]
        assert alone.logprobs == pytest.approx(together.logprobs[i : i + 1])
    best = logits.argmax(-1).tolist()
    assert [together.token_ids[i] for i in (1, 2, 5)] == [best[i] for i in (1, 2, 5)]
    assert together.logprobs[2] == 0.0


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1000, 4), -torch.inf)
    logits[:, 1] = 0.0
    assert set(sample(logits, _requests(1000)).token_ids) == {1}


def test_uniform_numbers_depend_on_seed_and_position_and_are_uniform():
    numbers = uniforms(range(200), range(200))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert uniforms([3], [5])[0] == uniforms([9, 3], [5, 5])[1]
    assert uniforms([3], [5])[0] != uniforms([3], [6])[0]
    assert uniforms([-1], [5])[0] == uniforms([2**64 - 1], [5])[0]
    grid = np.concatenate([uniforms([seed] * 500, range(500)) for seed in range(40)])
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    expected = len(grid) / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    by_seed = grid.reshape(40, 500)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.03


def test_a_block_wise_draw_equals_a_running_sum():
    generator = torch.Generator().manual_seed(3)
    for vocab_size in (512, 5000, 49152):
        logits = torch.randn(64, vocab_size, generator=generator) * 3
        logits[:, -1] = -torch.inf
        requests = _requests(64)
        drawn = sample(logits.clone(), requests)
        sums = logits.double().softmax(-1).cumsum(-1)
        draws = uniforms([r.seed for r in requests], [r.length for r in requests])
        for row, token, draw in zip(sums, drawn.token_ids, draws, strict=True):
            before = float(row[token - 1]) if token else 0.0
            assert before - 1e-6 <= draw <= float(row[token]) + 1e-6


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((2000, 1030), -torch.inf)
    logits[:, 700:703] = 0.0
    tokens = sample(logits, _requests(2000)).token_ids
    assert set(tokens) == {700, 701, 702}
