"""A run without any staleness, with a prompt that is too long."""

import json
from collections import Counter

import pytest

from tests.audit import audit
from tests.e2e.checks import check_samples
from tests.e2e.runs import ROOT, Finished, start

pytestmark = pytest.mark.e2e


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
