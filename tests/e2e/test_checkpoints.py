"""Checkpoints of real runs: a crash while one is written, resume from a named one, the commands."""

import json
from collections import Counter

import pytest

from tests.e2e.checks import check_samples
from tests.e2e.runs import ROOT, freewheel, resume, start

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
def test_killed_while_a_checkpoint_is_written_then_resumed_past_a_broken_one_then_from_it(tmp_path):
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
    folder = crashed.folder
    root = folder / "checkpoints"
    assert (root / ".writing-step_000006" / "manifest.json").is_file()
    assert not (root / "step_000006").exists()
    assert (root / "latest").readlink().name == "step_000004"

    weights = root / "step_000004/hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    check_refused(
        folder,
        ["--from", "4"],
        7,
        "step_000004/hf/model.safetensors: has ",
        "--from 2",
    )
    check_refused(folder, ["rollout.n=5"], 7, "rollout.n=5, but the run has 4")

    live = resume(folder)
    done = live.finish()
    assert done.code == 0, done.err
    assert "going on from the previous good one: step 2" in done.err
    check_ledger(done, num_prompts=32)
    assert done.events("run_started")[1]["resumed_from"].endswith("step_000002")
    assert done.summary["checkpoints"] == [2, 4, 6, 8]
    listed = freewheel("checkpoints", str(folder), "--verify", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)["checkpoints"]
    assert [(row["step"], row["problem"]) for row in rows] == [(n, None) for n in (2, 4, 6, 8)]
    check_refused(folder, ["--from", "5"], 2, "there are: 2, 4, 6, 8")

    # From the middle, on fewer replicas and more rollout workers.
    before = set((folder / "superseded").glob("step_*"))
    live = resume(folder, "--from", "4", "rollout.replicas=1", "rollout.num_workers=2")
    again = live.finish()
    assert again.code == 0, again.err
    assert live.left_over() == []
    check_ledger(again, num_prompts=32)
    moved = {
        path.name.split(".")[0] for path in set((folder / "superseded").glob("step_*")) - before
    }
    assert moved == {"step_000006", "step_000008"}
    assert again.summary["checkpoints"] == [2, 4, 6, 8]


def check_refused(folder, arguments, code, *parts):
    """A resume that cannot be ends at once, by name, and changes nothing."""
    path = folder / "summary.json"
    summary = path.read_bytes() if path.exists() else None
    refused = freewheel("resume", str(folder), *arguments)
    assert refused.returncode == code, refused.stderr
    for part in parts:
        assert part in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (path.read_bytes() if path.exists() else None) == summary
