"""Which requests a replica's engine has, by the group that they belong to.

The id of a request begins with that of its group's request. A group that was given up, because its
rollout worker is gone, gets no more: what the worker sent before its end may still arrive.
"""

import contextlib
from collections.abc import Iterator, Sequence

from freewheel.errors import FailureClass, RolloutError
from freewheel.types import GenerationRequest


class RequestsInFlight:
    """See the module's docstring. Used on the actor's loop only."""

    def __init__(self) -> None:
        self._running: set[str] = set()
        self._given_up: set[str] = set()

    @contextlib.contextmanager
    def running(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        """Count requests in for as long as the engine has them.

        Raises:
            RolloutError: their group was given up.
        """
        request_ids = [request.request_id for request in requests]
        for request_id in request_ids:
            if _group(request_id) in self._given_up:
                raise RolloutError(
                    FailureClass.LOST_WORKER, f"request {request_id}: its group was given up"
                )
        self._running.update(request_ids)
        try:
            yield
        finally:
            self._running.difference_update(request_ids)

    def give_up(self, group: str) -> list[str]:
        """Take no more requests of a group; returns those that the engine still has."""
        self._given_up.add(group)
        return sorted(name for name in self._running if _group(name) == group)


def _group(request_id: str) -> str:
    return request_id.partition("/")[0]
