"""The run's allowance of replacements for lost workers."""

from freewheel.errors import LostError
from freewheel.protocols import Recorder


class Restarts:
    """Counts replacements of replicas and rollout workers; past the limit the run ends."""

    def __init__(self, limit: int, recorder: Recorder) -> None:
        self._limit = limit
        self._recorder = recorder
        self.count = 0

    def spend(self, who: str, cause: LostError) -> None:
        """Allow one more replacement.

        Raises:
            LostError: the cause, when `health.max_restarts` are spent.
        """
        self.count += 1
        allowed = self.count <= self._limit
        self._recorder.event(
            "worker_lost", worker=who, cause=str(cause), restarts=self.count, replaced=allowed
        )
        if not allowed:
            raise type(cause)(
                f"{cause} (replaced {self._limit} workers before: health.max_restarts)"
            ) from cause
