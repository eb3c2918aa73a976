"""Environments that misbehave in training."""

import asyncio
import contextlib
import ctypes
import os
import time
from pathlib import Path

from freewheel.rollout import Episode, RewardResult
from freewheel.rollout.environment import SingleTurn


class Hangs(SingleTurn):
    """One rollout of the third group never returns, one of the 15th swallows every cancellation."""

    async def run(self, episode: Episode) -> RewardResult:
        if episode.sample_id == "2-1":
            await asyncio.Event().wait()
        while episode.sample_id == "14-1":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        return await super().run(episode)


class SleepsOnTheLoop(SingleTurn):
    """One rollout of the third group blocks the loop that runs user code."""

    async def run(self, episode: Episode) -> RewardResult:
        if episode.sample_id == "2-1":
            time.sleep(60)  # noqa: TID251, ASYNC251 - what is tested
        return await super().run(episode)


class HoldsTheLock(SingleTurn):
    """One rollout of the third group holds the interpreter's lock in native code, the first time.

    The file that `BLOCKED_ONCE` names remembers that it did.
    """

    async def run(self, episode: Episode) -> RewardResult:
        if episode.sample_id == "2-1":
            _hold_the_lock_once(Path(os.environ["BLOCKED_ONCE"]))
        return await super().run(episode)


def _hold_the_lock_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        ctypes.PyDLL(None).sleep(60)
