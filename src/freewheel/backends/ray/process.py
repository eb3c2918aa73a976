"""One actor as the control plane sees it: place, call, kill."""

import asyncio
import logging
import os
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayError

from freewheel.backends.ray.actors import WATCH_GROUP
from freewheel.backends.ray.cluster import Cluster
from freewheel.backends.ray.placement import Demand, describe_wait
from freewheel.backends.ray.translate import Answer, Handle, cancel, translate
from freewheel.errors import FreewheelError, LostError, StartupError
from freewheel.types import LoopReport, Ref

logger = logging.getLogger(__name__)

_ray: Any = ray  # half typed, which a strict checker cannot use

_PATIENCE_S = 10.0
# Calls that an actor runs at once. More wait in it, and an abort must never wait.
_MAX_CONCURRENCY = 4096
# One that waits, and those given up that have not ended.
_MAX_WATCHES = 16


class RemoteProcess:
    """Owns one actor from its placement to its end.

    Args:
        name: what messages call it: `replica-0`, also after a replacement.
        actor_name: what Ray calls it; never used twice, for a dying actor keeps its name a while.
        actor_class: a class of `actors.py`.
        args: for its constructor.
        demand: says what it takes of a node; asked when it is placed.
        num_threads: OpenMP threads in it.
        lost: what calls raise when its process is gone.
        cluster: where to place it.
    """

    def __init__(
        self,
        *,
        name: str,
        actor_name: str,
        actor_class: type,
        args: tuple[Any, ...],
        demand: Callable[[], Demand],
        num_threads: int,
        lost: type[LostError],
        cluster: Cluster,
    ) -> None:
        self.name = name
        self.waiting_for = ""
        self.pid: int | None = None
        self.node: str = ""
        self._actor_name = actor_name
        self._actor_class = actor_class
        self._args = args
        self._demand = demand
        self._num_threads = num_threads
        self._lost = lost
        self._cluster = cluster
        self._launched: Future[Any] | None = None
        self._handle: Any = None
        self._killed = False
        self._gone: asyncio.Future[None] | None = None

    @property
    def is_killed(self) -> bool:
        """Whether `kill` was called."""
        return self._killed

    @property
    def handle(self) -> Handle:
        """The actor's handle. Raises the process's `LostError` when there is none to call."""
        if self._killed or self._handle is None:
            raise self._lost(f"{self.name}: {'was killed' if self._killed else 'is not started'}")
        return self._handle

    async def place(self) -> None:
        """Create the actor and wait until its process runs; says what it waits for meanwhile.

        Raises:
            StartupError: Ray refused to place it.
            LostError: of its class; the process died at once.
        """
        self._gone = asyncio.get_running_loop().create_future()
        self.waiting_for = f"{self.name} waits for {self._demand()}"
        self._launched = self._cluster.launch(self._launch)
        try:
            self._handle = await asyncio.wrap_future(self._launched)
            self.pid, self.node = await self._identity()
        except BaseException:  # cancelled, too: a process that nobody waits for must not stay
            self.kill()
            raise
        self.waiting_for = ""

    async def start(self, *args: object) -> Answer:
        """Call `start` in the placed process. The process is killed if that fails or is cancelled.

        Raises:
            StartupError: what runs in it could not be built.
        """
        self.waiting_for = f"{self.name} (pid {self.pid} on {self.node}) comes up"
        try:
            answer = await self.call("start", *args)
        except BaseException as error:
            self.kill()
            if type(error) is FreewheelError:
                raise StartupError(str(error)) from error
            raise
        self.waiting_for = ""
        return answer

    def submit(self, method: str, *args: object, num_returns: int = 1) -> Ref:
        """Call a method remotely; returns the reference or, for several returns, references."""
        return getattr(self.handle, method).options(num_returns=num_returns).remote(*args)

    async def call(self, method: str, *args: object) -> Answer:
        """Call a method and await its answer."""
        return await self.answer(self.submit(method, *args), method)

    async def answer(self, ref: Ref, method: str) -> Answer:
        """Await the answer to a submitted call; cancelling cancels the call in the process."""
        who = f"{self.name}: {method}"
        answer = asyncio.wrap_future(ref.future())
        try:
            await self._settled(answer)
            if not answer.done():
                raise self._lost(f"{who}: the process was killed")
            return answer.result()
        except asyncio.CancelledError:
            cancel(ref)
            raise
        except RayError as error:
            raise translate(error, lost=self._lost, who=who) from error
        finally:
            _drop(answer)

    async def watch(self, after: int, wait_s: float) -> list[LoopReport]:
        """See `Watched.watch`."""
        return await self.call("watch", after, wait_s)

    def kill(self) -> None:
        """End the process at once; pending calls fail. Idempotent; never raises, never waits."""
        if self._killed:
            return
        self._killed = True
        if self._gone is not None:
            self._gone.set_result(None)
        if self._launched is not None:
            self._launched.add_done_callback(self._end)

    def _end(self, launched: "Future[Any]") -> None:
        if not launched.cancelled() and launched.exception() is None:
            self._cluster.kill(launched.result())

    def _launch(self) -> Handle:
        """Create the actor; blocks while Ray registers it."""
        remote = _ray.remote(concurrency_groups={WATCH_GROUP: _MAX_WATCHES})(self._actor_class)
        return remote.options(
            name=self._actor_name,
            num_cpus=self._demand().num_cpus,
            num_gpus=self._demand().num_gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_MAX_CONCURRENCY,
            runtime_env={"env_vars": worker_environment(self._num_threads, self._demand())},
        ).remote(*self._args)

    async def _identity(self) -> tuple[int, str]:
        """Wait for the process, saying every few seconds what is missing."""
        ref = self.submit("identify")
        while not await self._settles_within(ref, _PATIENCE_S):
            view = await self._cluster.view()
            self.waiting_for = describe_wait(self.name, self._demand(), view)
            logger.warning("%s", self.waiting_for)
        return await self.answer(ref, "identify")

    async def _settles_within(self, ref: Ref, timeout_s: float) -> bool:
        """Whether a call is answered, or its process gone, in time."""
        answer = asyncio.wrap_future(ref.future())
        try:
            return await self._settled(answer, timeout_s=timeout_s)
        finally:
            _drop(answer)

    async def _settled(
        self, answer: "asyncio.Future[Any]", *, timeout_s: float | None = None
    ) -> bool:
        """Wait for an answer, or for `kill`, which leaves no caller waiting for Ray."""
        assert self._gone is not None, "submitted without a process"
        done, _ = await asyncio.wait(
            {answer, self._gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)


def _drop(answer: "asyncio.Future[Any]") -> None:
    """Lose interest in an answer; asyncio would log an error that nobody asked for."""
    if not answer.cancel() and not answer.cancelled():
        answer.exception()


def worker_environment(num_threads: int, demand: Demand) -> dict[str, str]:
    """Environment variables of a worker process: threads, where to import from, which GPUs."""
    threads = str(num_threads)
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # Threads that wait for each other sleep after some 50 us. They would spin for as long as it
        # takes, and with another process on one's core that is its whole time slice: a step of
        # SmolLM2 on two busy cores then takes over 1 s instead of 0.2 to 0.4 s.
        "GOMP_SPINCOUNT": "3000",
        # Huge pages for torch's large tensors: fewer misses in the page tables, 15 % less time for
        # a step of SmolLM2 at batch 32.
        "THP_MEM_ALLOC_ENABLE": "1",
        "PYTHONPATH": os.pathsep.join(_import_folders()),
    }
    if demand.num_gpus == 0:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


def _import_folders() -> list[str]:
    """Folders that this process imports from, without those that come with the interpreter."""
    own = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    folders = [os.path.abspath(entry or os.curdir) for entry in [*sys.path, os.curdir]]
    return list(dict.fromkeys(folder for folder in folders if not folder.startswith(own)))
