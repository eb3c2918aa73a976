"""How a run ends when what it leaves behind cannot be written, without any worker process."""

import json
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from freewheel import app
from freewheel.config import load_config
from freewheel.control.run_end import (
    RunEnd,
    first_leaf,
    make_run_end,
    uncounted,
    with_error,
)
from freewheel.control.run_state import ResumePoint
from freewheel.errors import RecordError, StalledError, StartupError
from freewheel.loop_watch import Block
from freewheel.progress_text import describe_summary
from freewheel.run_folder import RunFolder
from freewheel.stop_deadline import StopDeadline

NUMBERS = {"steps": 3}


class Fake:
    """A recorder and a backend: each close, start and note does what the test says."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.start_error: Exception | None = None
        self.num_closed = 0
        self.num_killed = 0
        self.num_loggers_closed = 0
        self.events: list[str] = []

    def local_processes(self) -> dict[str, int]:
        return {}

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error

    def status(self, status) -> None:
        pass

    update = status

    def note(self, name: str, **fields) -> None:
        self.events.append(name)
        if self.error is not None:
            raise self.error

    async def aclose_loggers(self) -> None:
        self.num_loggers_closed += 1

    async def aclose(self) -> None:
        self.num_closed += 1
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        self.num_killed += 1


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that is about to close, in a folder of its own."""
    config = load_config(None, [])
    folder = RunFolder.create(tmp_path / "run", config)
    monkeypatch.setattr(app, "RayBackend", lambda *args, **options: Fake())
    yield lambda recorder: app._Run(
        config,
        folder,
        clock=folder.clock(),
        recorder=recorder,
        progress=Fake(),
        model_path=tmp_path,
    )
    folder.close()


def ended(error=None, signal=None) -> RunEnd:
    return make_run_end(error=error, stop_signal=signal, cut_short="", numbers=NUMBERS)


def summary(run) -> dict:
    return json.loads((run._folder.path / "summary.json").read_text())


class Recording(Fake):
    """Keeps events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, dict[str, str]]] = []

    def event(self, name, **fields):
        self.events.append((name, fields))


@pytest.mark.asyncio
async def test_a_checkpoint_that_cannot_be_removed_is_an_event(run, monkeypatch):
    stores = []

    class Store:
        def __init__(self, root, *, keep, on_not_removed):
            stores.append(on_not_removed)

    async def no_controller(self, controller):
        return ended()

    monkeypatch.setattr(app, "FileCheckpointStore", Store)
    monkeypatch.setattr(app, "Controller", lambda *args, **options: QuietController())
    monkeypatch.setattr(app._Run, "_run_controller", no_controller)
    recorder = Recording()
    running = run(recorder)
    running._show = lambda status: None
    running._backend.local_processes = dict
    await running.run(None, None)
    stores[0](Path("/run/step_000005"), OSError(39, "Directory not empty"))
    fields = {"path": "/run/step_000005", "error": "[Errno 39] Directory not empty"}
    assert recorder.events == [("checkpoint_not_removed", fields)]


class QuietController:
    """One that has ended."""

    def status(self):
        return None

    def stop(self, name):
        raise AssertionError(name)


def test_a_resumed_run_s_clock_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    """Also if the wall clock was set back meanwhile; the recorder's is the same one."""
    config = load_config(None, ["logging.progress=none"])
    folder = RunFolder.create(tmp_path / "run", config)
    origin = json.dumps({"time_origin": time.time() + 3600})
    folder.origin_path.write_text(origin)
    clocks, recorders = [], []

    class Run:
        deadline = StopDeadline(1.0, lambda: None)

        def __init__(self, config, folder, *, clock, recorder, **options):
            clocks.append(clock)
            recorders.append(recorder)

        async def run(self, resume, validate_only):
            recorders[0].event("x")
            await recorders[0].aclose()
            return ended()

    monkeypatch.setattr(app, "_Run", Run)
    control = {"run_s": 500.0, "train": {"step": 3}}
    point = ResumePoint(folder=tmp_path, control=control)
    app._run(config, folder, model=tmp_path, resume=point)
    assert 500 <= clocks[0].t_s() < 560
    event = json.loads(folder.rows_path("events").read_text())
    assert 500 <= event["t_s"] < 560
    folder.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("signal", [None, "SIGINT"])
