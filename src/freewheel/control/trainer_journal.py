"""What a trainer learned since a checkpoint: batches, kept to be trained again if it is lost."""

from collections import deque
from collections.abc import Iterator

from freewheel.types import TrainRequest

_BYTES_PER_TOKEN = 20
"""What a token takes in a trajectory: id, log-probability, mask and version."""


class TrainJournal:
    """Batches in the order in which they were trained, within a bound; the oldest are forgotten.

    Attributes:
        begins_after: the step from which the batches in it lead on without a gap.

    Args:
        max_bytes: of the trajectories that its batches refer to.
    """

    def __init__(self, max_bytes: int) -> None:
        self.begins_after = 0
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._requests: deque[TrainRequest] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TrainRequest]:
        return iter(list(self._requests))

    def begin(self, step: int) -> None:
        """Note the step that a trainer started from."""
        self.begins_after = step

    def add(self, request: TrainRequest) -> None:
        """Remember a batch that was trained."""
        self._requests.append(request)
        self._num_bytes += request.num_tokens * _BYTES_PER_TOKEN
        while self._num_bytes > self._max_bytes:
            self._forget_oldest()

    def forget(self, step: int) -> None:
        """Let go of the batches up to a step: a checkpoint holds what they taught."""
        while self._requests and self._requests[0].step <= step:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self._requests.popleft()
        self._num_bytes -= oldest.num_tokens * _BYTES_PER_TOKEN
        self.begins_after = oldest.step
