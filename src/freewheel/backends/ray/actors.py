"""What runs in the workers' processes: each actor holds one core and passes calls on to it.

Actors are async: their event loop only passes on. User code and torch run in the cores; the
trainer's core, which is synchronous, runs in one thread for training and one for writing. An error
leaves a process as one of ours, so that its reader needs no class that only the worker can import.
A second loop, in a thread of its own, answers `watch` also while the first one is blocked.
"""

import asyncio
import faulthandler
import functools
import itertools
import os
import signal
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, WorkerCrashedError

from freewheel.backends.ray.cores import Cores, Loaded, load
from freewheel.backends.ray.generator import RayGenerator
from freewheel.backends.ray.in_flight import RequestsInFlight
from freewheel.backends.ray.translate import Answer, Handle, translate
from freewheel.config.sections import Config
from freewheel.errors import (
    FreewheelError,
    LostError,
    TrajectoriesLostError,
    WeightsLostError,
)
from freewheel.loop_reports import LoopReports, watch_serving_loop
from freewheel.loop_watch import LoopWatch
from freewheel.types import (
    DatasetInfo,
    Generation,
    GenerationRequest,
    GroupRequest,
    LoopReport,
    PromptInfo,
    Purpose,
    Ref,
    ReplicaStats,
    RolloutOutcome,
    Split,
    TrainerInfo,
    TrainRequest,
    TrainResult,
    Trajectory,
)

if TYPE_CHECKING:
    from freewheel.remote_weights import RemoteWeights
    from freewheel.weights import WeightBundle

_ray: Any = ray  # half typed, which a strict checker cannot use

