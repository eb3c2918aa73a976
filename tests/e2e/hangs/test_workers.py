"""Rollout workers that user code blocks, or that die: each is named and replaced."""

from typing import Any

import pytest

from tests.e2e.hangs.common import LATE_S, Faults, happened_s, quick, workers
from tests.e2e.runs import Finished, freewheel

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def lost_workers(tmp_path_factory) -> Finished:
    """A run whose one rollout worker is blocked in three ways, one after the other, then killed."""
    folder = tmp_path_factory.mktemp("lost_workers")
    changes = quick(
        rollout={"environment": "blocking_environment:BlocksItsWorker"},
        trainer={"total_training_steps": 40},
    )
    # The block ends the rollout, not its deadline.
    changes["rollout"]["timeout_s"] = 40
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(folder, patch)
        live = faults.start(folder, changes, rollout_worker="faulty_workers:BlocksItsServingLoop")
        live.wait_for_event("worker_lost", count=3)
        live.wait_for_event("weights_published", count=live.count("weights_published") + 4)
        workers(live, "RolloutWorker")[0].kill()
        finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    return finished


def blocked(run: Finished, **which: str) -> dict[str, Any]:
    """The first event of these values of a loop that is blocked in a frame of the user's code."""
    return next(
        event
        for event in run.events("loop_blocked")
        if which.items() <= event.items() and "time.sleep(60)" in event["cause"]
    )


def test_each_worker_that_blocks_or_dies_is_replaced(lost_workers):
    assert lost_workers.summary["restarts"] == 4
    assert lost_workers.summary["failures"] == {"timeout": 1}
    on_the_loop, holding, serving, killed = lost_workers.events("worker_lost")
    assert "time.sleep(60)" in on_the_loop["cause"]
    assert "native code holds the interpreter's lock" in holding["cause"]
    assert "time.sleep(60)" in serving["cause"]
    assert "the process is gone" in killed["cause"]


def test_a_rollout_that_blocks_its_loop_is_named(lost_workers):
    first = blocked(lost_workers, sample_id="2-1")
    assert first["process"] == "rollout-worker-0"
    assert "blocking_environment.py" in first["cause"]
    # health.loop_blocked_s, and the 1 s within which a watch is to notice.
    assert 1 <= first["blocked_s"] < 1 + 1
    rows = {row["sample_id"]: row for row in lost_workers.rows("samples")}
    hung = rows["2-1"]
    assert (hung["status"], hung["failure"]) == ("failed", "timeout")
    for part in ("blocking_environment:BlocksItsWorker", "in run", "time.sleep(60)", "2-1", "4 s"):
        assert part in hung["message"]
    assert {rows[f"2-{i}"]["status"] for i in (0, 2, 3)} == {"trained"}
    reports = [path for path in (lost_workers.folder / "hang").iterdir() if "worker" in path.name]
    assert any("time.sleep(60)" in (path / "summary.txt").read_text() for path in reports)
    assert "time.sleep(60)" in freewheel("why", str(lost_workers.folder)).stdout


def test_a_serving_loop_that_sleeps_is_named_within_its_limits(lost_workers):
    first = blocked(lost_workers, loop="serving")
    assert first["process"] == "rollout-worker-0"
    for part in ("run_group (", "faulty_workers.py"):
        assert part in first["cause"]
    began_s = happened_s(lost_workers, "blocked")
    assert first["monotonic_s"] - began_s < 1 + LATE_S
    lost = lost_workers.events("worker_lost")[2]
    assert lost["monotonic_s"] - began_s < 4 + LATE_S


def test_a_worker_whose_interpreter_is_held_is_found_by_its_silence(lost_workers):
    silent = [row for row in lost_workers.events("loop_blocked") if row["call"] == "no answer"]
    assert {row["process"] for row in silent} == {"rollout-worker-0"}
    lost = lost_workers.events("rollout_worker_lost")
    assert any("native code holds the interpreter's lock" in row["reason"] for row in lost)
    # What it was doing is tried again, and nothing is lost.
    rows = {row["sample_id"]: row for row in lost_workers.rows("samples")}
    assert {rows[f"16-{i}"]["status"] for i in range(4)} == {"trained"}
