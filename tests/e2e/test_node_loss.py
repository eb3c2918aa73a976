"""A node of a cluster is lost, with what it held; the run goes on, on the nodes that are there."""

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.e2e.runs import start

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

STEPS = 60
# 2.1 CPUs in all: more than one of the nodes has, so that both are used.
SIZES = {"cpus_per_trainer": 1.2, "cpus_per_replica": 0.4, "cpus_per_worker": 0.1}


@pytest.fixture
def cluster(monkeypatch):
    """A head on the loopback interface, without room for workers; nodes are added to it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")
    made = Cluster(shutdown_at_exit=False)
    add_node(made, 0)
    yield made
    made.shutdown()


def add_node(cluster, num_cpus=2):
    return cluster.add_node(
        num_cpus=num_cpus,
        node_ip_address="127.0.0.1",
        object_store_memory=1 << 28,
        include_dashboard=False,
    )


def roles_on(node):
    """Names of the run's processes on a node, by Ray's titles of them."""
    raylets = [info.process.pid for info in node.all_processes["raylet"]]
    return {
        role
        for raylet in raylets
        for process in psutil.Process(raylet).children(recursive=True)
        for role in ("Trainer", "Replica", "RolloutWorker")
        if process.name().startswith("ray::") and role in process.name()
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost_role", ["Replica", "Trainer"])
def test_a_lost_node_is_survived(tmp_path, cluster, lost_role):
    nodes = [add_node(cluster) for _ in range(2)]
    live = start(
        tmp_path,
        {
            "trainer": {"total_training_steps": STEPS, "save_freq": 10, "test_freq": 20},
            "rollout": {"replicas": 2},
            "ray": {"address": cluster.address, **SIZES},
            "health": {"sync_timeout_s": 30, "replica_stall_s": 20, "startup_timeout_s": 200},
        },
    )
    live.wait_for_event("checkpoint_saved", timeout_s=240)
    node = next(node for node in nodes if lost_role in roles_on(node))
    lost = roles_on(node)
    cluster.remove_node(node, allow_graceful=False)
    add_node(cluster)
    finished = live.finish(timeout_s=400)
    assert finished.code == 0, finished.err
    assert finished.summary["steps"] == STEPS
    assert finished.summary["samples"]["trained"] == STEPS * 4 * 4
    assert [row["step"] for row in finished.rows("metrics")] == list(range(1, STEPS + 1))
    went_down = {row["worker"] for row in finished.events("worker_lost")}
    assert any(name.startswith(lost_role.lower()) for name in went_down), (went_down, lost)
