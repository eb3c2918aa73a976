"""User code that hangs: each case ends at its own limit, and the run goes on."""

import pytest

from tests.e2e.hangs.common import LATE_S, USER_CODE, quick, workers
from tests.e2e.runs import freewheel, start

pytestmark = pytest.mark.e2e


def test_one_environment_of_32_that_hangs_gives_its_slot_back_at_its_deadline(tmp_path):
    # Eight groups of four may be open: 32 rollouts. More cannot start until the slot is back.
    live = start(
        tmp_path,
        quick(
            rollout={"environment": "blocking_environment:Hangs"},
            async_training={"staleness_threshold": 1},
        ),
        python_path=USER_CODE,
    )
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    rows = {row["sample_id"]: row for row in finished.rows("samples")}
    for group in (2, 14):
        hung = rows[f"{group}-1"]
        assert (hung["status"], hung["failure"]) == ("failed", "timeout")
        assert hung["ended_s"] - hung["started_s"] < 6 + LATE_S
        assert "blocking_environment:Hangs" in hung["message"]
        # The group goes on with those that are there; nothing else is lost.
        assert {rows[f"{group}-{i}"]["status"] for i in (0, 2, 3)} == {"trained"}
    assert finished.summary["failures"] == {"timeout": 2}
    assert finished.summary["samples"]["open"] == 0
    assert finished.summary["samples"]["trained"] == 12 * 4 * 4 - 2


def test_rewards_and_tools_that_never_return_end_at_their_own_limits(tmp_path):
    limits = {"reward_timeout_s": 2, "tool_timeout_s": 3, "timeout_s": 7}
    live = start(
        tmp_path,
        quick(
            rollout={
                "environment": "hanging_calls:CallsWhatHangs",
                "reward": "hanging_calls:score",
                **limits,
            }
        ),
        python_path=USER_CODE,
    )
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    rows = {row["sample_id"]: row for row in finished.rows("samples")}
    expected = {
        "2-1": ("reward_timeout_s", "hanging_calls:score"),
        "3-1": ("tool_timeout_s", "ask_a_server"),
        "4-1": ("tool_timeout_s", "ask_a_program"),
        **{f"5-{i}": ("timeout_s", "hanging_calls:CallsWhatHangs") for i in range(4)},
    }
    for sample_id, (limit, culprit) in expected.items():
        row = rows[sample_id]
        assert (row["status"], row["failure"]) == ("failed", "timeout"), row
        assert culprit in row["message"]
        assert row["ended_s"] - row["started_s"] < limits[limit] + LATE_S
    for group in (2, 3, 4):
        assert {rows[f"{group}-{i}"]["status"] for i in (0, 2, 3)} == {"trained"}
    assert finished.summary["failures"] == {"timeout": len(expected)}
    # The group of which nothing is left is replaced by another one.
    assert finished.summary["samples"]["trained"] == 12 * 4 * 4 - 3
    assert finished.summary["restarts"] == 0


def test_a_rollout_that_blocks_its_loop_is_named_and_its_worker_replaced(tmp_path):
    changes = quick(rollout={"environment": "blocking_environment:SleepsOnTheLoop"})
    # The block ends the rollout, not its deadline.
    changes["rollout"]["timeout_s"] = 20
    finished = start(tmp_path, changes, python_path=USER_CODE).finish()
    assert finished.code == 0, finished.err
    first = finished.events("loop_blocked")[0]
    assert (first["process"], first["sample_id"]) == ("rollout-worker-0", "2-1")
    assert "time.sleep(60)" in first["cause"]
    assert "blocking_environment.py" in first["cause"]
    # health.loop_blocked_s, and the 1 s within which a watch is to notice.
    assert 1 <= first["blocked_s"] < 1 + 1
    rows = {row["sample_id"]: row for row in finished.rows("samples")}
    hung = rows["2-1"]
    assert (hung["status"], hung["failure"]) == ("failed", "timeout")
    for part in ("blocking_environment:SleepsOnTheLoop", "in run", "time.sleep(60)", "2-1", "4 s"):
        assert part in hung["message"]
    assert {rows[f"2-{i}"]["status"] for i in (0, 2, 3)} == {"trained"}
    assert finished.summary["failures"] == {"timeout": 1}
    assert finished.summary["restarts"] == 1
    (lost,) = finished.events("worker_lost")
    assert "time.sleep(60)" in lost["cause"]
    reports = [path for path in (finished.folder / "hang").iterdir() if "worker" in path.name]
    assert "time.sleep(60)" in (reports[0] / "summary.txt").read_text()
    assert "time.sleep(60)" in freewheel("why", str(finished.folder)).stdout


def test_a_worker_whose_serving_loop_sleeps_is_named_and_replaced(tmp_path, faults):
    live = faults.start(tmp_path, quick(), rollout_worker="faulty_workers:BlocksItsServingLoop")
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    first = finished.events("loop_blocked")[0]
    assert (first["process"], first["loop"]) == ("rollout-worker-0", "serving")
    for part in ("run_group (", "faulty_workers.py", "time.sleep(60)"):
        assert part in first["cause"]
    assert first["monotonic_s"] - faults.happened_s("blocked") < 1 + LATE_S
    (lost,) = finished.events("worker_lost")
    assert "time.sleep(60)" in lost["cause"]
    assert lost["monotonic_s"] - faults.happened_s("blocked") < 4 + LATE_S
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"]["failed"] == 0
    assert "time.sleep(60)" in freewheel("why", str(finished.folder)).stdout


def test_a_rollout_worker_whose_interpreter_is_held_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKED_ONCE", str(tmp_path / "blocked"))
    changes = quick(rollout={"environment": "blocking_environment:HoldsTheLock"})
    changes["rollout"]["timeout_s"] = 40
    finished = start(tmp_path, changes, python_path=USER_CODE).finish()
    assert finished.code == 0, finished.err
    silent = [row for row in finished.events("loop_blocked") if row["call"] == "no answer"]
    assert {row["process"] for row in silent} == {"rollout-worker-0"}
    (lost,) = finished.events("rollout_worker_lost")
    assert "native code holds the interpreter's lock" in lost["reason"]
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"]["failed"] == 0
    rows = {row["sample_id"]: row for row in finished.rows("samples")}
    assert {rows[f"2-{i}"]["status"] for i in range(4)} == {"trained"}


def test_a_rollout_worker_that_dies_is_replaced(tmp_path):
    live = start(tmp_path, quick(trainer={"total_training_steps": 40}))
    live.wait_for_event("weights_published", count=4)
    workers(live, "RolloutWorker")[0].kill()
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"]["failed"] == 0
