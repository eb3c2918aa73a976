"""A report says what it can; what it cannot neither ends the run nor holds its end."""

import json
import subprocess
import sys

import pytest

from freewheel import hang_report
from freewheel.control.watchdog import Stall
from freewheel.doctor.dump import CannotExamineError
from freewheel.errors import RecordError
from freewheel.hang_report import HangReporter

STALL = Stall(
    stage="rollout", since_s=12.0, limit_s=10.0, setting="rollout.timeout_s", waits=(), cycle=()
)


class Events:
    def __init__(self, error=None):
        self.error = error
        self.rows = []

    def event(self, name, **fields):
        self.rows.append({"event": name, **fields})
        if self.error is not None:
            raise self.error


def make(folder, *, processes=dict, state=dict, error=None):
    events = Events(error)
    return HangReporter(folder, processes=processes, state=state, recorder=events), events


def fail():
    raise RuntimeError("dictionary changed size during iteration")


@pytest.mark.asyncio
async def test_a_report_holds_sentence_state_and_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(hang_report, "run_py_spy", lambda pid, options, timeout_s: f"of {pid}")
    processes, state = {"worker-0": 7, "replica-0": 8}, {"step": 3}
    reporter, events = make(tmp_path, processes=lambda: processes, state=lambda: state)
    await reporter.report(STALL)
    (folder,) = (tmp_path / "hang").iterdir()
    assert (folder / "summary.txt").read_text().startswith(STALL.sentence())
    assert json.loads((folder / "state.json").read_text()) == {"step": 3}
    assert (folder / "stacks" / "worker-0.txt").read_text() == "of 7\n"
    assert (folder / "stacks" / "replica-0.txt").read_text() == "of 8\n"
    assert "test_hang_report" in (folder / "stacks" / "control-plane-tasks.txt").read_text()
    assert events.rows[0]["report"] == str(folder)


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["processes", "state"])
async def test_a_report_that_cannot_be_made_is_said_and_the_stall_recorded(tmp_path, capsys, what):
    reporter, events = make(tmp_path, **{what: fail})
    await reporter.report(STALL)
    await reporter.report_block("worker-0", "it is blocked")
    assert [row["event"] for row in events.rows] == ["stalled", "hang_report"]
    assert "hang report of rollout: RuntimeError: dictionary" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_records_that_fail_are_told_after_the_evidence_is_kept(tmp_path):
    reporter, _ = make(tmp_path, error=RecordError("disk full"))
    with pytest.raises(RecordError, match="disk full"):
        await reporter.report(STALL)
    assert list((tmp_path / "hang").iterdir())


def test_a_stack_that_cannot_be_had_costs_no_other(tmp_path, monkeypatch):
    def run_py_spy(pid, options, timeout_s):
        if pid == 7:
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, "odd")
        if pid == 8:
            raise CannotExamineError("not permitted")
        return "fine"

    monkeypatch.setattr(hang_report, "run_py_spy", run_py_spy)
    reporter, _ = make(tmp_path, processes=lambda: {"a": 7, "b": 8, "c": 9})
    stacks = {
        path.stem: path.read_text() for path in (reporter.write("x", {}) / "stacks").iterdir()
    }
    assert stacks["a"].startswith("UnicodeDecodeError")
    assert stacks["b"].startswith("not permitted")
    assert stacks["c"] == "fine\n"


def test_a_stack_that_hangs_does_not_hold_the_exit_of_the_process(tmp_path):
    code = f"""
import threading
from pathlib import Path
from freewheel import hang_report
hang_report.STACKS_TIMEOUT_S = -0.9
hang_report.run_py_spy = lambda pid, options, timeout_s: threading.Event().wait()
reporter = hang_report.HangReporter(
    Path({str(tmp_path)!r}), processes=lambda: {{"a": 1}}, state=dict, recorder=None
)
print((reporter.write("x", {{}}) / "stacks" / "a.txt").read_text())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "no answer in time"), done.stderr
