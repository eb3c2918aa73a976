"""A trainer, or the disk it writes to, that hangs or dies: replaced, or the run ends by name."""

import signal

import pytest

from freewheel.checkpoint import read_checkpoint
from tests.audit import audit
from tests.e2e.hangs.common import LATE_S, USER_CODE, quick, workers
from tests.e2e.runs import start

pytestmark = pytest.mark.e2e


def test_trainers_that_die_or_stop_are_replaced_and_catch_up(tmp_path):
    changes = quick(trainer={"total_training_steps": 60, "save_freq": 15})
    changes["health"] |= {"train_step_timeout_s": 6, "sync_timeout_s": 6}
    live = start(tmp_path, changes)
    live.wait_for_event("weights_published", count=20)
    live.wait_for_event("checkpoint_saved")
    workers(live, "Trainer")[0].kill()
    live.wait_for_event("trainer_replayed", timeout_s=90)
    live.wait_for_event("weights_published", count=40)
    live.wait_for_event("checkpoint_saved", count=2)
    workers(live, "Trainer")[0].send_signal(signal.SIGSTOP)
    live.wait_for_event("worker_lost", count=2, timeout_s=6 + LATE_S)
    live.wait_for_event("trainer_replayed", count=2, timeout_s=90)
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    killed, stopped = finished.events("trainer_replayed")
    # The newest checkpoint, which on a slow machine is not yet the one that the trainer cut last.
    assert 15 <= killed["from_step"] < stopped["from_step"]
    assert killed["to_step"] >= 18
    assert stopped["to_step"] >= 36
    assert finished.summary["restarts"] == 2
    assert finished.summary["steps"] == 60
    assert finished.summary["samples"]["trained"] == 60 * 4 * 4
    assert [row["step"] for row in finished.rows("metrics")] == list(range(1, 61))


@pytest.mark.long
def test_a_trainer_that_cannot_be_brought_back_costs_the_way_from_the_checkpoint(tmp_path):
    changes = quick(trainer={"total_training_steps": 40, "save_freq": 10})
    changes["health"] |= {"trainer_replay_bytes": 1}
    live = start(tmp_path, changes)
    live.wait_for_event("checkpoint_saved")
    live.wait_for_event("weights_published", count=15)
    workers(live, "Trainer")[0].kill()
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    assert "health.trainer_replay_bytes=1" in finished.err
    assert len(finished.events("run_started")) == 2
    assert finished.summary["steps"] == 40
    assert finished.summary["samples"]["trained"] == 40 * 4 * 4
    assert [row["step"] for row in finished.rows("metrics")] == list(range(1, 41))
    assert audit(finished.folder) == []


@pytest.mark.long
def test_an_unwritable_checkpoint_folder_ends_the_run_by_name(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    finished = start(tmp_path, quick(trainer={"save_freq": 3})).finish()
    assert finished.code == 7, finished.err
    assert "checkpoints" in finished.summary["cause"]


def check_that_the_first_is_whole(finished):
    """Step 4 is in its place, and `latest` names it; of step 8 there is nothing to read."""
    assert finished.summary["checkpoints"] == [4]
    folder = finished.folder / "checkpoints"
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "step_000004",
        "latest",
    }
    assert read_checkpoint(folder / "latest").step == 4


def test_a_full_disk_ends_the_run_by_name_and_the_checkpoint_before_is_whole(tmp_path, faults):
    changes = quick(trainer={"total_training_steps": 5000, "save_freq": 4})
    live = faults.start(tmp_path, changes, trainer="faulty_trainers:DiskFull")
    finished = live.finish()
    assert finished.code == 7, finished.err
    assert live.left_over() == []
    assert "step 8 cannot be written" in finished.summary["cause"]
    assert "No space left on device" in finished.summary["cause"]
    check_that_the_first_is_whole(finished)


def test_a_checkpoint_whose_writing_hangs_ends_the_run_at_its_limit(tmp_path, faults):
    changes = quick(
        trainer={"total_training_steps": 5000, "save_freq": 4},
        health={"checkpoint_timeout_s": 5},
    )
    live = faults.start(tmp_path, changes, trainer="faulty_trainers:DiskHangs")
    check_hung_write(live.finish(), "not written within 5 s")
    assert live.left_over() == []


@pytest.mark.long
def test_a_disk_of_the_control_plane_that_hangs_ends_the_run_at_the_same_limit(tmp_path):
    changes = quick(
        trainer={"total_training_steps": 5000, "save_freq": 4},
        health={"checkpoint_timeout_s": 5},
    )
    live = start(tmp_path, changes, python_path=USER_CODE, module="hanging_disk")
    check_hung_write(live.finish(), "manifest not written within 5 s")
    assert live.left_over() == []


def check_hung_write(finished, cause):
    """The run trained on beside the hanging write, then ended with its name."""
    assert finished.code == 7, finished.err
    for part in ("checkpoint of step 8", cause, "health.checkpoint_timeout_s"):
        assert part in finished.summary["cause"]
    cut = next(event for event in finished.events("checkpoint_cut") if event["step"] == 8)
    (ended,) = finished.events("run_ended")
    assert ended["monotonic_s"] - cut["monotonic_s"] < 5 + LATE_S
    assert finished.summary["steps"] > 8
    check_that_the_first_is_whole(finished)
