"""What a validation says: score over the completed trials, bounds, interval, mean, pass, majority.

Pure functions over the trials' outcomes. A trial that timed out or failed is never counted as a
zero: it is missing, and the bounds say what the score would be if all the missing ones were wrong,
or all right.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from freewheel.types import RolloutOutcome

CORRECT = 0.5
"""A trial with at least this reward counts as solved, for pass@n and majority@n."""

_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of one validation. All None (or empty) if no trial completed."""

    score: float | None
    lower: float | None
    upper: float | None
    ci95: tuple[float, float] | None
    metrics: dict[str, float]


def score_trials(
    done: Mapping[int, Sequence[RolloutOutcome]], *, num_total: int, trials_per_prompt: int
) -> Score:
    """Score the completed trials.

    Args:
        done: completed outcomes by prompt index; prompts without any may be left out.
        num_total: trials that were asked for.
        trials_per_prompt: n.

    Returns:
        The mean reward, its bounds over the missing trials (taking rewards to lie in [0, 1], or in
        the observed range if that is wider), a 95 % interval with prompts as the sampling unit, and
        `mean@n`, `pass@n` and `majority@n` (the last two over prompts whose n trials completed).
    """
    by_prompt = {index: list(outcomes) for index, outcomes in done.items() if outcomes}
    rewards = [_reward(o) for outcomes in by_prompt.values() for o in outcomes]
    if not rewards:
        return Score(score=None, lower=None, upper=None, ci95=None, metrics={})
    mean = fmean(rewards)
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    num_missing = num_total - len(rewards)
    complete = [o for o in by_prompt.values() if len(o) == trials_per_prompt]
    metrics = {f"mean@{trials_per_prompt}": mean}
    if complete:
        metrics[f"pass@{trials_per_prompt}"] = fmean(
            any(_reward(o) >= CORRECT for o in outcomes) for outcomes in complete
        )
        if any(outcome.answer is not None for outcomes in complete for outcome in outcomes):
            metrics[f"majority@{trials_per_prompt}"] = fmean(map(_majority, complete))
    return Score(
        score=mean,
        lower=(sum(rewards) + num_missing * low) / num_total,
        upper=(sum(rewards) + num_missing * high) / num_total,
        ci95=_interval([[_reward(o) for o in outcomes] for outcomes in by_prompt.values()]),
        metrics=metrics,
    )


def _reward(outcome: RolloutOutcome) -> float:
    return 0.0 if outcome.reward is None else outcome.reward


def _majority(outcomes: Sequence[RolloutOutcome]) -> float:
    """Expected correctness of the commonest answer, ties drawn at random."""
    votes = Counter(outcome.answer for outcome in outcomes)
    top = max(votes.values())
    winners = [answer for answer, num in votes.items() if num == top]
    correct = {o.answer for o in outcomes if _reward(o) >= CORRECT}
    return fmean(winner in correct for winner in winners)


def _interval(rewards: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the mean reward; trials of one prompt are not independent.

    The variance of the mean is that of a ratio estimator over clusters (Cochran, Sampling
    Techniques, 3rd ed., eq. 6.13). For rewards in [0, 1] it is turned into Wilson's score interval
    (Wilson 1927) with the effective sample size p(1-p)/variance, which does not collapse when all
    prompts score alike; for other rewards the normal interval is taken.
    """
    num_trials = sum(map(len, rewards))
    mean = sum(map(sum, rewards)) / num_trials
    num_prompts = len(rewards)
    residuals = [sum(row) - mean * len(row) for row in rewards]
    squares = variance(residuals, 0.0) if num_prompts > 1 else 0.0
    variance_of_mean = squares * num_prompts / num_trials**2
    if not all(0.0 <= reward <= 1.0 for row in rewards for reward in row):
        half = _Z95 * math.sqrt(variance_of_mean)
        return mean - half, mean + half
    spread = mean * (1 - mean)
    effective = spread / variance_of_mean if variance_of_mean > 0 and spread > 0 else num_prompts
    effective = min(effective, num_trials)
    centre = (mean + _Z95**2 / (2 * effective)) / (1 + _Z95**2 / effective)
    half = (
        _Z95
        / (1 + _Z95**2 / effective)
        * math.sqrt(spread / effective + _Z95**2 / (4 * effective**2))
    )
    return max(0.0, centre - half), min(1.0, centre + half)