@pytest.mark.parametrize("error", [RecordError("disk full"), OSError("disk full")])
async def test_a_run_without_its_records_has_failed(run, error, signal):
    closing = run(Fake(error))
    end = await closing._close(ended(signal=signal))
    assert (end.status, end.exit_code) == ("failed", RecordError.exit_code)
    assert summary(closing)["exit_code"] == RecordError.exit_code
    assert summary(closing)["steps"] == 3
    assert summary(closing)["cause"] == end.cause == "RecordError: the records: disk full"
    assert closing._backend.num_closed == 1


@pytest.mark.asyncio
async def test_records_that_hang_fail_the_run_too(run, monkeypatch):
    monkeypatch.setattr(app, "_CLOSE_LIMIT_S", 0.05)
    recorder = Fake()

    async def hang():
        await app.asyncio.Event().wait()

    recorder.aclose = hang
    closing = run(recorder)
    end = await closing._close(ended())
    assert end.exit_code == RecordError.exit_code
    assert "not done within 0.05 s" in end.cause
    assert closing._backend.num_closed == 1


@pytest.mark.asyncio
async def test_a_summary_that_cannot_be_written_fails_the_run(run, monkeypatch):
    closing = run(Fake())

    def refuse(_):
        raise OSError("read-only")

    monkeypatch.setattr(closing._folder, "write_summary", refuse)
    end = await closing._close(ended())
    assert end.exit_code == RecordError.exit_code
    assert "summary.json: read-only" in end.cause
    assert closing._recorder.num_closed == closing._backend.num_closed == 1


@pytest.mark.asyncio
async def test_the_first_cause_stays(run, capsys):
    closing = run(Fake(RecordError("disk full")))
    end = await closing._close(ended(error=StalledError("no token")))
    assert end.exit_code == StalledError.exit_code
    assert summary(closing)["cause"] == "StalledError: no token"
    assert capsys.readouterr().err == "the records: disk full\n"


@pytest.mark.asyncio
async def test_workers_that_do_not_end_are_killed_and_the_run_is_what_it_was(run):
    closing = run(Fake())
    closing._backend.error = OSError("no answer")
    end = await closing._close(ended())
    assert end.exit_code == 0
    assert closing._backend.num_killed == 1


def test_an_error_changes_the_whole_end():
    end = with_error(ended(), RecordError("x"))
    assert end.summary == {
        "status": "failed", "exit_code": 11, "cause": "RecordError: x", "steps": 3
    }  # fmt: skip


