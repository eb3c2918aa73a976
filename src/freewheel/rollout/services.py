"""What the rollouts of one worker share, and what the members of one group share."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from freewheel.data.records import PromptRecord
from freewheel.rollout.environment import EnvironmentType
from freewheel.rollout.render import Renderer, Tokens
from freewheel.rollout.rewards import Reward
from freewheel.rollout.usercode import UserCode

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the rollouts of one worker share. The renderer is used in its own thread only."""

    renderer: Renderer
    renderer_thread: concurrent.futures.Executor
    environment: EnvironmentType
    reward: Reward
    reward_timeout_s: float
    tool_timeout_s: float
    user_code: UserCode

    async def render(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the renderer in its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.renderer_thread, lambda: function(*args, **kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrompt:
    """The prompt of a group: its record, and its tokens, int32 (T,)."""

    record: PromptRecord
    token_ids: Tokens
