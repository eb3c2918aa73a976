"""An environment that blocks the process that it runs in."""

import ctypes
import time

import once

from freewheel.rollout import Episode, RewardResult
from freewheel.rollout.environment import SingleTurn


class BlocksItsWorker(SingleTurn):
    """One rollout blocks the loop that runs user code; later one holds the interpreter's lock."""

    async def run(self, episode: Episode) -> RewardResult:
        if episode.sample_id == "2-1":
            time.sleep(60)  # noqa: TID251, ASYNC251 - what is tested
        if episode.sample_id == "16-1" and once.claim("held"):
            ctypes.PyDLL(None).sleep(60)  # in native code, with the interpreter's lock
        return await super().run(episode)
