"""A reward that takes its time, so that a run of the tiny model lasts long enough to be hit."""

import asyncio

from freewheel.rollout.named_rewards import RewardResult, numeric_match


async def score(response: str, ground_truth: str) -> RewardResult:
    """As `numeric_match`, a moment later."""
    await asyncio.sleep(0.3)
    return numeric_match(response, ground_truth)
