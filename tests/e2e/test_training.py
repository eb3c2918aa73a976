"""Whole runs on real processes: the contract of the run folder, stop and resume, validation."""

import json
import signal
import time
from collections import Counter

import pytest

from tests.audit import audit
from tests.e2e.hangs.common import USER_CODE
from tests.e2e.runs import ROOT, Finished, freewheel, resume, start

pytestmark = pytest.mark.e2e

TWO = {"replicas": 2}
"""Rollouts go on under new weights on one replica while a validation pins the other."""

SUMMARY_KEYS = {
    "status",
    "exit_code",
    "cause",
    "steps",
    "policy_version",
    "samples",
    "wall_s",
    "trainer_wait_s",
    "rollout_idle_ratio",
    "validations",
    "checkpoints",
}


def check_samples(run: Finished, *, group_size: int = 4) -> None:
    rows = run.rows("samples")
    assert max(Counter(row["sample_id"] for row in rows).values()) == 1
    groups: dict[int, tuple[int, int]] = {}
    for row in rows:
        groups[row["group_id"]] = (row["epoch"], row["prompt_index"])
    assert len(rows) == group_size * len(groups)
    assert max(Counter(groups.values()).values()) == 1


def check_validations(run: Finished) -> None:
    for row in run.rows("validations"):
        if row["status"] != "skipped":
            assert row["response_versions"] == {str(row["policy_version"]): row["n_done"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Finished:
    live = start(tmp_path_factory.mktemp("run"), {"rollout": TWO})
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    assert audit(finished.folder) == []
    return finished


def test_the_summary_tells_the_run(run):
    summary = run.summary
    assert set(summary) >= SUMMARY_KEYS
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("completed", 0, 8)
    assert summary["samples"] == {
        "issued": 128,
        "trained": 128,
        "filtered": 0,
        "failed": 0,
        "set_aside": 0,
        "open": 0,
    }
    assert set(summary["trainer_wait_s"]) == {"samples", "validation", "checkpoint", "sync"}
    assert summary["trainer_wait_s"]["validation"] == 0
    assert summary["checkpoints"] == [4, 8]


def test_every_step_and_sample_is_recorded(run):
    steps = run.rows("metrics")
    assert [row["step"] for row in steps] == list(range(1, 9))
    for row in steps:
        assert {"policy_version", "time_s", "actor/pg_loss", "timing_s/step"} <= set(row)
    check_samples(run)
    assert {row["status"] for row in run.rows("samples")} == {"trained"}


def test_every_validation_has_one_version_and_rollouts_go_on(run):
    check_validations(run)
    rows = run.rows("validations")
    assert sorted(row["step"] for row in rows) == [0, 4, 8]
    assert {row["status"] for row in rows} == {"complete"}
    middle = next(row for row in rows if row["step"] == 4)
    finished = [row["ended_s"] for row in run.rows("samples")]
    assert any(middle["started_s"] < at < middle["ended_s"] for at in finished)


def test_staleness_is_within_its_bound(run):
    versions = {row["step"]: row["policy_version"] for row in run.rows("metrics")}
    for row in run.rows("samples"):
        oldest = min(version for version, _ in row["version_spans"])
        assert 0 <= versions[row["trained_step"]] - oldest <= 1


def test_the_control_plane_is_small(run):
    assert run.max_rss_bytes < 400e6


def test_a_checkpoint_is_a_hugging_face_folder_and_can_be_validated(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = run.folder / "checkpoints" / "latest" / "hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() > 0
    done = freewheel("validate", str(folder.parent), "--out", str(tmp_path / "scored"))
    assert done.returncode == 0, done.stderr
    scored = Finished(0, "", "", tmp_path / "scored", 0)
    check_validations(scored)
    (row,) = scored.rows("validations")
    assert (row["status"], row["step"], row["n_done"]) == ("complete", 8, 32)
    last = next(row for row in run.rows("validations") if row["step"] == 8)
    assert abs(row["score"] - last["score"]) < 0.35


def test_status_tells_of_a_finished_run(run):
    done = freewheel("status", str(run.folder))
    assert done.returncode == 0
    assert "completed" in done.stdout


def test_a_trial_that_never_returns_costs_neither_checkpoint_nor_run(tmp_path):
    changes = {
        "rollout": {"environment": "hanging_environment:HangsInValidation", **TWO},
        "validation": {"trial_timeout_s": 8, "n": 1},
        "trainer": {"val_before_train": False, "test_freq": 4, "total_training_steps": 8},
    }
    live = start(tmp_path, changes, python_path=ROOT / "tests/e2e/user_code")
    live.wait_for_event("checkpoint_saved")
    assert not (tmp_path / "run" / "validations.jsonl").read_text()
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    assert audit(finished.folder) == []
    assert finished.summary["checkpoints"] == [4, 8]
    for row in finished.rows("validations"):
        assert (row["status"], row["n_done"], row["n_timeout"]) == ("partial", 15, 1)
        assert row["score_lower"] < row["score_upper"]


def test_stopped_by_sigint_and_resumed_to_the_end(tmp_path):
    changes = {
        "trainer": {"total_training_steps": None, "total_epochs": 2, "save_freq": 100},
        "data": {"train_max_samples": 26},
    }
    live = start(tmp_path, changes)
    live.wait_for_event("weights_published", count=5)
    live.send(signal.SIGINT)
    stopped = live.finish(timeout_s=40)
    assert stopped.code == 130, stopped.err
    assert live.left_over() == []
    assert (stopped.summary["status"], stopped.summary["exit_code"]) == ("stopped", 130)
    assert "freewheel resume" in stopped.err
    assert audit(stopped.folder) == []
    steps_before = stopped.summary["steps"]
    assert 4 <= steps_before < 13
    live = resume(stopped.folder)
    done = live.finish()
    assert done.code == 0, done.err
    assert live.left_over() == []
    assert audit(done.folder) == []
    rows = done.rows("samples")
    by_epoch = Counter((row["epoch"], row["prompt_index"]) for row in rows)
    assert by_epoch == {(epoch, prompt): 4 for epoch in range(2) for prompt in range(26)}
    assert {row["status"] for row in rows} == {"trained"}
    assert [row["step"] for row in done.rows("metrics")] == list(range(1, 14))
    times = [row["time_s"] for row in done.rows("metrics")]
    assert times == sorted(times)


def test_a_validation_goes_on_over_a_resume_under_its_version(tmp_path):
    changes = {
        "rollout": {"environment": "hanging_environment:HangsInValidation", **TWO},
        "validation": {"trial_timeout_s": 50, "n": 1},
        "trainer": {"test_freq": 0, "total_training_steps": 14, "save_freq": 100},
    }
    user_code = ROOT / "tests/e2e/user_code"
    live = start(tmp_path, changes, python_path=user_code)
    live.wait_for_event("weights_published", count=5)
    live.send(signal.SIGINT)
    stopped = live.finish(timeout_s=40)
    assert stopped.code == 130, stopped.err
    latest = stopped.folder / "checkpoints" / "latest"
    (due,) = json.loads((latest / "control.json").read_text())["validations"]
    num_done = len(due["progress"]["done"])
    assert due["version"] == 0
    assert num_done > 0
    assert "trainer/version_000000.safetensors" in (latest / "manifest.json").read_text()
    done = resume(stopped.folder, "validation.trial_timeout_s=6", python_path=user_code).finish()
    assert done.code == 0, done.err
    assert [row["version"] for row in done.events("weights_taken_back")] == [0]
    row, last = done.rows("validations")
    assert (row["step"], row["n_total"], row["n_done"], row["n_timeout"]) == (0, 16, 15, 1)
    assert row["started_s"] == round(due["progress"]["started_s"], 6)
    assert last["step"] == 14
    check_validations(done)


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory) -> Finished:
    """Two epochs of 13 prompts, one of them too long, without any staleness."""
    folder = tmp_path_factory.mktemp("on_policy")
    lines = (ROOT / "recipes/data/train.jsonl").read_text().splitlines()[:13]
    lines[5] = json.dumps({"prompt": "1+" * 20 + "1=", "ground_truth": "21"})
    data = folder / "train.jsonl"
    data.write_text("\n".join(lines) + "\n")
    changes = {
        "data": {"train_files": str(data)},
        "async_training": {"staleness_threshold": 0, "trigger_parameter_sync_step": 1},
        "trainer": {
            "total_training_steps": None,
            "total_epochs": 2,
            "val_before_train": False,
            "val_at_end": False,
            "test_freq": 0,
        },
    }
    live = start(folder, changes)
    finished = live.finish()
    assert finished.code == 0, finished.err
    assert live.left_over() == []
    assert audit(finished.folder) == []
    return finished


def test_strict_on_policy_is_on_policy(on_policy):
    for row in on_policy.rows("metrics"):
        assert row["training/rollout_probs_diff_max"] < 1e-3
    versions = {row["step"]: row["policy_version"] for row in on_policy.rows("metrics")}
    assert versions == {step: step - 1 for step in range(1, 7)}
    trained = [row for row in on_policy.rows("samples") if row["status"] == "trained"]
    assert len(trained) == 2 * 12 * 4
    for row in trained:
        assert [v for v, _ in row["version_spans"]] == [versions[row["trained_step"]]]


def test_an_over_long_prompt_is_skipped_by_name_and_never_tried(on_policy):
    (event,) = on_policy.events("prompt_dropped")
    assert (event["prompt_index"], event["failure"]) == (5, "over_long_prompt")
    # Its file and row, its length, and the limit.
    for part in ("train.jsonl line 6", "42 tokens", "rollout.max_prompt_length is 16"):
        assert part in event["message"]
    rows = [row for row in on_policy.rows("samples") if row["prompt_index"] == 5]
    assert Counter(row["epoch"] for row in rows) == {0: 4, 1: 4}
    for row in rows:
        assert (row["status"], row["failure"]) == ("filtered", "over_long_prompt")
        assert (row["attempt"], row["num_response_tokens"]) == (0, 0)
    assert on_policy.summary["samples"]["trained"] == 2 * 12 * 4
    check_samples(on_policy)


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
    ("number", "code", "limit_s"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 4)]
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
