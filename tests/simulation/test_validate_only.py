"""One validation and no training, as `freewheel validate` runs it."""

from dataclasses import replace

import pytest

from freewheel.control.controller import ValidateOnly
from freewheel.errors import NoScoreError
from freewheel.simulation.run import simulate
from freewheel.simulation.settings import Faults, SimSettings
from tests.simulation.scenarios import VALIDATION_MODES, small_config

ONCE = ValidateOnly(step=20, version=21)


@pytest.mark.parametrize("mode", VALIDATION_MODES)
@pytest.mark.parametrize("train_files", ["train", ""])
def test_it_needs_no_training_data(mode, train_files):
    config = small_config(validation_mode=mode)
    config = replace(config, data=replace(config.data, train_files=train_files))
    run = simulate(config, SimSettings(seed=2), validate_only=ONCE)
    assert (run.end.status, run.end.exit_code) == ("completed", 0), run.end.cause
    (row,) = run.recorder.rows("validations")
    assert (row["status"], row["step"], row["policy_version"]) == ("complete", 20, 21)
    assert run.recorder.rows("samples") == run.trained == []


def test_without_a_score_it_fails_and_says_why():
    settings = SimSettings(seed=2, faults=Faults(environment=1.0))
    run = simulate(small_config(), settings, validate_only=ONCE)
    (row,) = run.recorder.rows("validations")
    assert row["score"] is None
    assert (run.end.status, run.end.exit_code) == ("failed", NoScoreError.exit_code)
    assert "no score: trials without a score: {'environment'" in run.end.cause


def test_a_stop_before_the_first_score_is_a_stop():
    run = simulate(small_config(), SimSettings(seed=2), validate_only=ONCE, stop_at_s=2.0)
    assert (run.end.status, run.end.exit_code) == ("stopped", 130)
