"""The Ray cluster of a run: one of our own on this machine, or a running one that we join.

Owns the two threads in which everything of Ray that blocks is called. A cluster of our own listens
on the loopback interface only, and leaves no process and no file behind when it is stopped.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psutil
import ray
from ray._private import parameter as ray_parameter
from ray._private import ray_constants as ray_constants_module
from ray._private import worker as ray_worker

from freewheel.backends.ray.placement import ClusterView, Node
from freewheel.backends.ray.temp_dir import TempDir
from freewheel.backends.ray.translate import Handle
from freewheel.config.sections import RayConfig
from freewheel.errors import StartupError
from freewheel.threads import CallThread

logger = logging.getLogger(__name__)

ray_constants: Any = ray_constants_module
_ray: Any = ray  # half typed, which a strict checker cannot use

_STOP_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 3.0

_DRIVER_ENVIRONMENT = {
    # A failed call fails all of its references; we read one, and Ray would complain of the others.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_OWN_CLUSTER_ENVIRONMENT = {
    # Ray's default of 15 starves workers on a machine where anything else computes.
    "RAY_worker_niceness": "0",
    # Idle workers cost 50 MB each and the CPU at start-up; ours need their own environment anyway.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Ray would keep a record of each of the last 100,000 calls: 137 kB a step in the quickstart.
    "RAY_task_events_report_interval_ms": "0",
    # A worker that does not answer to being ended (stopped, stuck in the kernel) gets SIGKILL.
    "RAY_kill_worker_timeout_milliseconds": "1000",
    # What user code started ends with the worker that it ran in.
    "RAY_process_group_cleanup_enabled": "1",
    # A process without GPUs is told so by us.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class Cluster:
    """Connection to Ray. Methods other than `start`, `view` and `stop` never wait.

    Args:
        config: section `ray.*`.
        num_cpus: CPUs of a cluster of our own.
    """

    def __init__(self, config: RayConfig, *, num_cpus: int) -> None:
        self._config = config
        self._num_cpus = num_cpus
        self._launches = CallThread("freewheel-ray-launch")
        self._queries = CallThread("freewheel-ray-query")
        self._temp_dir: TempDir | None = None
        self._connected = False

    async def start(self) -> None:
        """Start or join; takes seconds.

        Raises:
            StartupError: Ray did not come up, or the cluster cannot be reached.
        """
        await self._launches.run(self._connect)

    async def view(self) -> ClusterView:
        """Nodes and free resources as Ray knows them now."""
        return await self._queries.run(_view)

    def launch(self, create: Callable[[], Handle]) -> "Future[Handle]":
        """Create an actor: `create()` returns its handle."""
        return self._launches.submit(create)

    def kill(self, handle: Handle) -> None:
        """End an actor's process at once."""
        self._launches.submit(_ray.kill, handle)

    def kill_all(self) -> None:
        """End every process of a cluster of our own at once, for a driver that exits at once."""
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    async def stop(self) -> None:
        """Disconnect; end every process of a cluster of our own. Bounded in time; idempotent."""
        stopped = self._launches.submit(self._disconnect)
        self._launches.close()
        self._queries.close()
        if not await _done_within(stopped, _STOP_TIMEOUT_S):
            logger.warning(
                "Ray did not stop within %g s; its processes are killed", _STOP_TIMEOUT_S
            )
        leftovers = CallThread("freewheel-leftovers")
        await leftovers.run(self._end_leftovers)
        leftovers.close()

    def _connect(self) -> None:
        """Call `ray.init`."""
        if ray.is_initialized():
            raise StartupError("Ray is connected in this process already: one run a process")
        for name, value in _DRIVER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        _quieten()
        try:
            if self._config.address is None:
                self._init_own()
            else:
                _init(address=self._config.address)
        except Exception as error:
            logs = "" if self._temp_dir is None else f" (its logs: {self._temp_dir.path})"
            where = self._config.address or f"on this machine{logs}"
            raise StartupError(f"Ray {where} did not come up: {error}") from error
        self._connected = True

    def _init_own(self) -> None:
        """Start a cluster on the loopback interface."""
        for name, value in _OWN_CLUSTER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            # A token of this process alone; otherwise Ray writes one into the user's home.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._temp_dir = TempDir()
        with _settings_that_init_lacks():
            _init(
                address="local",
                num_cpus=self._num_cpus,
                object_store_memory=self._config.object_store_bytes,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(self._temp_dir.path),
            )

    def _disconnect(self) -> None:
        """Undo `_connect`."""
        if not self._connected:
            return
        self._connected = False
        processes, children = self._processes(), _children()
        _ray.shutdown()
        _end(processes)
        for child in children:
            child.poll()
        if self._temp_dir is not None:
            self._temp_dir.remove()

    def _end_leftovers(self) -> None:
        """End what Ray did not end, after a start that failed or a stop that hung."""
        _end(self._processes())
        if self._temp_dir is not None:
            self._temp_dir.release()

    def _processes(self) -> list[psutil.Process]:
        """Processes of our own cluster: children that name its folder, and what they started."""
        if self._temp_dir is None:
            return []
        folder = str(self._temp_dir.path)
        found: list[psutil.Process] = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(folder in argument for argument in child.cmdline()):
                    found += [child, *child.children(recursive=True)]
        return found


