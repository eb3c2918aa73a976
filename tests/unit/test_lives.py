"""A run goes on from its newest checkpoint where it must, and nowhere else."""

import os
import signal
from pathlib import Path

import pytest

from freewheel.control.run_end import make_run_end
from freewheel.control.run_state import ResumePoint
from freewheel.errors import (
    CheckpointError,
    StalledError,
    TrainerLostError,
    TrainerStateLostError,
    WeightsLostError,
)
from freewheel.lives import run_lives

LOST = TrainerStateLostError("gone")


def point(step):
    return ResumePoint(folder=Path(f"step_{step}"), control={})


def ended(error=None, stop_signal=None):
    return make_run_end(error=error, stop_signal=stop_signal, cut_short="", numbers={"steps": 7})


class Run:
    """Lives that end as told; the newest checkpoint after each."""

    def __init__(self, *lives, act=lambda: None):
        self.lives = list(lives)
        self.began = []
        self.summaries = []
        self.step = None
        self.act = act

    def live(self, where):
        self.began.append(where and where.folder.name)
        error, self.step, *stop = self.lives[len(self.began) - 1]
        return ended(error, *stop)

    def take_up(self):
        self.act()
        return point(self.step)

    def run(self, where=None):
        return run_lives(
            self.live,
            where,
            newest=lambda: self.step and point(self.step).folder,
            take_up=self.take_up,
            write_summary=self.summaries.append,
        )


@pytest.mark.parametrize("error", [LOST, WeightsLostError("gone")])
def test_it_goes_on_from_each_newer_checkpoint(error):
    run = Run((error, 20), (error, 40), (None, 60))
    assert run.run().exit_code == 0
    assert run.began == [None, "step_20", "step_40"]


@pytest.mark.parametrize("error", [None, StalledError("x"), TrainerLostError("x")])
def test_every_other_end_is_the_end(error):
    run = Run((error, 20))
    assert run.run().error is error
    assert run.began == [None]


def test_it_does_not_go_on_twice_from_one_checkpoint_nor_from_none():
    run = Run((LOST, 20), (LOST, 20))
    assert run.run().exit_code == 5
    assert run.began == [None, "step_20"]
    run = Run((LOST, 20))
    assert run.run(point(20)).exit_code == 5
    run = Run((LOST, None))
    assert run.run().exit_code == 5


def test_a_run_that_was_stopped_does_not_go_on():
    run = Run((LOST, 20, "SIGINT"))
    assert run.run().exit_code == 5
    assert run.began == [None]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_between_two_lives_stops_the_run_with_a_summary(number, code):
    before = signal.getsignal(number)
    run = Run((LOST, 20), (None, 40), act=lambda: os.kill(os.getpid(), number))
    end = run.run()
    assert (end.status, end.exit_code) == ("stopped", code)
    assert run.began == [None]
    assert run.summaries == [end.summary]
    assert end.summary["steps"] == 7
    assert "gone" in end.cause
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("error", [CheckpointError("broken"), OSError(28, "No space left")])
def test_a_run_that_cannot_be_taken_up_again_ends_with_its_cause_and_a_summary(error, capsys):
    def fail():
        raise error

    run = Run((LOST, 20), (None, 40), act=fail)
    end = run.run()
    assert (end.status, end.exit_code, end.error) == ("failed", 5, LOST)
    assert run.began == [None]
    assert run.summaries == [end.summary]
    assert str(error) in capsys.readouterr().err


def test_a_stop_between_two_lives_keeps_its_exit_code_without_a_disk(capsys):
    run = Run((LOST, 20), act=lambda: os.kill(os.getpid(), signal.SIGTERM))
    end = run_lives(
        run.live,
        None,
        newest=lambda: point(run.step).folder,
        take_up=run.take_up,
        write_summary=refuse,
    )
    assert (end.status, end.exit_code) == ("stopped", 143)
    assert "summary.json: OSError: [Errno 28] No space left" in capsys.readouterr().err


def refuse(_summary):
    raise OSError(28, "No space left")
