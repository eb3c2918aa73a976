"""Sends the requests of a group's members to the engine, and aborts those that nobody waits for.

A call returns when the last of its requests is done. Members that may have something to do before
that, such as a tool or another turn, have calls of their own: no one waits for another's turn. They
go out in the same turn of the loop, and the engine computes a prompt once for all that wait with
it. Where a member's only turn is its last, equal prompts share a call, which costs less.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from freewheel.errors import (
    ConfigError,
    FailureClass,
    FreewheelError,
    ReplicaLostError,
    RolloutError,
)
from freewheel.protocols import Generator
from freewheel.types import Generation, GenerationRequest

ABORT_TIMEOUT_S = 2.0
"""Longest wait for an engine to confirm that requests have ended."""


@dataclass(slots=True)
class _Batch:
    requests: list[GenerationRequest] = field(default_factory=list[GenerationRequest])
    futures: list[asyncio.Future[Generation]] = field(
        default_factory=list[asyncio.Future[Generation]]
    )

    def live(self) -> "_Batch":
        """Without the requests that were cancelled meanwhile."""
        batch = _Batch()
        for request, future in zip(self.requests, self.futures, strict=True):
            if not future.done():
                batch.requests.append(request)
                batch.futures.append(future)
        return batch

    def succeed(self, results: list[Generation]) -> None:
        for future, result in zip(self.futures, results, strict=True):
            if not future.done():
                future.set_result(result)

    def fail(self, error: Exception) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class BatchingGenerator:
    """The engine as the members of one group see it.

    Args:
        generator: the replica.
        tasks: group of tasks that owns the calls; they never raise into it.
        generate_until: loop time at which the engine is to return what it has. An engine that does
            not is given up by the requests' own deadlines, and `close`.
        single_turn: the members take one turn each; those with equal prompts share a call.
    """

    def __init__(
        self,
        generator: Generator,
        tasks: asyncio.TaskGroup,
        *,
        generate_until: float,
        single_turn: bool,
    ) -> None:
        self._generator = generator
        self._tasks = tasks
        self._generate_until = generate_until
        self._single_turn = single_turn
        self._loop = asyncio.get_running_loop()
        self._pending: dict[bytes | str, _Batch] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._in_flight: set[str] = set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a response; cancelling it aborts the request in the engine.

        Raises:
            RolloutError: the engine refused or failed (its class, or `engine`).
            ReplicaLostError: the replica's process is gone.
        """
        future: asyncio.Future[Generation] = self._loop.create_future()
        if not self._pending:
            self._loop.call_soon(self._flush)
        shared = request.prompt_token_ids.tobytes() if self._single_turn else request.request_id
        batch = self._pending.setdefault(shared, _Batch())
        batch.requests.append(request)
        batch.futures.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            self._abort_soon(request.request_id)
            raise

    def close(self) -> None:
        """Cancel, and abort in the engine, what nobody waits for any more."""
        for call in self._calls:
            call.cancel()

    def _flush(self) -> None:
        batches, self._pending = self._pending, {}
        for batch in batches.values():
            live = batch.live()
            if not live.requests:
                continue
            name = f"generate {live.requests[0].request_id}"
            call = self._tasks.create_task(self._run(live), name=name)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _run(self, batch: _Batch) -> None:
        """One call. Its result, or its failure, is every request's; it raises nothing itself."""
        try:
            results = await self._call(batch.requests)
        except (RolloutError, ReplicaLostError) as error:
            batch.fail(error)
        except ConfigError as error:  # what was asked for cannot be sampled
            batch.fail(RolloutError(FailureClass.ENVIRONMENT, str(error)))
        except Exception as error:  # noqa: BLE001  # boundary: it fails the requests
            batch.fail(RolloutError(FailureClass.ENGINE, f"{type(error).__name__}: {error}"))
        else:
            batch.succeed(results)

    async def _call(self, requests: list[GenerationRequest]) -> list[Generation]:
        request_ids = [request.request_id for request in requests]
        timeout_s = max(self._generate_until - self._loop.time(), 0.001)
        self._in_flight.update(request_ids)
        try:
            results = await self._generator.generate(requests, timeout_s=timeout_s)
        except ReplicaLostError:
            raise
        except BaseException:  # cancelled, too: what nobody waits for must not run on
            await self._abort(request_ids)
            raise
        finally:
            self._in_flight.difference_update(request_ids)
        found = [result.request_id for result in results]
        if found != request_ids:
            raise RolloutError(
                FailureClass.ENGINE,
                f"the engine answered requests {found}, sent were {request_ids}",
            )
        return results

    def _abort_soon(self, request_id: str) -> None:
        if request_id not in self._in_flight:
            return
        abort = self._abort([request_id])
        try:
            self._tasks.create_task(abort, name=f"abort {request_id}")
        except RuntimeError:
            # The task group ends, and with it the call, which aborts all its requests.
            abort.close()

    async def _abort(self, request_ids: Sequence[str]) -> None:
        """Best effort, bounded: a replica that does not answer is found lost by its owner."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._generator.abort(request_ids)
        except (TimeoutError, FreewheelError):
            return
