"""What runs inside a rollout worker process: rendering, environments, rewards, and user code.

The names here are those that a user's environments and rewards are written with.
"""

from freewheel.errors import ToolTimeoutError as ToolTimeoutError
from freewheel.rollout.environment import Environment as Environment
from freewheel.rollout.environment import Episode as Episode
from freewheel.rollout.environment import SyncEpisode as SyncEpisode
from freewheel.rollout.environment import Turn as Turn
from freewheel.rollout.named_rewards import RewardResult as RewardResult

__all__ = ["Environment", "Episode", "RewardResult", "SyncEpisode", "ToolTimeoutError", "Turn"]
