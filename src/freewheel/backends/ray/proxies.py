"""The Protocols `Replica`, `RolloutWorker` and `Trainer` over remote processes."""

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from freewheel.backends.ray.actors import Published
from freewheel.backends.ray.process import RemoteProcess
from freewheel.backends.ray.translate import Answer
from freewheel.errors import (
    FreewheelError,
    InvariantError,
    LostError,
    ReplicaLostError,
    StartupError,
    TrainerLostError,
    TrajectoriesLostError,
    WeightsLostError,
)
from freewheel.protocols import Replica
from freewheel.types import (
    DatasetInfo,
    GroupRequest,
    GroupResult,
    LoopReport,
    PromptInfo,
    Purpose,
    Ref,
    ReplicaStats,
    Split,
    TrainerInfo,
    TrainRequest,
    TrainResult,
    Weights,
)

R = TypeVar("R")
_MAYBE_OF_ANOTHER = (FreewheelError, StartupError)
"""What an error of torch.distributed becomes at the boundary, in a call and in a start."""


class _OneProcess:
    """What replica and rollout worker have in common."""

    process: RemoteProcess

    @property
    def pid(self) -> int | None:
        """Process id on its node, once it runs."""
        return self.process.pid

    @property
    def waiting_for(self) -> str:
        """What a start in progress waits for."""
        return self.process.waiting_for

    async def watch(self, after: int, wait_s: float) -> list[LoopReport]:
        """Reports of the process's blocked loops."""
        return await self.process.watch(after, wait_s)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()


class RayReplica(_OneProcess):
    """Protocol `Replica` over a `ReplicaActor`."""

    def __init__(self, replica_id: int, process: RemoteProcess) -> None:
        self._replica_id = replica_id
        self.process = process

    @property
    def replica_id(self) -> int:
        """Number of the replica."""
        return self._replica_id

    async def start(self) -> None:
        """Place the process and build the engine."""
        await self.process.place()
        await self.process.start()

    async def update_weights(self, weights: Weights) -> None:
        """Activate a version; the weights go from the trainer's node to the replica's directly."""
        try:
            await self.process.call("update_weights", weights.version, weights.ref)
        except ReplicaLostError:
            raise
        except LostError as error:
            raise WeightsLostError(f"weights of version {weights.version}: {error}") from error

    async def abort(self, request_id: str) -> None:
        """End what a group's request still has in the engine."""
        await self.process.call("abort_group", request_id)

    async def stats(self) -> ReplicaStats:
        """Counters of the engine."""
        return await self.process.call("stats")


class RayRolloutWorker(_OneProcess):
    """Protocol `RolloutWorker` over a `RolloutWorkerActor`."""

    def __init__(self, worker_id: int, process: RemoteProcess) -> None:
        self._worker_id = worker_id
        self.process = process

    @property
    def worker_id(self) -> int:
        """Number of the worker."""
        return self._worker_id

    async def start(self) -> dict[Split, DatasetInfo]:
        """Place the process, open the data, import the user's code."""
        await self.process.place()
        return await self.process.start()

    async def prepare(self, split: Split, indices: Sequence[int]) -> list[PromptInfo]:
        """Render and tokenize prompts."""
        return await self.process.call("prepare", split, list(indices))

    async def run_group(self, request: GroupRequest, replica: Replica) -> GroupResult:
        """Run a group; its trajectories stay out of this process, and outlive the worker's."""
        if not isinstance(replica, RayReplica):
            raise InvariantError(f"a replica of another backend: {replica!r}")
        generator = replica.process
        outcomes, payload = self.process.submit(
            "run_group", request, generator.handle, generator.name, num_returns=2
        )
        return GroupResult(
            request_id=request.request_id,
            outcomes=await self.process.answer(outcomes, "run_group"),
            payload=payload if request.purpose is Purpose.TRAINING else None,
        )


