"""A replica as a rollout worker sees it: calls go from actor to actor, never through the driver."""

from collections.abc import Sequence

from freewheel.backends.ray.translate import Handle, await_answer
from freewheel.errors import ReplicaLostError
from freewheel.types import Generation, GenerationRequest


class RayGenerator:
    """Protocol `Generator` over the handle of a `ReplicaActor`."""

    def __init__(self, handle: Handle, name: str) -> None:
        self._handle = handle
        self._name = name

    async def generate(
        self, requests: Sequence[GenerationRequest], *, timeout_s: float
    ) -> list[Generation]:
        """Sample a response for each request, in order; at the limit what there is comes back.

        Cancelling cancels the requests in the engine.
        """
        ref = self._handle.generate.remote(list(requests), timeout_s)
        return await await_answer(ref, lost=ReplicaLostError, who=f"{self._name}: generate")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; each comes back with what it has. Unknown ids are ignored."""
        ref = self._handle.abort.remote(list(request_ids))
        await await_answer(ref, lost=ReplicaLostError, who=f"{self._name}: abort")
