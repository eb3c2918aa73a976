"""`freewheel why` on live, stuck, killed and ended runs."""

import time

import pytest

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


def test_completed_and_stopped_runs(folder):
    end(folder, status="stopped", exit_code=130, cause="SIGINT")
    assert "freewheel resume" in explain(folder).advice
    end(folder, status="completed", exit_code=0, cause="")
    assert explain(folder).doing == "It completed 7 steps."


def test_a_run_that_has_only_begun(folder):
    assert "only begun" in explain(folder).doing


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_the_command_prints_the_answers(folder, capsys, option):
    folder.write_status(STATUS)
    assert main(["why", str(folder.path), *option]) == 0
    assert "train waits for samples" in capsys.readouterr().out
