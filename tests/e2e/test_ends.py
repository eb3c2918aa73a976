"""How a run ends before its last step: stopped and resumed, stopped at once, or by a cause."""

import json
import signal
import time
from collections import Counter

import pytest

from tests.audit import audit
from tests.e2e.checks import check_validations
from tests.e2e.hangs.common import USER_CODE
from tests.e2e.runs import resume, start

pytestmark = pytest.mark.e2e


def test_stopped_while_a_validation_hangs_and_resumed_to_the_end(tmp_path):
    """One held-out trial never returns: it costs no checkpoint, no stop and no sample."""
    changes = {
        "rollout": {"environment": "hanging_environment:HangsInValidation", "replicas": 2},
        "validation": {"trial_timeout_s": 90, "timeout_s": 120, "n": 1},
        "data": {"train_max_samples": 26},
        "trainer": {
            "total_training_steps": None,
            "total_epochs": 2,
            "val_before_train": False,
            "test_freq": 4,
        },
    }
    live = start(tmp_path, changes, python_path=USER_CODE)
    live.wait_for_event("weights_published", count=7)
    live.wait_for_event("checkpoint_saved")
    # The validation that is due at the same step has begun, and does not end.
    assert live.count("pinned") > live.count("unpinned")
    assert not (tmp_path / "run" / "validations.jsonl").read_text()
    live.send(signal.SIGINT)
    stopped = live.finish(timeout_s=40)
    assert stopped.code == 130, stopped.err
    assert live.left_over() == []
    assert (stopped.summary["status"], stopped.summary["exit_code"]) == ("stopped", 130)
    assert "freewheel resume" in stopped.err
    assert audit(stopped.folder) == []
    assert 6 <= stopped.summary["steps"] < 13
    assert stopped.summary["checkpoints"][0] == 4
    latest = stopped.folder / "checkpoints" / "latest"
    due = json.loads((latest / "control.json").read_text())["validations"][0]
    assert due["version"] == 4
    assert len(due["progress"]["done"]) > 0
    assert "trainer/version_000004.safetensors" in (latest / "manifest.json").read_text()

    live = resume(stopped.folder, "validation.trial_timeout_s=5", python_path=USER_CODE)
    done = live.finish()
    assert done.code == 0, done.err
    assert live.left_over() == []
    assert audit(done.folder) == []
    samples = done.rows("samples")
    by_epoch = Counter((row["epoch"], row["prompt_index"]) for row in samples)
    assert by_epoch == {(epoch, prompt): 4 for epoch in range(2) for prompt in range(26)}
    assert {row["status"] for row in samples} == {"trained"}
    assert [row["step"] for row in done.rows("metrics")] == list(range(1, 14))
    times = [row["time_s"] for row in done.rows("metrics")]
    assert times == sorted(times)
    # The validation went on under its version, with what was done of it.
    assert 4 in [row["version"] for row in done.events("weights_taken_back")]
    validations = {row["step"]: row for row in done.rows("validations")}
    assert {4, 13} <= set(validations)
    assert validations[4]["policy_version"] == 4
    assert validations[4]["started_s"] == round(due["progress"]["started_s"], 6)
    for row in validations.values():
        if row["status"] != "skipped":
            assert (row["status"], row["n_done"], row["n_timeout"]) == ("partial", 15, 1)
            assert row["score_lower"] < row["score_upper"]
    check_validations(done)


def test_a_second_sigint_ends_at_once(tmp_path):
    # The stop cannot end by itself: it waits for a checkpoint whose writing hangs.
    changes = {"trainer": {"total_training_steps": 500}}
    live = start(tmp_path, changes, python_path=USER_CODE, module="hanging_disk")
    live.wait_for_event("checkpoint_cut", count=2)
    live.send(signal.SIGINT)
    live.wait_for_event("stop_requested")
    time.sleep(0.7)  # noqa: TID251 - two signals within half a second are one
    live.send(signal.SIGINT)
    finished = live.finish(timeout_s=10)
    assert finished.code == 130
    assert live.left_over() == []
    assert (finished.summary["status"], finished.summary["exit_code"]) == ("stopped", 130)
    assert "a second signal" in finished.summary["cause"]
    assert finished.summary["samples"]["trained"] > 0


@pytest.mark.parametrize(
    ("number", "code", "limit_s"),
    [pytest.param(signal.SIGINT, 130, 1, marks=pytest.mark.long), (signal.SIGTERM, 143, 4)],
)
def test_a_stop_ends_the_process_within_its_limit(tmp_path, number, code, limit_s):
    """All of it has one deadline: what is under way, its checkpoint, the records, the workers."""
    changes = {
        "trainer": {"total_training_steps": 500, "save_freq": 0},
        "health": {"shutdown_timeout_s": limit_s},
    }
    live = start(tmp_path, changes)
    live.wait_for_event("weights_published", count=3)
    live.send(number)
    finished = live.finish(timeout_s=limit_s + 5)  # of the machine's, not of the run's
    assert finished.code == code, finished.err
    assert live.left_over() == []
    assert (finished.summary["status"], finished.summary["exit_code"]) == ("stopped", code)


def test_a_non_finite_loss_ends_the_run_with_its_cause(tmp_path):
    finished = start(tmp_path, {"actor": {"optim": {"lr": 1e30}}}).finish()
    assert finished.code == 6, finished.err
    assert finished.summary["cause"].startswith("TrainingDivergedError")


def test_what_the_cluster_can_never_hold_is_refused_by_name(tmp_path):
    live = start(tmp_path, {"rollout": {"device": "cuda", "num_gpus": 3}})
    finished = live.finish()
    assert finished.code == 3, finished.err
    assert "GPU" in finished.err
    assert live.left_over() == []
