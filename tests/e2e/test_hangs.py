"""Hangs injected into real runs: each recovers or ends as documented, within its limit, by name."""

import signal

import psutil
import pytest

from tests.e2e.runs import ROOT, freewheel, start

pytestmark = pytest.mark.e2e

USER_CODE = ROOT / "tests/e2e/user_code"
QUICK = {
    "rollout": {"timeout_s": 6, "reward_timeout_s": 2},
    "health": {"replica_stall_s": 4, "grace_s": 2, "loop_blocked_s": 1, "loop_blocked_end_s": 4},
    "trainer": {"total_training_steps": 12, "test_freq": 0, "val_before_train": False},
}


def quick(**changes):
    return {name: {**section, **changes.get(name, {})} for name, section in QUICK.items()} | {
        name: section for name, section in changes.items() if name not in QUICK
    }


def worker(live, name):
    """The process of a worker, by Ray's title of it."""
    for process in psutil.Process(live.process.pid).children(recursive=True):
        if process.name().startswith("ray::") and name in process.name():
            return process
    raise AssertionError(f"no process of {name}: {live.started}")


@pytest.mark.parametrize("environment", ["NeverReturns", "IgnoresCancellation"])
def test_a_rollout_that_hangs_gives_its_slot_back_at_its_deadline(tmp_path, environment):
    live = start(
        tmp_path,
        quick(rollout={"environment": f"blocking_environment:{environment}"}),
        python_path=USER_CODE,
    )
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    rows = {row["sample_id"]: row for row in finished.rows("samples")}
    hung = rows["2-1"]
    assert (hung["status"], hung["failure"]) == ("failed", "timeout")
    assert hung["ended_s"] - hung["started_s"] < 6 + 5
    assert f"blocking_environment:{environment}" in hung["message"]
    assert {rows[f"2-{i}"]["status"] for i in (0, 2, 3)} == {"trained"}


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


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_replica_that_stops_or_dies_is_replaced(tmp_path, number):
    live = start(tmp_path, quick(trainer={"total_training_steps": 5000}))
    live.wait_for_event("weights_published", count=4)
    worker(live, "Replica").send_signal(number)
    live.wait_for_event("worker_lost", timeout_s=4 + 2 + 5)
    live.wait_for_event("replica_up", count=3)
    live.wait_for_event("weights_published", count=20)
    live.send(signal.SIGINT)
    finished = live.finish()
    assert finished.code == 130, finished.err
    assert live.left_over() == []
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"]["failed"] == 0
    if number == signal.SIGSTOP:
        (event,) = finished.events("replica_stalled")
        assert "no answer" in event["reason"]


def test_a_rollout_worker_that_dies_is_replaced(tmp_path):
    live = start(tmp_path, quick(trainer={"total_training_steps": 40}))
    live.wait_for_event("weights_published", count=4)
    worker(live, "RolloutWorker").kill()
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    assert finished.summary["restarts"] == 1
    assert finished.summary["samples"]["failed"] == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_trainer_that_stops_or_dies_is_replaced_and_catches_up(tmp_path, number):
    changes = quick(trainer={"total_training_steps": 60, "save_freq": 20})
    changes["health"] |= {"train_step_timeout_s": 6, "sync_timeout_s": 6}
    live = start(tmp_path, changes)
    live.wait_for_event("weights_published", count=30)
    worker(live, "Trainer").send_signal(number)
    live.wait_for_event("worker_lost", timeout_s=6 + 5)
    live.wait_for_event("trainer_replayed", timeout_s=90)
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    (event,) = finished.events("trainer_replayed")
    assert event["from_step"] == 20
    assert event["to_step"] >= 28
    assert finished.summary["restarts"] == 1
    assert finished.summary["steps"] == 60
    assert finished.summary["samples"]["trained"] == 60 * 4 * 4
    assert [row["step"] for row in finished.rows("metrics")] == list(range(1, 61))


def test_a_blocked_control_plane_is_ended_from_outside_with_the_frame(tmp_path):
    live = start(tmp_path, quick(), python_path=USER_CODE, module="blocked_control_plane")
    finished = live.finish(timeout_s=90)
    assert finished.code == 4, finished.err
    assert live.left_over() == []
    cause = finished.summary["cause"]
    assert "the event loop has not turned" in cause
    assert "block_at_step_3" in cause
    assert finished.summary["steps"] == 3
    (report,) = (finished.folder / "hang").iterdir()
    stacks = {path.name for path in (report / "stacks").iterdir()}
    assert {"control-plane.txt", "trainer-0.txt", "replica-0.txt", "worker-0.txt"} <= stacks
    assert "block_at_step_3" in (report / "stacks" / "control-plane.txt").read_text()
    assert "block_at_step_3" in (report / "summary.txt").read_text()


def test_an_unwritable_checkpoint_folder_ends_the_run_by_name(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    finished = start(tmp_path, quick(trainer={"save_freq": 3})).finish()
    assert finished.code == 7, finished.err
    assert "checkpoints" in finished.summary["cause"]