class RayTrainer:
    """Protocol `Trainer` over one `TrainerActor` a rank; rank 0 answers for all.

    Args:
        ranks: its processes.
        grace_s: how long a rank has to show that it lives, when another one has failed.
    """

    def __init__(self, ranks: Sequence[RemoteProcess], *, grace_s: float) -> None:
        self.ranks = tuple(ranks)
        self._first = self.ranks[0]
        self._grace_s = grace_s

    @property
    def processes(self) -> Sequence[RemoteProcess]:
        """Its processes, by rank."""
        return self.ranks

    @property
    def pid(self) -> int | None:
        """Process id of rank 0 on its node, once it runs."""
        return self._first.pid

    @property
    def waiting_for(self) -> str:
        """What a start in progress waits for."""
        return "; ".join(rank.waiting_for for rank in self.ranks if rank.waiting_for)

    async def start(self, checkpoint: Path | None) -> TrainerInfo:
        """Place all ranks, let them meet, build model and optimizer."""
        try:
            await _together(rank.place() for rank in self.ranks)
            meeting = await self._first.call("rendezvous") if len(self.ranks) > 1 else ""
            infos = await self._on_all(
                lambda rank: rank.start(checkpoint, len(self.ranks), meeting)
            )
        except BaseException:  # cancelled, too: the other ranks must not stay
            self.kill()
            raise
        return infos[0]

    async def train_step(self, request: TrainRequest) -> TrainResult:
        """The same request to every rank."""
        try:
            return (await self._all("train_step", request))[0]
        except TrajectoriesLostError:
            if len(self.ranks) > 1:
                # Ranks that found all of them are in a collective that the others do not join.
                self.kill()
            raise

    async def publish(self, version: int) -> Weights:
        """All ranks gather; rank 0 puts the weights into shared memory, and none come here."""
        pairs = {rank: rank.submit("publish", version, num_returns=2) for rank in self.ranks}
        answers = await self._on_all(lambda rank: rank.answer(pairs[rank][0], "publish"))
        published: Published = answers[0]
        weights = Weights(version=version, num_bytes=published.num_bytes, ref=pairs[self._first][1])
        if published.publication is not None:
            # As an object of Ray's goes with the last reference to it, so do these weights.
            dropped = weakref.finalize(weights, self._drop, published.publication)
            dropped.atexit = False
        return weights

    async def publish_restored(self, version: int) -> Weights:
        """Publish a version that the checkpoint carries beside the trainer's own weights."""
        about, ref = self._first.submit("publish_restored", version, num_returns=2)
        published: Published = await self._first.answer(about, "publish_restored")
        return Weights(version=version, num_bytes=published.num_bytes, ref=ref)

    async def copy_state(self, step: int) -> None:
        """Copy in memory, on every rank."""
        await self._all("copy_state", step)

    async def write_state(
        self,
        step: int,
        folder: Path,
        trajectories: Sequence[Ref],
        held: Sequence[Weights] = (),
    ) -> None:
        """Rank 0 has the whole copy and writes it, with the published versions still needed."""
        versions = {weights.version: weights.ref for weights in held}
        try:
            await self._first.call("write_state", step, folder, tuple(trajectories), versions)
        except (TrainerLostError, TrajectoriesLostError, WeightsLostError):
            raise
        except LostError as error:
            raise WeightsLostError(f"weights that the checkpoint needs: {error}") from error

    def load_trajectories(self, folder: Path, group_ids: Sequence[int]) -> list[Ref]:
        """References at once; an error of reading reaches whoever uses one."""
        if not group_ids:
            return []
        refs = self._first.submit(
            "load_trajectories", folder, list(group_ids), num_returns=len(group_ids)
        )
        return [refs] if len(group_ids) == 1 else list(refs)

    def kill(self) -> None:
        """End the processes at once."""
        for rank in self.ranks:
            rank.kill()

    def _drop(self, publication: int) -> None:
        if not self._first.is_killed:
            self._first.submit("drop_weights", publication)

    async def _all(self, method: str, *args: object) -> list[Answer]:
        return await self._on_all(lambda rank: rank.call(method, *args))

    async def _on_all(
        self, ask: Callable[[RemoteProcess], Coroutine[Any, Any, Answer]]
    ) -> list[Answer]:
        """The answers of all ranks, by rank; the first error is raised by itself."""
        return await _together(self._answer(rank, ask(rank)) for rank in self.ranks)

    async def _answer(self, rank: RemoteProcess, call: Coroutine[Any, Any, Answer]) -> Answer:
        """One rank's answer. In a collective the loss of a rank is an error of the others first.

        Raises:
            TrainerLostError: what looks like an error of this rank is the loss of another one.
        """
        try:
            return await call
        except FreewheelError as error:
            if type(error) not in _MAYBE_OF_ANOTHER:
                raise
            for other in self.ranks:
                if other is not rank:
                    await self._check_alive(other, error)
            raise

    async def _check_alive(self, rank: RemoteProcess, error: FreewheelError) -> None:
        """Let a rank show that it lives. One that was killed here is no one's cause."""
        if rank.is_killed:
            return
        try:
            async with asyncio.timeout(self._grace_s):
                await rank.call("identify")
        except TimeoutError:
            lost = TrainerLostError(f"{rank.name}: no answer within {self._grace_s:g} s")
        except TrainerLostError as gone:
            lost = gone
        else:
            return
        if not rank.is_killed:
            raise lost from error


async def _together(calls: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Await calls side by side; the first error cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call, name=f"rank-{i}") for i, call in enumerate(calls)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
