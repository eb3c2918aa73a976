"""Metrics of one trainer step that the control plane knows by itself: no tokens needed."""

from collections.abc import Sequence
from statistics import fmean

from freewheel.control.ledger import Group


def group_metrics(groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """Reward, staleness and partial rollouts of the groups that a step trained on.

    Lengths and advantages are the trainer's to tell: it has the tokens.

    Args:
        groups: the groups, all ready.
        version: the trainer's policy version in the step.
    """
    outcomes = [outcome for group in groups for outcome in group.finished]
    staleness = [version - outcome.min_version for outcome in outcomes]
    spans = [outcome.max_version - outcome.min_version for outcome in outcomes]
    num_trainable = sum(len({o.reward for o in group.finished}) > 1 for group in groups)
    return {
        "critic/rewards/mean": fmean(outcome.reward or 0.0 for outcome in outcomes),
        "fully_async/staleness/mean": fmean(staleness),
        "fully_async/staleness/max": max(staleness),
        "fully_async/partial/total_partial_num": sum(span > 0 for span in spans),
        "fully_async/partial/partial_ratio": fmean(span > 0 for span in spans),
        "fully_async/partial/max_partial_span": max(spans),
        "fully_async/groups_with_gradient_ratio": num_trainable / len(groups),
        "fully_async/failed_in_trained_groups": sum(
            outcome.failure is not None for group in groups for outcome in group.outcomes.values()
        ),
        "timing_s/rollout_gen_mean": fmean(outcome.gen_s for outcome in outcomes),
        "timing_s/rollout_gen_max": max(outcome.gen_s for outcome in outcomes),
        "timing_s/reward_mean": fmean(outcome.reward_s for outcome in outcomes),
    }
