"""Protocol `Backend` over Ray: makes the processes of a run and ends them."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from freewheel.backends.ray.actors import (
    ReplicaActor,
    RolloutWorkerActor,
    Setup,
    TrainerActor,
    WorkerActor,
)
from freewheel.backends.ray.cluster import Cluster
from freewheel.backends.ray.cores import Cores
from freewheel.backends.ray.placement import (
    ClusterView,
    Demand,
    check_fits,
    num_replicas,
    own_cluster_cpus,
    replica_demand,
    trainer_demand,
    worker_demand,
)
from freewheel.backends.ray.process import RemoteProcess
from freewheel.backends.ray.proxies import RayReplica, RayRolloutWorker, RayTrainer
from freewheel.config.sections import Config
from freewheel.errors import (
    InvariantError,
    LostError,
    ReplicaLostError,
    RolloutWorkerLostError,
    TrainerLostError,
)


class RayBackend:
    """Starts or joins a Ray cluster and places workers on it.

    Args:
        config: the run's configuration.
        model_path: folder of the model, readable from every node.
        log_dir: where the workers' stdout and stderr go, one file a process; None leaves them to
            Ray's own logs.
        cores: what runs inside the actors.
    """

    def __init__(
        self,
        config: Config,
        model_path: Path,
        *,
        log_dir: Path | None = None,
        cores: Cores | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path.absolute()
        self._log_dir = None if log_dir is None else log_dir.absolute()
        self._cores = cores or Cores.of(config.rollout)
        self._cluster = Cluster(config.ray, num_cpus=own_cluster_cpus(config))
        self._view: ClusterView | None = None
        self._processes: list[RemoteProcess] = []
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    async def start(self) -> None:
        """Connect to, or start, the cluster, and check that the run can fit on it.

        Raises:
            StartupError: Ray did not come up, or the run can never fit.
        """
        await self._cluster.start()
        view = await self._cluster.view()
        check_fits(self._demands(view), view)
        self._view = view

    def replica(self, replica_id: int) -> RayReplica:
        """A new replica process under this number."""
        process = self._process(
            f"replica-{replica_id}",
            ReplicaActor,
            demand=lambda: replica_demand(self._config, self._seen()),
            num_threads=self._config.rollout.num_threads,
            lost=ReplicaLostError,
        )
        return RayReplica(replica_id, process)

    def rollout_worker(self, worker_id: int) -> RayRolloutWorker:
        """A new rollout worker process under this number."""
        process = self._process(
            f"worker-{worker_id}",
            RolloutWorkerActor,
            worker_id,
            demand=lambda: worker_demand(self._config),
            num_threads=1,
            lost=RolloutWorkerLostError,
        )
        return RayRolloutWorker(worker_id, process)

    def trainer(self) -> RayTrainer:
        """A new trainer, of `actor.world_size` ranks."""
        ranks = [
            self._process(
                f"trainer-{rank}",
                TrainerActor,
                rank,
                demand=lambda: trainer_demand(self._config, self._seen()),
                num_threads=self._config.actor.num_threads,
                lost=TrainerLostError,
            )
            for rank in range(self._config.actor.world_size)
        ]
        return RayTrainer(ranks, grace_s=self._config.health.grace_s)

    def kill(self) -> None:
        """End every process at once, without a word to Ray: only before this process exits itself.

        A cluster that was joined ends a run's processes by itself when its driver is gone.
        """
        self._cluster.kill_all()

    def local_processes(self) -> dict[str, int]:
        """Process ids of the workers that live on this machine, by name."""
        return {
            process.name: process.pid
            for process in self._processes
            if process.pid is not None and not process.is_killed and psutil.pid_exists(process.pid)
        }

    async def aclose(self) -> None:
        """End every process that this backend started. Idempotent, bounded in time."""
        for process in self._processes:
            process.kill()
        self._processes.clear()
        await self._cluster.stop()

    def _process(
        self,
        name: str,
        actor_class: type[WorkerActor],
        *args: object,
        demand: Callable[[], Demand],
        num_threads: int,
        lost: type[LostError],
    ) -> RemoteProcess:
        """An actor that is yet to be placed."""
        number = next(self._numbers[name])
        setup = Setup(
            name=name,
            config=self._config,
            model_path=self._model_path,
            cores=self._cores,
            log_file=None if self._log_dir is None else self._log_dir / f"{name}.log",
        )
        process = RemoteProcess(
            name=name,
            actor_name=f"freewheel-{name}-{number}" if number else f"freewheel-{name}",
            actor_class=actor_class,
            args=(setup, *args),
            demand=demand,
            num_threads=num_threads,
            lost=lost,
            cluster=self._cluster,
        )
        self._processes = [known for known in self._processes if not known.is_killed]
        self._processes.append(process)
        return process

    def _demands(self, view: ClusterView) -> list[tuple[int, Demand]]:
        """(number of processes, what each takes) of the whole run."""
        config = self._config
        return [
            (num_replicas(config), replica_demand(config, view)),
            (config.actor.world_size, trainer_demand(config, view)),
            (config.rollout.num_workers, worker_demand(config)),
        ]

    def _seen(self) -> ClusterView:
        if self._view is None:
            raise InvariantError("a worker was asked for before the backend was started")
        return self._view
