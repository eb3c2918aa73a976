"""Scores, bounds and intervals of validations, by hand and against a brute-force simulation."""

import random

import pytest

from freewheel.control.validation_score import score_trials
from freewheel.types import RolloutOutcome


def trials(*rewards, answers=None):
    answers = answers or [None] * len(rewards)
    return [
        RolloutOutcome(sample_id=f"v-{i}", attempt=1, reward=reward, answer=answer)
        for i, (reward, answer) in enumerate(zip(rewards, answers, strict=True))
    ]


def test_all_done():
    score = score_trials({0: trials(1, 0), 1: trials(1, 1)}, num_total=4, trials_per_prompt=2)
    assert score.score == score.lower == score.upper == 0.75
    assert score.metrics == {"mean@2": 0.75, "pass@2": 1.0}


def test_missing_trials_are_not_zeros_but_widen_the_bounds():
    score = score_trials({0: trials(1, 0), 1: trials(1)}, num_total=4, trials_per_prompt=2)
    assert score.score == pytest.approx(2 / 3)
    assert (score.lower, score.upper) == (0.5, 0.75)
    assert score.metrics == {"mean@2": pytest.approx(2 / 3), "pass@2": 1.0}


def test_nothing_done_has_no_score():
    score = score_trials({}, num_total=4, trials_per_prompt=2)
    assert score.score is score.lower is score.upper is score.ci95 is None
    assert score.metrics == {}


def test_majority_vote_with_a_tie_counts_half():
    done = {
        0: trials(1, 1, 0, answers=["4", "4", "5"]),
        1: trials(0, 0, 1, answers=["7", "7", "8"]),
        2: trials(1, 0, 0, answers=["1", "2", "3"]),
    }
    score = score_trials(done, num_total=9, trials_per_prompt=3)
    assert score.metrics["majority@3"] == pytest.approx((1 + 0 + 1 / 3) / 3)


def test_rewards_outside_the_unit_interval_widen_the_bounds():
    score = score_trials({0: trials(-1.0, 2.0)}, num_total=3, trials_per_prompt=3)
    assert (score.lower, score.upper) == (0.0, 1.0)
    assert score.score == 0.5


def test_the_interval_does_not_collapse_when_all_agree():
    score = score_trials({i: trials(1, 1) for i in range(16)}, num_total=32, trials_per_prompt=2)
    low, high = score.ci95
    assert 0.75 < low < 0.9
    assert high == 1.0


@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_the_interval_covers_the_truth_in_about_95_of_100_cases(spread):
    """Prompts differ in difficulty by `spread`; trials of one prompt are correlated by it."""
    rng = random.Random(5)
    covered = 0
    for _ in range(400):
        done = {}
        for prompt in range(40):
            chance = 0.5 + rng.choice([-spread, spread])
            done[prompt] = trials(*(float(rng.random() < chance) for _ in range(4)))
        low, high = score_trials(done, num_total=160, trials_per_prompt=4).ci95
        covered += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.985