class _LeanParams(ray_parameter.RayParams):
    """Ray's parameters without two processes that a cluster of our own has no use for.

    They are the autoscaler's monitor and the one that sends logs to the driver, which asks for
    none: 0.6 s of CPU time at each start and 70 MB each.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.no_monitor = True
        self.include_log_monitor = False


@contextlib.contextmanager
def _settings_that_init_lacks() -> Iterator[None]:
    """What `ray.init` has no option for, while it runs."""
    cluster_enabled, params = ray_constants.ENABLE_RAY_CLUSTER, ray_parameter.RayParams
    # Otherwise Ray replaces 127.0.0.1 by an address that other machines reach, and whoever reaches
    # the ports of a Ray without tokens (before 2.50) can run code here.
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray_parameter.RayParams = _LeanParams
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER, ray_parameter.RayParams = cluster_enabled, params


def _init(**options: object) -> None:
    _ray.init(
        namespace=f"freewheel-{os.getpid()}-{secrets.token_hex(4)}",
        log_to_driver=False,
        configure_logging=False,
        **options,
    )


def _quieten() -> None:
    """Ray's own messages go to the log, not to the terminal: they would tear the live display."""
    logging.getLogger("ray").setLevel(logging.ERROR)

    def log_instead(data: dict[str, Any], ignore_prefix: bool) -> None:
        logger.info("Ray says: %s", " ".join(map(str, data.get("lines", ()))))

    # There is no option for it: Ray prints to stdout that a worker died, whatever it is told.
    ray_worker.print_to_stdstream = log_instead


def _view() -> ClusterView:
    known: list[dict[str, Any]] = _ray.nodes()
    free: dict[str, float] = _ray.available_resources()
    nodes = tuple(
        Node(
            address=node["NodeManagerAddress"],
            num_cpus=node["Resources"].get("CPU", 0.0),
            num_gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in known
        if node["Alive"]
    )
    return ClusterView(nodes=nodes, free=free)


def _end(processes: list[psutil.Process]) -> None:
    """Wait a moment for processes to end, then kill what is left."""
    _, alive = psutil.wait_procs(processes, timeout=_KILL_TIMEOUT_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_KILL_TIMEOUT_S)


def _children() -> list[subprocess.Popen[bytes]]:
    """Ray's own record of the processes that it started; it never asks how they ended."""
    node: Any = ray_worker._global_node  # pyright: ignore[reportPrivateUsage]  # no public way
    if node is None:
        return []
    return [info.process for infos in node.all_processes.values() for info in infos]


async def _done_within(future: "Future[Any]", timeout_s: float) -> bool:
    """Whether a call in a thread ended in time; its error is raised."""
    done, _ = await asyncio.wait({asyncio.wrap_future(future)}, timeout=timeout_s)
    for finished in done:
        finished.result()
    return bool(done)