class Exit(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def exits(monkeypatch):
    """Exit codes; the process goes on."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Exit

    monkeypatch.setattr(app.os, "_exit", leave)
    return codes


class FakeController:
    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.error: Exception | None = None

    def stop(self, name: str) -> None:
        self.stopped.append(name)
        if self.error is not None:
            raise self.error

    async def run(self) -> RunEnd:
        raise self.error

    def status(self) -> None:
        pass

    def end_by(self, error: BaseException) -> RunEnd:
        cause, numbers = first_leaf(error), uncounted(steps=3)
        return make_run_end(error=cause, stop_signal=None, cut_short="", numbers=numbers)

    def end_at_once(self, reason: str) -> RunEnd:
        (signal,) = self.stopped
        return make_run_end(error=None, stop_signal=signal, cut_short=reason, numbers=NUMBERS)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_second_signal_ends_at_once_with_a_summary(run, exits, name, code):
    stopping, controller = run(Fake()), FakeController()
    stopping._controller = controller
    stopping._take_signal(name, controller)
    try:
        assert controller.stopped == [name]
        # `timeout` and schedulers signal the process, then its group: that is one signal.
        stopping._take_signal(name, controller)
        assert not exits
        stopping._first_signal_s -= app._SAME_SIGNAL_S
        with pytest.raises(Exit):
            stopping._take_signal(name, controller)
    finally:
        stopping.deadline.cancel()
    assert exits == [code]
    assert summary(stopping)["status"] == "stopped"
    assert summary(stopping)["cause"].startswith(f"{name}; a second signal")
    assert stopping._backend.num_killed == 1


def test_a_disk_that_hangs_does_not_hold_a_process_that_ends_at_once(run, exits, monkeypatch):
    monkeypatch.setattr(app, "_LAST_SUMMARY_S", 0.05)
    release = threading.Event()
    stopping, controller = run(Fake()), FakeController()
    controller.stopped = ["SIGINT"]
    stopping._controller = controller
    monkeypatch.setattr(stopping._folder, "write_summary", lambda _: release.wait(20))
    with pytest.raises(Exit):
        stopping._end_at_once("over")
    release.set()
    assert exits == [130]
    assert stopping._backend.num_killed == 1


def test_the_deadline_acts_unless_it_is_cancelled():
    over = threading.Event()
    deadline = StopDeadline(0.05, over.set)
    assert deadline.left_s(otherwise=7.0) == 7.0
    deadline.begin()
    assert deadline.left_s(otherwise=7.0) <= 0.05
    assert over.wait(10)
    assert deadline.left_s(otherwise=7.0) == 0.0
    early = threading.Event()
    deadline = StopDeadline(0.3, early.set)
    deadline.begin()
    deadline.cancel()
    assert not early.wait(0.6)


@pytest.mark.asyncio
async def test_closing_takes_what_is_left_of_a_stops_time(run, monkeypatch):
    monkeypatch.setattr(app, "_EXIT_S", 0.05)
    closing = run(Fake())
    closing.deadline = StopDeadline(0.2, lambda: None)
    closing.deadline.begin()
    problem = await closing._within_limit("x", app.asyncio.Event().wait())
    assert "x: not done within 0.1" in str(problem)
    closing.deadline.cancel()


@pytest.mark.parametrize(("limit_s", "work_s"), [(30.0, 25.0), (4.0, 2.0)])
def test_a_stop_keeps_time_for_closing(limit_s, work_s):
    config = load_config(None, [f"health.shutdown_timeout_s={limit_s}"])
    assert config.health.stop_work_s == work_s


@pytest.mark.asyncio
async def test_a_logger_that_does_not_end_leaves_the_run_completed(run, monkeypatch, capsys):
    monkeypatch.setattr(app, "_LOGGERS_LIMIT_S", 0.05)
    recorder = Fake()

    async def hang():
        await app.asyncio.Event().wait()

    recorder.aclose_loggers = hang
    closing = run(recorder)
    end = await closing._close(ended())
    assert (end.status, end.exit_code) == ("completed", 0)
    assert summary(closing)["status"] == "completed"
    assert closing._backend.num_closed == 1
    assert "the loggers' end: not done within 0.05 s" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_the_loggers_of_a_stopped_run_have_no_more_than_the_stop(run, monkeypatch):
    monkeypatch.setattr(app, "_EXIT_S", 0.05)
    closing = run(Fake())
    closing.deadline = StopDeadline(0.2, lambda: None)
    closing.deadline.begin()
    problem = await closing._within_limit("x", app.asyncio.Event().wait(), limit_s=60.0)
    assert "x: not done within 0.1" in str(problem)
    closing.deadline.cancel()


@pytest.mark.asyncio
async def test_every_error_of_one_close_leaves_the_others_theirs(run):
    closing = run(Fake(KeyError("a bug")))
    closing._backend.error = RuntimeError("a bug")
    end = await closing._close(ended())
    assert (end.status, end.exit_code) == ("failed", RecordError.exit_code)
    assert closing._backend.num_killed == closing._recorder.num_loggers_closed == 1


def run_it(run, monkeypatch, *, controller=None, start_error=None, make_error=None):
    """`_run` in the fixture's folder, where the named thing goes wrong."""
    running = run(Fake())
    running._backend.start_error = start_error

    def make_controller(*args, **options):
        if make_error is not None:
            raise make_error
        return controller or FakeController()

    monkeypatch.setattr(app, "Controller", make_controller)
    monkeypatch.setattr(app, "_Run", lambda *args, **options: running)
    end = app._run(running._config, running._folder, model=running._folder.path)
    assert summary(running) == end.summary
    return running, end


def test_an_error_that_leaves_the_controller_is_the_runs_end(run, monkeypatch):
    controller = FakeController()
    controller.error = RecordError("no api_key")
    running, end = run_it(run, monkeypatch, controller=controller)
    assert (end.status, end.exit_code) == ("failed", RecordError.exit_code)
    assert end.cause == "RecordError: no api_key"
    assert running._backend.num_closed == running._recorder.num_closed == 1


def test_an_error_before_there_is_a_controller_is_the_runs_end(run, monkeypatch):
    running, end = run_it(run, monkeypatch, make_error=KeyError("ledger"))
    assert (end.status, end.exit_code) == ("failed", 1)
    assert describe_summary(end.summary)[0] == "failed (exit code 1): KeyError: 'ledger'"
    assert running._backend.num_closed == running._recorder.num_closed == 1


@pytest.mark.parametrize("error", [StartupError("no Ray"), ValueError("odd")])
def test_a_backend_that_does_not_start_is_the_runs_end(run, monkeypatch, error):
    running, end = run_it(run, monkeypatch, start_error=error)
    assert end.cause == f"{type(error).__name__}: {error}"
    assert running._backend.num_closed == 1


def test_a_library_that_exits_leaves_a_summary_and_no_worker(run, monkeypatch):
    running, end = run_it(run, monkeypatch, make_error=SystemExit("no Ray"))
    assert (end.status, end.exit_code) == ("failed", 1)
    assert running._backend.num_killed == 1


def test_an_interrupt_before_there_is_a_controller_is_a_stop(run, monkeypatch):
    running, end = run_it(run, monkeypatch, make_error=KeyboardInterrupt())
    assert (end.status, end.exit_code) == ("stopped", 130)
    assert running._backend.num_killed == 1


def test_a_recorder_that_cannot_be_made_is_the_runs_end(run, monkeypatch):
    folder = run(Fake())._folder
    folder.rows_path("events").mkdir()
    end = app._run(load_config(None, []), folder, model=folder.path)
    assert (end.status, end.exit_code) == ("failed", 1)
    assert folder.read_summary() == end.summary


class Gone:
    """A terminal that is gone."""

    def write(self, text: str) -> None:
        raise OSError(5, "Input/output error")


def test_a_signal_stops_a_run_whose_records_and_terminal_fail(run, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Gone())
    stopping, controller = run(Fake()), FakeController()
    controller.error = RecordError("disk full")
    with pytest.raises(RecordError):
        stopping._take_signal("SIGTERM", controller)
    assert stopping._stopped.is_set()
    stopping.deadline.cancel()
    stopping, controller.error = run(Fake()), None
    stopping._take_signal("SIGTERM", controller)
    assert controller.stopped == ["SIGTERM", "SIGTERM"]
    stopping.deadline.cancel()


def test_a_process_that_ends_at_once_without_a_terminal_leaves_its_summary(run, exits, monkeypatch):
    stopping, controller = run(Fake()), FakeController()
    controller.stopped = ["SIGTERM"]
    stopping._controller = controller
    monkeypatch.setattr(sys, "stderr", Gone())
    with pytest.raises(Exit):
        stopping._end_at_once("over")
    assert exits == [143]
    assert summary(stopping)["cause"] == "SIGTERM; over"
    assert stopping._backend.num_killed == 1


def test_a_process_that_ends_at_once_does_so_whatever_fails(run, exits, capsys):
    stopping = run(Fake())

    def fail(*_):
        raise RuntimeError("dictionary changed size during iteration")

    stopping._backend.kill = fail
    with pytest.raises(Exit):
        stopping._leave(fail, 4)
    assert exits == [4]
    assert "the workers' end: RuntimeError: dictionary changed" in capsys.readouterr().err


class FakeReporter:
    def __init__(self, act) -> None:
        self.act = act

    def write(self, name: str, content: dict[str, str]) -> None:
        self.act()


def block(blocked_s: float) -> Block:
    return Block(blocked_s=blocked_s, stack=tuple(traceback.extract_stack()))


def fail_with(error: Exception):
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("what", ["records", "report", "report-hangs", "summary", "summary-hangs"])
def test_the_last_resort_ends_the_process_whatever_fails(run, exits, monkeypatch, capsys, what):
    monkeypatch.setattr(app, "REPORT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(app, "_LAST_SUMMARY_S", 0.1 if what == "summary-hangs" else 10.0)
    release = threading.Event()
    error = OSError(28, "No space left on device")
    running = run(Fake(error if what == "records" else None))
    act = {"report": fail_with(error), "report-hangs": lambda: release.wait(20)}
    reporter = FakeReporter(act.get(what, lambda: None))
    refuse = {"summary": fail_with(error), "summary-hangs": lambda: release.wait(20)}
    if what in refuse:
        monkeypatch.setattr(running._folder, "write_summary", lambda _: refuse[what]())
    health = running._config.health
    running._take_block(block(health.loop_blocked_s), FakeController(), reporter)
    assert exits == []
    with pytest.raises(Exit):
        running._take_block(block(health.loop_blocked_end_s), FakeController(), reporter)
    release.set()
    assert exits == [StalledError.exit_code]
    assert running._backend.num_killed == 1
    assert running._recorder.events == ["loop_blocked", "loop_blocked"]
    if what not in refuse:
        assert summary(running)["exit_code"] == StalledError.exit_code
    said = capsys.readouterr().err
    assert ("not done within 0.1 s" if what.endswith("hangs") else "No space left") in said
