"""An environment whose held-out trial on one prompt never returns."""

import asyncio

from freewheel.rollout.environment import Episode, SingleTurn
from freewheel.rollout.rewards import RewardResult
from freewheel.types import Purpose


class HangsInValidation(SingleTurn):
    """As the built-in single turn, but one prompt of the held-out ones hangs for ever."""

    async def run(self, episode: Episode) -> RewardResult:
        is_prompt_3 = episode.sample_id.split("-")[1] == "3"
        if episode.purpose is Purpose.VALIDATION and is_prompt_3:
            await asyncio.Event().wait()
        return await super().run(episode)
