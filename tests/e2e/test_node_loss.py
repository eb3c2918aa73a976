"""A node of a cluster is lost, with what it held; the run goes on, on the nodes that are there."""

import pytest
from ray.cluster_utils import Cluster

from tests.audit import audit
from tests.e2e.runs import start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 60
# Sizes that leave no choice: a trainer needs a node of two CPUs, two replicas fit on one of one.
SIZES = {"cpus_per_trainer": 1.8, "cpus_per_replica": 0.4, "cpus_per_worker": 0.1}


@pytest.fixture
def cluster(monkeypatch):
    """A head on the loopback interface, to which nodes can be added."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")
    made = Cluster(shutdown_at_exit=False)
    yield made
    made.shutdown()


def add_node(cluster, num_cpus):
    return cluster.add_node(
        num_cpus=num_cpus,
        node_ip_address="127.0.0.1",
        object_store_memory=1 << 28,
        include_dashboard=False,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("head_cpus", "node_cpus", "lost_role"), [(2, 1, "Replica"), (1, 2, "Trainer")]
)
def test_a_lost_node_is_survived(tmp_path, cluster, head_cpus, node_cpus, lost_role):
    add_node(cluster, head_cpus)
    node = add_node(cluster, node_cpus)
    live = start(
        tmp_path,
        {
            "trainer": {"total_training_steps": STEPS, "save_freq": 10, "test_freq": 20},
            "ray": {"address": cluster.address, **SIZES},
            "health": {"sync_timeout_s": 30, "replica_stall_s": 20, "startup_timeout_s": 200},
        },
    )
    live.wait_for_event("weights_published", count=15, timeout_s=200)
    cluster.remove_node(node, allow_graceful=False)
    add_node(cluster, node_cpus)
    finished = live.finish(timeout_s=400)
    assert finished.code == 0, finished.err
    lost = [event["worker"] for event in finished.events("worker_lost")]
    assert any(name.startswith(lost_role.lower()) for name in lost), lost
    assert finished.summary["steps"] == STEPS
    assert finished.summary["samples"]["failed"] == 0
    if lost_role == "Trainer":
        assert len(finished.events("trainer_replayed")) == 1
    assert audit(finished.folder) == []
