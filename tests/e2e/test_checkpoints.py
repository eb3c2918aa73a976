"""Checkpoints of real runs: a crash while one is written, resume from a named one, the commands."""

import json
from collections import Counter

import pytest

from tests.e2e.runs import ROOT, freewheel, resume, start
from tests.e2e.test_training import check_samples

pytestmark = pytest.mark.e2e

USER_CODE = ROOT / "tests/e2e/user_code"


def check_ledger(run, *, num_prompts: int) -> None:
    """Every prompt of the one epoch was trained on just once, in steps that follow each other."""
    check_samples(run)
    rows = run.rows("samples")
    assert Counter(row["prompt_index"] for row in rows) == dict.fromkeys(range(num_prompts), 4)
    assert {row["status"] for row in rows} == {"trained"}
    steps = [row["step"] for row in run.rows("metrics")]
    assert steps == list(range(1, num_prompts // 4 + 1))
    trained = Counter(row["trained_step"] for row in rows)
    assert trained == dict.fromkeys(steps, 16)
    assert run.summary["samples"]["trained"] == 4 * num_prompts


@pytest.mark.timeout(900)  # three whole runs
def test_killed_while_a_checkpoint_is_written_then_resumed_then_resumed_from_an_older_one(tmp_path):
    changes = {
        "trainer": {
            "total_training_steps": None,
            "total_epochs": 1,
            "save_freq": 2,
            "test_freq": 0,
            "val_before_train": False,
            "val_at_end": False,
        },
        "data": {"train_max_samples": 32},
        "rollout": {"replicas": 2},
        "checkpoint": {"keep": 9},
    }
    live = start(tmp_path, changes, python_path=USER_CODE, module="crashing_checkpoint")
    crashed = live.finish()
    assert crashed.code == 9, crashed.err
    root = crashed.folder / "checkpoints"
    assert (root / ".writing-step_000004" / "manifest.json").is_file()
    assert not (root / "step_000004").exists()
    assert (root / "latest").readlink().name == "step_000002"

    live = resume(crashed.folder)
    done = live.finish()
    assert done.code == 0, done.err
    check_ledger(done, num_prompts=32)
    assert done.events("run_started")[1]["resumed_from"].endswith("step_000002")
    assert done.summary["checkpoints"] == [2, 4, 6, 8]
    listed = freewheel("checkpoints", str(done.folder), "--verify", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)["checkpoints"]
    assert [(row["step"], row["problem"]) for row in rows] == [(n, None) for n in (2, 4, 6, 8)]

    # From the middle, on fewer replicas and more rollout workers.
    live = resume(done.folder, "--from", "4", "rollout.replicas=1", "rollout.num_workers=2")
    again = live.finish()
    assert again.code == 0, again.err
    assert live.left_over() == []
    check_ledger(again, num_prompts=32)
    moved = sorted(path.name for path in (done.folder / "superseded").glob("step_*"))
    assert moved == ["step_000006.1", "step_000008.1"]
    assert again.summary["checkpoints"] == [2, 4, 6, 8]

    refused = freewheel("resume", str(done.folder), "--from", "5")
    assert refused.returncode == 2
    assert "there are: 2, 4, 6, 8" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_broken_checkpoint_is_passed_over_and_a_named_one_is_refused(tmp_path):
    changes = {
        "trainer": {
            "total_training_steps": 4,
            "save_freq": 2,
            "test_freq": 0,
            "val_before_train": False,
            "val_at_end": False,
        }
    }
    done = start(tmp_path, changes).finish()
    assert done.code == 0, done.err
    path = done.folder / "checkpoints/step_000004/hf/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    summary = done.summary
    refused = freewheel("resume", str(done.folder), "--from", "4")
    assert refused.returncode == 7
    assert "step_000004/hf/model.safetensors: has " in refused.stderr
    assert "--from 2" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert done.summary == summary
    other = freewheel("resume", str(done.folder), "rollout.n=5")
    assert other.returncode == 7
    assert "rollout.n=5, but the run has 4" in other.stderr
    resumed = resume(done.folder).finish()
    assert resumed.code == 0, resumed.err
    assert "going on from the previous good one: step 2" in resumed.err
    assert [row["step"] for row in resumed.rows("metrics")] == [1, 2, 3, 4]
    check_samples(resumed)
