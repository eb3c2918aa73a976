"""An environment that hangs, or calls a reward or tools that never return, in one group each."""

import asyncio
import contextlib
import threading

from freewheel.rollout import Episode, RewardResult
from freewheel.rollout.environment import SingleTurn
from freewheel.rollout.named_rewards import numeric_match

HANG = "for ever "


def score(response, ground_truth):
    """A reward that never returns for what begins with `for ever`."""
    if response.startswith(HANG):
        threading.Event().wait()
    return numeric_match(response, ground_truth)


async def ask_a_server() -> str:
    """An async tool whose server never answers."""
    await asyncio.Event().wait()
    return ""


def ask_a_program() -> str:
    """A sync tool that never returns."""
    threading.Event().wait()
    return ""


class Hangs(SingleTurn):
    """One rollout each of the groups 2 to 4 calls what never returns; all of group 5 hang.

    One of group 14 swallows every cancellation.
    """

    async def run(self, episode: Episode) -> RewardResult:
        if episode.sample_id == "2-1":
            return await episode.reward(HANG + (await episode.generate()).text)
        if episode.sample_id == "3-1":
            await episode.call_tool(ask_a_server)
        if episode.sample_id == "4-1":
            await episode.call_tool(ask_a_program)
        if episode.sample_id.startswith("5-"):
            await asyncio.Event().wait()
        while episode.sample_id == "14-1":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        return await super().run(episode)
