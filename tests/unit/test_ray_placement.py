"""What workers demand, whether it can ever fit, and what a waiting one is said to wait for."""

import pytest

from freewheel.backends.ray.placement import (
    ClusterView,
    Node,
    check_fits,
    describe_wait,
    own_cluster_cpus,
    replica_demand,
    trainer_demand,
    worker_demand,
)
from freewheel.config.sections import (
    ActorConfig,
    Config,
    RayConfig,
    RolloutConfig,
    ValidationConfig,
)
from freewheel.errors import StartupError

CPU_NODE = Node(address="10.0.0.1", num_cpus=4, num_gpus=0)
GPU_NODE = Node(address="10.0.0.2", num_cpus=8, num_gpus=2)


def view(*nodes, **free):
    return ClusterView(nodes=nodes, free=free)


@pytest.mark.parametrize(
    ("device", "nodes", "num_gpus"),
    [
        ("auto", (CPU_NODE,), 0),
        ("auto", (CPU_NODE, GPU_NODE), 0.5),
        ("cpu", (GPU_NODE,), 0),
        ("cuda", (CPU_NODE,), 0.5),
    ],
)
def test_gpus_are_demanded_where_the_device_is_one(device, nodes, num_gpus):
    config = Config(
        rollout=RolloutConfig(device=device, num_gpus=0.5),
        actor=ActorConfig(device=device, num_gpus=0.5),
    )
    assert replica_demand(config, view(*nodes)).num_gpus == num_gpus
    assert trainer_demand(config, view(*nodes)).num_gpus == num_gpus
    assert worker_demand(config).num_gpus == 0


def test_our_own_cluster_fits_the_run_on_a_small_machine(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    config = Config(
        rollout=RolloutConfig(replicas=3, num_workers=2),
        validation=ValidationConfig(mode="dedicated", dedicated_replicas=2),
    )
    assert own_cluster_cpus(config) == 7  # 3 + 2 replicas, 1 rank, 2 workers of 0.1
    assert own_cluster_cpus(Config(rollout=RolloutConfig(num_workers=10))) == 3  # 1 + 1 + 10 * 0.1
    assert own_cluster_cpus(Config(ray=RayConfig(num_cpus=1.5))) == 2


def test_what_fits_is_let_through():
    cluster = view(GPU_NODE)
    config = Config(rollout=RolloutConfig(num_gpus=0.5))
    check_fits(
        [(2, replica_demand(config, cluster)), (1, trainer_demand(config, cluster))], cluster
    )


def test_one_process_must_fit_on_one_node():
    cluster = view(CPU_NODE, CPU_NODE)
    config = Config(ray=RayConfig(cpus_per_replica=6))
    with pytest.raises(
        StartupError, match=r"needs 6 CPU on one node.*10\.0\.0\.1 \(4 CPU, 0 GPU\)"
    ):
        check_fits([(1, replica_demand(config, cluster))], cluster)


def test_all_processes_must_fit_together():
    cluster = view(GPU_NODE)
    config = Config(rollout=RolloutConfig(replicas=2))
    demands = [(2, replica_demand(config, cluster)), (1, trainer_demand(config, cluster))]
    with pytest.raises(StartupError) as caught:
        check_fits(demands, cluster)
    for part in ("3 GPU", "2 replica x 1 CPU and 1 GPU", "8 CPU and 2 GPU", "rollout.num_gpus"):
        assert part in str(caught.value)


def test_a_wait_is_told_with_what_is_free():
    demand = worker_demand(Config(ray=RayConfig(cpus_per_worker=2)))
    waits = describe_wait("worker-1", demand, view(CPU_NODE, CPU=0.5))
    assert waits.startswith("worker-1 waits for 2 CPU")
    assert "0.5 of 4 CPU" in waits
    starts = describe_wait("worker-1", demand, view(CPU_NODE, CPU=3.0))
    assert starts.startswith("worker-1 waits for a node to start its process")
