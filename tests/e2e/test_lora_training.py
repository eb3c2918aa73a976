"""A run that trains an adapter: what is sent, engine and trainer agree, resume, validation."""

import pytest
from safetensors.numpy import load_file

from tests.e2e.runs import ROOT, Finished, freewheel, resume, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHANGES = {
    "model": {"lora_rank": 4},
    "actor": {"optim": {"lr": 2e-3}},
    "health": {"max_logprob_difference": 1e-4},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Finished:
    finished = start(tmp_path_factory.mktemp("run"), CHANGES).finish()
    assert finished.code == 0, finished.err
    return finished


def check_agreement(run: Finished) -> None:
    measured = [row for row in run.rows("metrics") if row["engine_mismatch/num_tokens"]]
    assert measured
    assert max(row["engine_mismatch/logprobs_diff_max"] for row in measured) < 1e-3


def test_only_the_adapter_is_sent_and_engines_sample_from_what_is_trained(run):
    check_agreement(run)
    full = sum(
        array.nbytes for array in load_file(ROOT / "recipes/tiny/model.safetensors").values()
    )
    sizes = {row["num_bytes"] for row in run.events("weights_published")}
    assert len(sizes) == 1
    assert max(sizes) < full / 10
    for validation in run.rows("validations"):
        assert validation["status"] == "complete"


@pytest.mark.long
def test_a_resume_goes_on_with_the_adapter_and_refuses_another(run):
    done = freewheel("resume", str(run.folder), "--from", "4", "model.lora_rank=8")
    assert done.returncode == 7
    assert "model.lora_rank=8, but the run has 4" in done.stderr
    went_on = resume(run.folder, "--from", "4").finish()
    assert went_on.code == 0, went_on.err
    assert [row["step"] for row in went_on.rows("metrics")] == list(range(1, 9))
    check_agreement(went_on)


@pytest.mark.long
def test_a_checkpoint_of_an_adapter_is_scored_as_any_model(run, tmp_path):
    checkpoint = run.folder / "checkpoints/step_000008"
    assert (checkpoint / "adapter/adapter_config.json").is_file()
    done = freewheel("validate", str(checkpoint), "--out", str(tmp_path / "scored"))
    assert done.returncode == 0, done.stderr
    assert "score" in done.stdout