P = ParamSpec("P")
R = TypeVar("R")
_LOST = (ObjectLostError, RayActorError, WorkerCrashedError)
A = TypeVar("A", bound="WorkerActor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """About weights that were published.

    `publication` is set if they lie in the trainer's memory until `drop_weights`.
    """

    num_bytes: int
    publication: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every actor is told at birth. `log_file` takes its stdout and stderr."""

    name: str
    config: Config
    model_path: Path
    cores: Cores
    log_file: Path | None


def boundary(
    method: Callable[Concatenate[A, P], Awaitable[R]],
) -> Callable[Concatenate[A, P], Awaitable[R]]:
    """Let nothing but our own errors out of a remote method."""

    @functools.wraps(method)
    async def guarded(self: A, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(self, *args, **kwargs)
        except FreewheelError:
            raise
        except RayError as error:
            raise translate(error, lost=LostError, who=self.setup.name) from error
        except Exception as error:
            text = traceback.format_exc()
            raise FreewheelError(f"{self.setup.name}: {method.__name__} failed: {text}") from error

    return guarded


WATCH_GROUP = "watch"
"""Concurrency group, and so an event loop and thread of its own, of what must always answer."""


class WorkerActor:
    """What all actors have in common."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._loop_reports = LoopReports()
        self._loop_watch: LoopWatch | None = None
        if setup.log_file is not None:
            _redirect_output(setup.log_file)
        faulthandler.enable()
        # Stacks for a hang report where py-spy is not permitted.
        faulthandler.register(signal.SIGUSR1)

    async def identify(self) -> tuple[int, str]:
        """Process id and address of the node. The first call, which also begins the watch."""
        if self._loop_watch is None:
            limit_s = self.setup.config.health.loop_blocked_s
            self._loop_watch = watch_serving_loop(self._loop_reports, limit_s=limit_s)
        return os.getpid(), _ray.util.get_node_ip_address()

    @_ray.method(concurrency_group=WATCH_GROUP)
    async def watch(self, after: int, wait_s: float) -> list[LoopReport]:
        """See `Watched.watch`."""
        return await self._loop_reports.after(after, wait_s=wait_s)

    async def load(self, path: str) -> Loaded:
        """Import in a thread: torch takes seconds, and this loop answers meanwhile."""
        return await asyncio.to_thread(load, path)


class ReplicaActor(WorkerActor):
    """An inference engine."""

    @boundary
    async def start(self) -> None:
        """Build the engine."""
        core = await self.load(self.setup.cores.replica)
        self._engine = core(self.setup.config, self.setup.model_path)
        self._in_flight = RequestsInFlight()
        await self._engine.start()
        self._merger: Any = None
        if self.setup.config.model.lora_rank:
            merger = await self.load(self.setup.cores.adapter_merger)
            self._merger = await asyncio.to_thread(merger, self.setup.config, self.setup.model_path)

    @boundary
    async def generate(
        self, requests: Sequence[GenerationRequest], timeout_s: float
    ) -> list[Generation]:
        """Called by rollout workers."""
        with self._in_flight.running(requests):
            return await self._engine.generate(requests, timeout_s=timeout_s)

    @boundary
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Called by rollout workers."""
        await self._engine.abort(request_ids)

    @boundary
    async def abort_group(self, request_id: str) -> None:
        """Called by the control plane when a group's rollout worker is gone."""
        await self._engine.abort(self._in_flight.give_up(request_id))

    @boundary
    async def update_weights(self, version: int, bundle: "WeightBundle | RemoteWeights") -> None:
        """`bundle` arrives as a view of shared memory: all weights, or an adapter to merge.

        Or it tells where the weights lie in the trainer's memory.
        """
        if self._merger is not None:
            bundle = await asyncio.to_thread(self._merger.merge, bundle)
        await self._engine.update_weights(version, bundle)

    @boundary
    async def stats(self) -> ReplicaStats:
        """Counters of the engine."""
        return self._engine.stats()


class RolloutWorkerActor(WorkerActor):
    """Data, environments and rewards: the user's code."""

    def __init__(self, setup: Setup, worker_id: int) -> None:
        super().__init__(setup)
        self._worker_id = worker_id

    @boundary
    async def start(self) -> dict[Split, DatasetInfo]:
        """Open the data and import the user's code."""
        core = await self.load(self.setup.cores.rollout_worker)
        self._worker = core(
            self.setup.config,
            self.setup.model_path,
            self._worker_id,
            on_loop_report=self._loop_reports.put,
        )
        return await self._worker.start()

    @boundary
    async def prepare(self, split: Split, indices: Sequence[int]) -> list[PromptInfo]:
        """Render and tokenize prompts."""
        return await self._worker.prepare(split, indices)

    @boundary
    async def run_group(
        self, request: GroupRequest, replica: Handle, replica_name: str
    ) -> tuple[tuple[RolloutOutcome, ...], list[Trajectory]]:
        """Two returns: outcomes for the control plane, trajectories that stay where they are."""
        generator = RayGenerator(replica, replica_name)
        outcomes, trajectories = await self._worker.run_group(request, generator)
        keep = request.purpose is Purpose.TRAINING
        return tuple(outcomes), list(trajectories) if keep else []


class TrainerActor(WorkerActor):
    """One rank of the trainer. Rank 0 speaks for all."""

    def __init__(self, setup: Setup, rank: int) -> None:
        super().__init__(setup)
        self._rank = rank
        self._train_thread = ThreadPoolExecutor(1, thread_name_prefix="freewheel-train")
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="freewheel-write")

    @boundary
    async def rendezvous(self) -> str:
        """Where the ranks meet: an address on this node with a port that is free now."""
        address: str = _ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    @boundary
    async def start(self, checkpoint: Path | None, world_size: int, meeting: str) -> TrainerInfo:
        """Build the core. Several ranks meet at `meeting`, a URL from rank 0's `rendezvous`."""
        core = await self.load(self.setup.cores.trainer)
        extra: dict[str, Any] = {}
        if world_size > 1:
            ranks = await self.load(self.setup.cores.trainer_ranks)
            extra["ranks"] = ranks(rank=self._rank, world_size=world_size, init_method=meeting)
        self._trainer = await self._in_train_thread(
            functools.partial(core, self.setup.config, self.setup.model_path, **extra)
        )
        return await self._in_train_thread(self._trainer.start, checkpoint)

    @boundary
    async def train_step(self, request: TrainRequest) -> TrainResult:
        """Fetch the trajectories and train on them."""
        return await self._in_train_thread(self._train, request)

    @boundary
    async def publish(self, version: int) -> tuple[Published, Any]:
        """Two returns: about the weights, and they themselves, which stay in shared memory."""
        weights = await self._in_train_thread(self._trainer.export_weights)
        if self._rank != 0:
            return Published(num_bytes=0), None
        # Only what stays in the trainer's own memory has a number there.
        publication = getattr(weights, "publication", None)
        return Published(num_bytes=weights.num_bytes, publication=publication), weights

    @boundary
    async def drop_weights(self, publication: int) -> None:
        """Nobody needs a publication any more."""
        await asyncio.to_thread(self._trainer.drop_weights, publication)

    @boundary
    async def publish_restored(self, version: int) -> tuple[Published, Any]:
        """As `publish`, of a version that the checkpoint carries beside the trainer's. Rank 0."""
        bundle = await self._in_train_thread(self._trainer.restored_weights, version)
        return Published(num_bytes=bundle.num_bytes), bundle

    @boundary
    async def copy_state(self, step: int) -> None:
        """Copy in memory, between two steps."""
        await self._in_train_thread(self._trainer.copy_state, step)

    @boundary
    async def write_state(
        self, step: int, folder: Path, refs: Sequence[Ref], held: dict[int, Ref]
    ) -> None:
        """Write the copy, beside training. Rank 0 only."""
        await self._in_write_thread(self._write, step, folder, refs, held)

    @boundary
    async def load_trajectories(self, folder: Path, group_ids: Sequence[int]) -> Answer:
        """As many returns as groups, each a `list[Trajectory]`."""
        read = await self.load(self.setup.cores.read_trajectories)
        path = folder / await self.load(self.setup.cores.trajectories_file)
        groups = await self._in_write_thread(read, path, group_ids)
        return groups[0] if len(group_ids) == 1 else tuple(groups)

    def _train(self, request: TrainRequest) -> TrainResult:
        return self._trainer.train_step(request, _by_group(_fetch(request.payloads)))

    def _write(self, step: int, folder: Path, refs: Sequence[Ref], held: dict[int, Ref]) -> None:
        # Both before anything is written: the copy stays if some are lost.
        bundles, groups = _fetch_weights(held), _fetch(refs)
        self._trainer.write_state(step, folder, groups, bundles)

    async def _in_train_thread(self, call: Callable[..., R], *args: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._train_thread, call, *args)

    async def _in_write_thread(self, call: Callable[..., R], *args: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._write_thread, call, *args)


def _fetch_weights(held: Mapping[int, Ref]) -> "dict[int, WeightBundle | RemoteWeights]":
    """Resolve published versions, in a thread where waiting blocks nobody.

    Raises:
        WeightsLostError: names all whose process or node is gone.
    """
    bundles: dict[int, WeightBundle | RemoteWeights] = {}
    lost: dict[int, str] = {}
    for version, ref in held.items():
        if reason := _why_lost(ref):
            lost[version] = reason
        else:
            bundles[version] = _ray.get(ref)
    if lost:
        reasons = ", ".join(f"version {version}: {reason}" for version, reason in lost.items())
        raise WeightsLostError(f"published weights are gone: {reasons}", tuple(lost))
    return bundles


def _fetch(refs: Sequence[Ref]) -> list[list[Trajectory]]:
    """Resolve payloads, in a thread where waiting blocks nobody.

    Raises:
        TrajectoriesLostError: the process or node that held some of them is gone.
    """
    try:
        return _ray.get(list(refs))
    except _LOST:
        lost = {position: error for position, ref in enumerate(refs) if (error := _why_lost(ref))}
    if not lost:
        return _ray.get(list(refs))
    raise TrajectoriesLostError(
        tuple(lost), f"{len(lost)} of {len(refs)} payloads are gone: {next(iter(lost.values()))}"
    )


def _why_lost(ref: Ref) -> str:
    try:
        _ray.get(ref)
    except _LOST as error:
        return type(error).__name__
    return ""


def _by_group(payloads: Sequence[list[Trajectory]]) -> list[list[Trajectory]]:
    """Whole groups, in order: one whose members needed several attempts has several payloads."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in itertools.chain.from_iterable(payloads):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.values())


def _redirect_output(path: Path) -> None:
    """Append this process's stdout and stderr to a file, if its folder exists on this node."""
    if not path.parent.is_dir():
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
