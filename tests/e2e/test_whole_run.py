"""A whole run on real processes: the contract of its folder, validation beside rollouts."""

import pytest

from tests.audit import audit
from tests.e2e.checks import check_samples, check_validations
from tests.e2e.runs import Finished, freewheel, start

pytestmark = pytest.mark.e2e

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


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Finished:
    # Rollouts go on under new weights on one replica while a validation pins the other.
    live = start(tmp_path_factory.mktemp("run"), {"rollout": {"replicas": 2}})
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
