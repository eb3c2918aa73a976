"""Replicas that hang or die: each is found by its own limit and replaced."""

import signal

import pytest

from tests.e2e.hangs.common import LATE_S, quick, workers
from tests.e2e.runs import start

pytestmark = pytest.mark.e2e


def _quick(**changes):
    """One replica more than the one that fails."""
    changes = quick(**changes)
    changes["rollout"]["replicas"] = 2
    changes["async_training"]["concurrent_samples_per_replica"] = 6
    return changes


def test_replicas_that_die_or_stop_are_replaced(tmp_path):
    live = start(tmp_path, _quick(trainer={"total_training_steps": 5000}))
    live.wait_for_event("weights_published", count=4)
    workers(live, "Replica")[0].kill()
    live.wait_for_event("replica_up", count=3)
    workers(live, "Replica")[0].send_signal(signal.SIGSTOP)
    live.wait_for_event("worker_lost", count=2, timeout_s=4 + 2 + LATE_S)
    live.wait_for_event("replica_up", count=4)
    live.wait_for_event("weights_published", count=20)
    live.send(signal.SIGINT)
    finished = live.finish()
    assert finished.code == 130, finished.err
    assert live.left_over() == []
    assert finished.summary["restarts"] == 2
    assert finished.summary["samples"]["failed"] == 0
    (event,) = finished.events("replica_stalled")
    assert "no answer" in event["reason"]


STOPPED_ENGINES = {
    # It loads weights and answers for its counters, so only its tokens can tell.
    "SamplesNothing": ("silent", 4),
    # The next weights wait for the step: found by whichever of the two limits ends first, and at
    # the latest by the second, which may begin just before the end of the first.
    "StuckInAStep": ("stuck", 4 + 6),
}


@pytest.mark.parametrize("engine", STOPPED_ENGINES)
def test_a_replica_that_answers_and_produces_nothing_is_replaced(tmp_path, faults, engine):
    fault, limit_s = STOPPED_ENGINES[engine]
    changes = _quick(trainer={"total_training_steps": 5000}, health={"sync_timeout_s": 6})
    # A rollout's own deadline must not be what ends the wait.
    changes["rollout"]["timeout_s"] = 60
    live = faults.start(tmp_path, changes, replica=f"faulty_engines:{engine}")
    live.wait_for_event("worker_lost")
    live.wait_for_event("replica_up", count=3)
    live.wait_for_event("weights_published", count=12)
    live.send(signal.SIGINT)
    finished = live.finish()
    assert finished.code == 130, finished.err
    assert live.left_over() == []
    (lost,) = finished.events("worker_lost")
    # A check every eighth of the limit; the first and the last may each come just too early.
    assert lost["monotonic_s"] - faults.happened_s(fault) < limit_s + 4 / 4 + LATE_S
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"]["failed"] == 0
    if engine == "SamplesNothing":
        (stalled,) = finished.events("replica_stalled")
        assert f"replica-{stalled['replica']}" == lost["worker"]
        assert "no token for" in stalled["reason"]
        assert "no answer" not in stalled["reason"]


def test_a_replica_whose_fetch_of_weights_never_returns_is_replaced(tmp_path, faults):
    changes = _quick(trainer={"total_training_steps": 5000}, health={"sync_timeout_s": 4})
    live = faults.start(tmp_path, changes, replica="faulty_engines:NeverLoads")
    live.wait_for_event("worker_lost")
    live.wait_for_event("replica_up", count=3)
    live.wait_for_event("weights_published", count=12)
    live.send(signal.SIGINT)
    finished = live.finish()
    assert finished.code == 130, finished.err
    assert live.left_over() == []
    (lost,) = finished.events("worker_lost")
    assert "did not load version" in lost["cause"]
    assert "health.sync_timeout_s" in lost["cause"]
    assert lost["monotonic_s"] - faults.happened_s("never-loads") < 4 + LATE_S
    # The other replica took newer weights meanwhile, and training went on under them.
    meanwhile = [
        event
        for event in finished.events("weights_activated")
        if f"replica-{event['replica']}" != lost["worker"]
        and faults.happened_s("never-loads") < event["monotonic_s"] < lost["monotonic_s"]
    ]
    assert meanwhile
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"]["failed"] == 0


def test_a_rollout_side_that_is_killed_again_and_again_ends_the_run_by_name(tmp_path):
    changes = _quick(trainer={"total_training_steps": 5000}, health={"max_restarts": 3})
    live = start(tmp_path, changes)
    live.wait_for_event("weights_published", count=4)
    for process in workers(live, "Replica", "RolloutWorker"):
        process.kill()
    live.wait_for_event("replica_up", count=4)
    for process in workers(live, "Replica", "RolloutWorker"):
        process.kill()
    finished = live.finish(timeout_s=60)
    assert finished.code == 5, finished.err
    assert live.left_over() == []
    assert finished.summary["status"] == "failed"
    cause = finished.summary["cause"]
    assert "the process is gone" in cause
    assert "health.max_restarts" in cause
    assert finished.events("worker_lost")[-1]["replaced"] is False
