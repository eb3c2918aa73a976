"""Training runs with vLLM (`make test-vllm`): in-flight updates, validation, a lost engine."""

import importlib.util
import re
import signal

import psutil
import pytest

from tests.e2e.hangs.common import happened_s, workers
from tests.e2e.runs import LiveRun, start

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
VLLM = {
    "rollout": {"engine": "vllm", "replicas": 2, "timeout_s": 120},
    "validation": {"timeout_s": 240},
    "health": {"startup_timeout_s": 400, "max_logprob_difference": 1e-3, "replica_stall_s": 30},
}


def _by(transfer):
    """With weights that travel this way."""
    if transfer == "nixl":
        pytest.importorskip("nixl")
    return VLLM | {"rollout": VLLM["rollout"] | {"weight_transfer": transfer}}


def _engines(run: LiveRun) -> list[psutil.Process]:
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "VLLM" in child.name()]


def _check(finished, steps):
    rows = finished.rows("metrics")
    assert finished.code == 0, finished.err
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    _check_versions(finished)


def _check_versions(finished):
    """Tokens are of the versions that they carry: the trainer's logprobs under them agree."""
    rows = finished.rows("metrics")
    measured = [row for row in rows if row["engine_mismatch/num_tokens"]]
    assert measured
    assert max(row["engine_mismatch/logprobs_diff_max"] for row in measured) < 1e-3
    for validation in finished.rows("validations"):
        assert validation["status"] == "complete"
        assert set(validation["response_versions"]) == {str(validation["policy_version"])}


@pytest.mark.parametrize("transfer", ["object_store", "nixl"])
def test_a_run_trains_and_validates_under_pinned_versions(tmp_path, transfer):
    run = start(tmp_path, _by(transfer))
    finished = run.finish(timeout_s=800)
    _check(finished, steps=8)
    assert len(finished.rows("validations")) == 3
    assert run.left_over() == []


def test_a_run_outlives_an_engine_that_is_killed(tmp_path):
    run = start(tmp_path, VLLM | {"trainer": {"total_training_steps": 40}})
    run.wait_for_event("replica_up", count=2, timeout_s=400)
    run.wait_for_event("weights_activated", count=5, timeout_s=100)
    _engines(run)[0].kill()
    finished = run.finish(timeout_s=800)
    _check(finished, steps=40)
    # It was found lost by what its calls raised, not by a limit.
    assert not finished.events("replica_stalled")
    (loss,) = finished.events("worker_lost")
    assert "vLLM" in loss["cause"]
    assert loss["replaced"]
    assert run.left_over() == []


def test_a_trainer_that_dies_takes_its_weights_along_and_they_are_published_again(tmp_path):
    changes = _by("nixl") | {"trainer": {"total_training_steps": 60, "test_freq": 20}}
    run = start(tmp_path, changes)
    run.wait_for_event("weights_activated", count=12, timeout_s=400)
    workers(run, "Trainer")[0].kill()
    finished = run.finish(timeout_s=800)
    _check(finished, steps=60)
    assert any(row["worker"] == "trainer" for row in finished.events("worker_lost"))
    assert finished.summary["samples"]["failed"] == 0
    assert run.left_over() == []


STRUCK = {
    "Killed": r"vLLM: (its process \d+ ended|version \d+ was not loaded)",
    "Stopped": r"did not load version \d+ within 20 s \(health.sync_timeout_s\)",
}


@pytest.mark.parametrize("how", STRUCK)
def test_a_run_outlives_an_engine_that_is_struck_while_it_loads_weights(tmp_path, faults, how):
    changes = VLLM | {"trainer": {"total_training_steps": 5000, "test_freq": 20}}
    # The update's own limit is to find the one that stands still.
    changes["health"] = VLLM["health"] | {"sync_timeout_s": 20, "replica_stall_s": 300}
    run = faults.start(tmp_path, changes, replica=f"faulty_vllm:{how}")
    run.wait_for_event("worker_lost", timeout_s=400)
    run.wait_for_event("replica_up", count=3, timeout_s=200)
    run.wait_for_event("validation_done", count=3, timeout_s=100)
    run.send(signal.SIGINT)
    finished = run.finish(timeout_s=200)
    assert finished.code == 130, finished.err
    assert happened_s(finished, "struck") > 0
    (loss,) = finished.events("worker_lost")
    assert re.search(STRUCK[how], loss["cause"]), loss["cause"]
    assert loss["replaced"]
    assert finished.summary["samples"]["failed"] == 0
    _check_versions(finished)
    assert run.left_over() == []
