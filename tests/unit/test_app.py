"""How a run ends when what it leaves behind cannot be written, without any worker process."""

import json
import threading
import time
from pathlib import Path

import pytest

from freewheel import app
from freewheel.config import load_config
from freewheel.control.run_end import RunEnd, make_run_end, with_error
from freewheel.control.run_state import ResumePoint
from freewheel.errors import RecordError, StalledError
from freewheel.run_folder import RunFolder
from freewheel.stop_deadline import StopDeadline

NUMBERS = {"steps": 3}


class Fake:
    """A recorder and a backend: each close does what the test says."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_closed = 0
        self.num_killed = 0

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
        config, folder, clock=folder.clock(), recorder=recorder, progress=None, model_path=tmp_path
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

    def stop(self, name: str) -> None:
        self.stopped.append(name)

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
