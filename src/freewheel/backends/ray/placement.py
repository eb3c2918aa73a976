"""What workers demand of the cluster, whether that can ever fit, and what a waiting one waits for.

Plain decisions over a picture of the cluster; nobody waits here and nothing of Ray is called.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from freewheel.config.sections import Config
from freewheel.errors import StartupError

Device = Literal["auto", "cpu", "cuda"]
_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one process (`kind`: replica, trainer rank, rollout worker) takes of a node."""

    kind: str
    num_cpus: float
    num_gpus: float
    keys: str

    def __str__(self) -> str:
        """`1 CPU and 0.5 GPU`."""
        gpus = f" and {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"{self.num_cpus:g} CPU{gpus}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One live machine of the cluster and all the CPUs and GPUs that it offers to Ray."""

    address: str
    num_cpus: float
    num_gpus: float

    def fits(self, demand: Demand) -> bool:
        """Whether the process would fit if nothing else ran here."""
        return (
            demand.num_cpus <= self.num_cpus + _SLACK and demand.num_gpus <= self.num_gpus + _SLACK
        )

    def __str__(self) -> str:
        """`10.0.0.1 (8 CPU, 4 GPU)`."""
        return f"{self.address} ({self.num_cpus:g} CPU, {self.num_gpus:g} GPU)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The live nodes, and what no process has taken yet, over all of them."""

    nodes: tuple[Node, ...]
    free: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def num_cpus(self) -> float:
        """CPUs of all nodes."""
        return sum(node.num_cpus for node in self.nodes)

    @property
    def num_gpus(self) -> float:
        """GPUs of all nodes."""
        return sum(node.num_gpus for node in self.nodes)


def num_replicas(config: Config) -> int:
    """Replicas of a run: those for rollouts, and those for validation alone."""
    if config.validation_mode != "dedicated":
        return config.rollout.replicas
    return config.rollout.replicas + config.validation.dedicated_replicas


def declared_cpus(config: Config) -> float:
    """CPUs that all processes of a run declare together."""
    ray = config.ray
    return (
        num_replicas(config) * ray.cpus_per_replica
        + config.actor.world_size * ray.cpus_per_trainer
        + config.rollout.num_workers * ray.cpus_per_worker
    )


def own_cluster_cpus(config: Config) -> int:
    """CPUs that a cluster of our own offers; more than a small machine has, so that all fit.

    A whole number: Ray takes no other for a node.
    """
    if config.ray.num_cpus is not None:
        return math.ceil(config.ray.num_cpus)
    return max(math.ceil(declared_cpus(config) - _SLACK), os.cpu_count() or 1)


def on_gpu(device: Device, view: ClusterView) -> bool:
    """Whether `device` means a GPU on this cluster."""
    return device == "cuda" or (device == "auto" and view.num_gpus > 0)


def replica_demand(config: Config, view: ClusterView) -> Demand:
    """Demand of each replica."""
    gpus = config.rollout.num_gpus if on_gpu(config.rollout.device, view) else 0.0
    keys = "ray.cpus_per_replica, rollout.replicas, rollout.num_gpus, rollout.device"
    return Demand(kind="replica", num_cpus=config.ray.cpus_per_replica, num_gpus=gpus, keys=keys)


def trainer_demand(config: Config, view: ClusterView) -> Demand:
    """Demand of each trainer rank."""
    gpus = config.actor.num_gpus if on_gpu(config.actor.device, view) else 0.0
    keys = "ray.cpus_per_trainer, actor.world_size, actor.num_gpus, actor.device"
    return Demand(
        kind="trainer rank", num_cpus=config.ray.cpus_per_trainer, num_gpus=gpus, keys=keys
    )


def worker_demand(config: Config) -> Demand:
    """Demand of each rollout worker."""
    keys = "ray.cpus_per_worker, rollout.num_workers"
    return Demand(
        kind="rollout worker", num_cpus=config.ray.cpus_per_worker, num_gpus=0.0, keys=keys
    )


def check_fits(demands: Sequence[tuple[int, Demand]], view: ClusterView) -> None:
    """Refuse what no amount of waiting would place.

    Args:
        demands: (number of processes, what each takes).
        view: the cluster.

    Raises:
        StartupError: names the demand, what the cluster has and the configuration keys.
    """
    nodes = "; ".join(map(str, view.nodes)) or "none"
    for _, demand in demands:
        if not any(node.fits(demand) for node in view.nodes):
            raise StartupError(
                f"a {demand.kind} needs {demand} on one node, and no node has that: {nodes} "
                f"({demand.keys}{_own_cluster_key(demand)})"
            )
    cpus = sum(count * demand.num_cpus for count, demand in demands)
    gpus = sum(count * demand.num_gpus for count, demand in demands)
    if cpus > view.num_cpus + _SLACK or gpus > view.num_gpus + _SLACK:
        parts = ", ".join(f"{count} {demand.kind} x {demand}" for count, demand in demands)
        keys = "; ".join(demand.keys for _, demand in demands)
        raise StartupError(
            f"the run needs {cpus:g} CPU and {gpus:g} GPU ({parts}); the cluster has "
            f"{view.num_cpus:g} CPU and {view.num_gpus:g} GPU: {nodes} ({keys}; ray.num_cpus)"
        )


def describe_wait(name: str, demand: Demand, view: ClusterView) -> str:
    """What a process that is not up yet waits for."""
    cpus, gpus = view.free.get("CPU", 0.0), view.free.get("GPU", 0.0)
    free = f"{cpus:g} of {view.num_cpus:g} CPU, {gpus:g} of {view.num_gpus:g} GPU free"
    nodes = "; ".join(map(str, view.nodes)) or "none"
    if demand.num_cpus <= cpus + _SLACK and demand.num_gpus <= gpus + _SLACK:
        return f"{name} waits for a node to start its process ({demand}); {free}; nodes: {nodes}"
    return f"{name} waits for {demand}, or for its process to start; {free}; nodes: {nodes}"


def _own_cluster_key(demand: Demand) -> str:
    """The key that sizes a cluster of our own, where CPUs are what is short."""
    return ", ray.num_cpus" if demand.num_cpus else ""
