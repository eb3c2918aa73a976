"""Training runs with vLLM: `make test-vllm`. In-flight updates, validation beside it, a lost engine."""

import importlib.util
import time

import psutil
import pytest

from tests.e2e.runs import LiveRun, start

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
VLLM = {
    "rollout": {"engine": "vllm", "timeout_s": 120},
    "validation": {"timeout_s": 240},
    "health": {"startup_timeout_s": 400, "max_logprob_difference": 1e-3, "replica_stall_s": 30},
}


def _engines(run: LiveRun) -> list[psutil.Process]:
    children = psutil.Process(run.process.pid).children(recursive=True)
    return [child for child in children if "VLLM" in child.name()]


def _check(finished, steps):
    rows = finished.rows("metrics")
    assert finished.code == 0, finished.err
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    measured = [row for row in rows if row["engine_mismatch/num_tokens"]]
    assert measured
    assert max(row["engine_mismatch/logprobs_diff_max"] for row in measured) < 1e-3
    for validation in finished.rows("validations"):
        assert validation["status"] == "complete"
        assert set(validation["response_versions"]) == {str(validation["policy_version"])}


def test_a_run_trains_and_validates_under_pinned_versions(tmp_path):
    run = start(tmp_path, VLLM)
    finished = run.finish(timeout_s=800)
    _check(finished, steps=8)
    assert len(finished.rows("validations")) == 3
    # Weights changed under rollouts in flight.
    rows = finished.rows("metrics")
    assert max(row["fully_async/partial/max_partial_span"] for row in rows) >= 1
    assert run.left_over() == []


def test_an_engine_that_is_killed_is_replaced_and_the_run_completes(tmp_path):
    run = start(tmp_path, VLLM)
    run.wait_for_event("weights_activated", count=4, timeout_s=400)
    victim = _engines(run)[0]
    victim.kill()
    began_s = time.monotonic()
    run.wait_for_event("replica_up", count=3, timeout_s=400)
    assert time.monotonic() - began_s < 390
    _check(run.finish(timeout_s=800), steps=8)
    assert run.left_over() == []
