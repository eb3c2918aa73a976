"""A real run, all of its processes killed at once, resumed each time: nothing is lost."""

import json
import random
from collections import Counter

import pytest

from tests.audit import audit
from tests.e2e.kills import Events, Moments, end_frozen, kill_whole
from tests.e2e.runs import ROOT, resume, start

# One life takes about 15 s on two quiet cores, most of it for the start of Ray and the workers.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

LIFE_S = 240
PROMPTS, EPOCHS, GROUP_SIZE = 40, 2, 4
USER_CODE = ROOT / "tests/e2e/user_code"
CHANGES = {
    "data": {"train_max_samples": PROMPTS},
    "rollout": {"reward": "slow_reward:score", "n": GROUP_SIZE, "replicas": 2},
    "actor": {"ppo_mini_batch_size": 2},
    "trainer": {
        "total_training_steps": None,
        "total_epochs": EPOCHS,
        "save_freq": 2,
        "test_freq": 3,
    },
}
KINDS = {
    "three": ["training", "writing", "validation"],
    "ten": ["start-up"] + ["training"] * 3 + ["writing"] * 4 + ["validation"] * 2,
}


def newest_checkpoint(folder):
    """What a resume goes on from: a folder is whole once it has its name.

    `latest` follows it, and the kill may come in between.
    """
    whole = sorted((folder / "checkpoints").glob("step_*"))
    return str(whole[-1].resolve()) if whole else None


def resumed_from(events):
    return next((r["resumed_from"] for r in events.rows() if r["event"] == "run_started"), None)


@pytest.mark.parametrize("times", ["three", pytest.param("ten", marks=pytest.mark.long)])
def test_killed_at_random_moments_and_resumed(tmp_path, times):
    rng = random.Random(20)
    kinds = rng.sample(KINDS[times], len(KINDS[times]))
    hits, newest = Counter(), None
    folder = tmp_path / "run"
    for number, kind in enumerate(kinds):
        events = Events(folder / "events.jsonl")
        options = {"python_path": USER_CODE}
        live = resume(folder, **options) if number else start(tmp_path, CHANGES, **options)
        moments = Moments(rng, live, events)
        assert moments.wait_for(kind, LIFE_S), f"ended before kill {number + 1}: {live.errors()}"
        frozen = kill_whole(live)
        hits["writing"] += moments.is_writing()
        hits["validation"] += moments.is_validating()
        written = newest_checkpoint(folder)
        assert end_frozen(live, frozen) == []
        assert "passed over a broken checkpoint" not in live.errors()
        if kind != "start-up":
            assert resumed_from(events) == newest
        newest = written
    # A moment may be over just before the kill.
    assert hits.total() > 0
    assert hits["writing"] >= kinds.count("writing") // 2
    assert hits["validation"] >= kinds.count("validation") // 2
    last = Events(folder / "events.jsonl")
    live = resume(folder, python_path=USER_CODE)
    done = live.finish(timeout_s=LIFE_S)
    assert done.code == 0, done.err
    assert live.left_over() == []
    assert resumed_from(last) == newest
    assert newest is not None
    check_everything_happened_once(done)


def check_everything_happened_once(done):
    assert audit(done.folder) == []
    rows = done.rows("samples")
    places = Counter((row["epoch"], row["prompt_index"]) for row in rows)
    expected = {(e, p): GROUP_SIZE for e in range(EPOCHS) for p in range(PROMPTS)}
    assert places == expected
    assert {row["status"] for row in rows} <= {"trained", "failed"}
    assert all(row["status"] == "trained" or row["failure"] for row in rows)
    assert [row["step"] for row in done.rows("metrics")] == list(
        range(1, done.summary["steps"] + 1)
    )
    superseded = [
        json.loads(line)
        for path in (done.folder / "superseded").glob("samples.*.jsonl")
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    assert superseded, "no kill cut off anything that was recorded: they came too early"
