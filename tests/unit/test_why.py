"""`freewheel why` on live, stuck, killed and ended runs."""

import os
import socket
import time

import pytest

from freewheel.cli.exit_codes import exit_codes
from freewheel.cli.main import main
from freewheel.config import Config
from freewheel.run_folder import RunFolder
from freewheel.status import RunStatus, Wait
from freewheel.why import explain


def wait(waiter, resource, holder):
    return Wait(waiter=waiter, resource=resource, holder=holder, since_s=40.0)


STATUS = RunStatus(
    phase="running",
    step=7,
    policy_version=7,
    last_checkpoint=5,
    wall_s=100.0,
    waits=(
        wait("train", "samples (samples)", "group-3, group-4"),
        wait("group-4", "rollouts", "rollout-worker-0, replica-1"),
    ),
)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Config())
    yield folder
    folder.close()


def end(folder, **changes):
    folder.write_summary({"status": "failed", "exit_code": 5, "cause": "x", "steps": 7, **changes})


def test_a_live_run_tells_the_chain_of_waits(folder):
    folder.write_status(STATUS)
    answers = explain(folder)
    assert answers.waiting_for == (
        "train waits for samples (samples), for 1m 00s, held by group-3, group-4."
    )
    assert answers.because == (
        "group-4 waits for rollouts, for 1m 00s, held by rollout-worker-0, replica-1."
    )


def test_a_silent_control_plane_is_sent_to_the_doctor(folder):
    folder.write_status(STATUS)
    answers = explain(folder, now_s=time.time() + 60)
    assert "event loop is blocked" in answers.because
    assert answers.advice.startswith("freewheel doctor --pid ")


def test_a_killed_run_says_how_to_go_on(folder):
    folder.write_status(STATUS)
    folder.close()
    answers = explain(folder)
    assert answers.doing.startswith("It is dead")
    assert "newest checkpoint: step 5" in answers.advice


def test_a_failed_run_gives_cause_report_and_advice(folder):
    (folder.path / "hang" / "20260101-000000-rollout").mkdir(parents=True)
    end(folder, exit_code=4, cause="StalledError: rollout stands still")
    answers = explain(folder)
    assert answers.because == "StalledError: rollout stands still"
    assert "hang/" in answers.advice
    assert answers.details[0].endswith("20260101-000000-rollout")


@pytest.fixture
def validation(tmp_path):
    """The folder of a validation by hand."""
    folder = RunFolder.create(
        tmp_path / "validation", Config(), purpose="validate", target="/runs/a/checkpoints/step_40"
    )
    yield folder
    folder.close()


def test_where_the_lock_cannot_be_looked_at_the_last_sign_of_life_decides(folder, monkeypatch):
    monkeypatch.setattr(RunFolder, "lock_state", lambda self: "unknown")
    folder.write_status(STATUS)
    assert explain(folder).doing.startswith("It is running: step 7")
    answers = explain(folder, now_s=time.time() + 60)
    here = f"process {os.getpid()} on {socket.gethostname()}"
    assert answers.doing == f"It cannot be told from here whether it still runs, as {here}."
    assert "lock of its folder cannot be looked at" in answers.because
    assert "1m 00s ago, at step 7, while it was running" in answers.because
    assert f"freewheel doctor --pid {os.getpid()}" in answers.advice
    assert "If it is not: To go on: freewheel resume" in answers.advice


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 130, 143])
def test_no_advice_resumes_a_validation(validation, code):
    again = f"freewheel validate /runs/a/checkpoints/step_40 --run {validation.path}"
    end(validation, status="failed" if code < 100 else "stopped", exit_code=code)
    answers = explain(validation)
    assert again in answers.advice
    assert "resume" not in answers.advice.replace(again, "").lower()
    assert "validation by hand of /runs/a/checkpoints/step_40" in answers.doing


def test_a_killed_validation_is_scored_again(validation):
    validation.write_status(STATUS)
    validation.close()
    assert explain(validation).advice == (
        f"To score again: freewheel validate /runs/a/checkpoints/step_40 --run {validation.path}"
    )


def test_a_validation_that_completed_says_what_it_scored(validation):
    end(validation, status="completed", exit_code=0, cause="")
    answers = explain(validation)
    assert answers.doing.endswith("has scored /runs/a/checkpoints/step_40.")
    assert answers.advice == ""


def test_completed_and_stopped_runs(folder):
    end(folder, status="stopped", exit_code=130, cause="SIGINT")
    assert "freewheel resume" in explain(folder).advice
    end(folder, status="completed", exit_code=0, cause="")
    assert explain(folder).doing == "It completed 7 steps."


def test_a_run_that_has_only_begun(folder):
    assert "only begun" in explain(folder).doing


@pytest.mark.parametrize("code", sorted(set(exit_codes()) - {0, 130, 143}))
def test_each_way_to_fail_has_an_advice(folder, code):
    end(folder, exit_code=code)
    assert explain(folder).advice


def test_a_checkpoint_that_does_not_fit_is_not_blamed_on_the_disk(folder):
    end(folder, exit_code=7, cause="CheckpointError: its data.train_files held other prompts")
    advice = explain(folder).advice
    assert "does not fit: resume with the model, the data and the settings" in advice
    assert "--from STEP" in advice
    assert advice.startswith("If something cannot be written")


@pytest.mark.parametrize("text", ["", "{}", '{"status": {"phase": "running"}}'])
@pytest.mark.parametrize("command", ["status", "why"])
def test_a_status_that_cannot_be_read_is_no_status(folder, capsys, text, command):
    folder.status_path.write_text(text)
    assert main([command, str(folder.path)]) == 0
    expected = "running" if command == "status" else "no status, or none that can be read"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_the_command_prints_the_answers(folder, capsys, option):
    folder.write_status(STATUS)
    assert main(["why", str(folder.path), *option]) == 0
    assert "train waits for samples" in capsys.readouterr().out
