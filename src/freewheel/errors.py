"""Every error that Freewheel raises, in one tree, with the exit code of each that can end a run.

::

    FreewheelError                      exit code 1
    ├── ConfigError                     2   bad input, found before any process starts
    ├── StartupError                    3   a worker could not be placed or did not come up
    ├── StalledError                    4   a stage made no progress within its limit
    ├── LostError                       5   a worker died and could not be replaced
    │   ├── ReplicaLostError
    │   ├── RolloutWorkerLostError
    │   ├── TrainerLostError
    │   │   └── TrainerStateLostError
    │   ├── TrajectoriesLostError
    │   └── WeightsLostError
    ├── TrainingDivergedError           6   loss or gradient is not finite
    ├── CheckpointError                 7   a checkpoint could not be written or read
    ├── InvariantError                  8   our own bug: the books do not add up
    ├── DataError                       9   the data cannot be read, or no usable prompt is left
    ├── LoopEndedError                 10   a loop of the controller ended before the run did
    ├── RecordError                    11   the run's records cannot be written or read
    ├── NoScoreError                   12   `freewheel validate` scored no trial
    ├── EngineMismatchError            13   engine and trainer disagree on the same weights
    └── RolloutError                    -   one rollout failed: data, never the end of a run
        └── ToolTimeoutError

130 and 143 are the shell's codes for SIGINT and SIGTERM.
"""

from enum import StrEnum
from typing import ClassVar

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class FailureClass(StrEnum):
    """Why a rollout failed. Classes are kept apart: each has its own bound on retries."""

    TIMEOUT = "timeout"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    OVER_LONG_PROMPT = "over_long_prompt"
    BAD_PROMPT = "bad_prompt"
    ENGINE = "engine"
    LOST_WORKER = "lost_worker"
    LOST_REPLICA = "lost_replica"
    WRONG_VERSION = "wrong_version"
    GROUP = "group"


class FreewheelError(Exception):
    """Base of all errors that Freewheel raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(FreewheelError):
    """A configuration, an argument or an input file is wrong; nothing was started."""

    exit_code = 2


class StartupError(FreewheelError):
    """A worker could not be placed or did not come up within `health.startup_timeout_s`."""

    exit_code = 3


class StalledError(FreewheelError):
    """A stage made no progress within its limit."""

    exit_code = 4


class LostError(FreewheelError):
    """A worker process is gone, or no longer answers."""

    exit_code = 5


class ReplicaLostError(LostError):
    """An inference replica is gone; its leases are run again elsewhere."""


class RolloutWorkerLostError(LostError):
    """A rollout worker is gone; its groups are run again elsewhere."""


class TrainerLostError(LostError):
    """The trainer is gone."""


class TrainerStateLostError(TrainerLostError):
    """The trainer is gone, and what would bring it back to where it was; a checkpoint is left."""


class TrajectoriesLostError(LostError):
    """Trajectories went down with the process or node that held them; their groups run again.

    Args:
        positions: which of the payloads that were asked for.
        message: what happened.
    """

    def __init__(self, positions: tuple[int, ...], message: str) -> None:
        super().__init__(message)
        self.positions = positions

    def __reduce__(self) -> tuple[type["TrajectoriesLostError"], tuple[tuple[int, ...], str]]:
        """Both arguments: by default only an exception's message goes to another process."""
        return type(self), (self.positions, str(self))


class WeightsLostError(LostError):
    """Published weights went down with the node that held them.

    Args:
        message: what happened.
        versions: which of the versions that were asked for; none named: all of them.
    """

    def __init__(self, message: str, versions: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.versions = versions

    def __reduce__(self) -> tuple[type["WeightsLostError"], tuple[str, tuple[int, ...]]]:
        """Both arguments: by default only an exception's message goes to another process."""
        return type(self), (str(self), self.versions)


class TrainingDivergedError(FreewheelError):
    """The loss or the gradient is not finite."""

    exit_code = 6


class CheckpointError(FreewheelError):
    """A checkpoint could not be written, verified or read."""

    exit_code = 7


class InvariantError(FreewheelError):
    """The books do not add up. Always a bug of Freewheel."""

    exit_code = 8


class DataError(FreewheelError):
    """The data cannot be read, or holds no usable prompt."""

    exit_code = 9


class LoopEndedError(FreewheelError):
    """A loop of the controller returned before shutdown began."""

    exit_code = 10


class RecordError(FreewheelError):
    """The files of the run folder, or what a logger keeps, cannot be written or read."""

    exit_code = 11


class NoScoreError(FreewheelError):
    """A validation by hand has no score: not one of its trials completed."""

    exit_code = 12


class EngineMismatchError(FreewheelError):
    """Logprobs of engine and trainer differ by more than `health.max_logprob_difference`."""

    exit_code = 13


class RolloutError(FreewheelError):
    """One rollout failed. It is recorded with its class and never ends the run.

    Args:
        failure: the class of the failure.
        message: what happened, with ids and values.
    """

    def __init__(self, failure: FailureClass, message: str) -> None:
        super().__init__(message)
        self.failure = failure

    def __reduce__(self) -> tuple[type["RolloutError"], tuple[FailureClass, str]]:
        """Both arguments: by default only an exception's message goes to another process."""
        return type(self), (self.failure, str(self))


class ToolTimeoutError(RolloutError):
    """A tool did not return in time. The environment may catch it, and tell the model."""
