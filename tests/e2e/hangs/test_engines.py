"""Replicas that hang or die: each is found by its own limit and replaced."""

import signal
from typing import Any

import pytest

from tests.e2e.hangs.common import LATE_S, Faults, happened_s, quick, workers
from tests.e2e.runs import Finished

pytestmark = pytest.mark.e2e

STALL_S, SYNC_S = 4, 6
FAULTS = ["silent", "stuck", "never-loads", "killed", "stopped"]


@pytest.fixture(scope="module")
def lost_replicas(tmp_path_factory) -> Finished:
    """A run that loses five replicas, each in another way, and at last more than it may lose."""
    folder = tmp_path_factory.mktemp("lost_replicas")
    changes = quick(
        rollout={"replicas": 2},
        trainer={"total_training_steps": 5000},
        health={
            "replica_stall_s": STALL_S,
            "sync_timeout_s": SYNC_S,
            "max_restarts": len(FAULTS) + 1,
        },
    )
    changes["async_training"]["concurrent_samples_per_replica"] = 6
    # A rollout's own deadline must not be what ends the wait.
    changes["rollout"]["timeout_s"] = 60
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(folder, patch)
        live = faults.start(folder, changes, replica="faulty_engines:FailsInTurn")
        live.wait_for_event("worker_lost", count=3)
        live.wait_for_event("replica_up", count=2 + 3)
        workers(live, "Replica")[0].kill()
        live.wait_for_event("replica_up", count=2 + 4)
        workers(live, "Replica")[0].send_signal(signal.SIGSTOP)
        live.wait_for_event("worker_lost", count=5, timeout_s=STALL_S + 2 + LATE_S)
        live.wait_for_event("replica_up", count=2 + 5)
        live.wait_for_event("weights_published", count=live.count("weights_published") + 8)
        for process in workers(live, "Replica", "RolloutWorker"):
            process.kill()
        finished = live.finish(timeout_s=60)
    assert live.left_over() == []
    return finished


def loss(run: Finished, fault: str) -> dict[str, Any]:
    return run.events("worker_lost")[FAULTS.index(fault)]


def stalls(run: Finished, fault: str) -> list[str]:
    """Why the replica that was lost by a fault is said to have stalled."""
    lost = loss(run, fault)
    return [
        event["reason"]
        for event in run.events("replica_stalled")
        if f"replica-{event['replica']}" == lost["worker"]
        and lost["monotonic_s"] - 1 < event["monotonic_s"] <= lost["monotonic_s"]
    ]


def test_each_lost_replica_is_replaced_and_costs_no_sample(lost_replicas):
    replaced = [event["replaced"] for event in lost_replicas.events("worker_lost")]
    assert replaced[: len(FAULTS)] == [True] * len(FAULTS)
    assert lost_replicas.summary["samples"]["failed"] == 0
    assert lost_replicas.summary["samples"]["trained"] > 0


def test_a_replica_that_answers_and_samples_nothing_is_found_by_its_tokens(lost_replicas):
    """It loads weights and answers for its counters, so only its tokens can tell."""
    took_s = loss(lost_replicas, "silent")["monotonic_s"] - happened_s(lost_replicas, "silent")
    # A check every eighth of the limit; the first and the last may each come just too early.
    assert took_s < STALL_S + STALL_S / 4 + LATE_S
    (reason,) = stalls(lost_replicas, "silent")
    assert "no token for" in reason
    assert "no answer" not in reason


def test_a_replica_that_is_stuck_in_a_step_is_found(lost_replicas):
    took_s = loss(lost_replicas, "stuck")["monotonic_s"] - happened_s(lost_replicas, "stuck")
    # The next weights wait for the step: found by whichever of the two limits ends first, and at
    # the latest by the second, which may begin just before the end of the first.
    assert took_s < STALL_S + SYNC_S + STALL_S / 4 + LATE_S


def test_a_replica_whose_fetch_of_weights_never_returns_is_found_by_its_limit(lost_replicas):
    lost, began_s = loss(lost_replicas, "never-loads"), happened_s(lost_replicas, "never-loads")
    assert "did not load version" in lost["cause"]
    assert "health.sync_timeout_s" in lost["cause"]
    assert lost["monotonic_s"] - began_s < SYNC_S + LATE_S
    # The other replica took newer weights meanwhile, and training went on under them.
    meanwhile = [
        event
        for event in lost_replicas.events("weights_activated")
        if f"replica-{event['replica']}" != lost["worker"]
        and began_s < event["monotonic_s"] < lost["monotonic_s"]
    ]
    assert meanwhile


def test_a_replica_that_is_killed_or_stopped_is_found(lost_replicas):
    assert "the process is gone" in loss(lost_replicas, "killed")["cause"]
    (reason,) = stalls(lost_replicas, "stopped")
    assert "no answer" in reason


def test_a_rollout_side_that_is_killed_again_and_again_ends_the_run_by_name(lost_replicas):
    assert lost_replicas.code == 5, lost_replicas.err
    assert lost_replicas.summary["status"] == "failed"
    cause = lost_replicas.summary["cause"]
    assert "the process is gone" in cause
    assert "health.max_restarts" in cause
    assert lost_replicas.events("worker_lost")[-1]["replaced"] is False
