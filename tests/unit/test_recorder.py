import asyncio
import json
import threading
import time

import pytest

from freewheel.config import Config
from freewheel.errors import RecordError
from freewheel.recorder import FileRecorder
from freewheel.run_folder import ROW_FILES, RunFolder
from freewheel.status import RunStatus


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Config())
    yield folder
    folder.close()


def rows(folder, name):
    path = folder.rows_path(name)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record_samples(recorder, count):
    for i in range(count):
        recorder.sample({"sample_id": i})


def fill_disk(folder):
    """Metrics go to a disk that is full."""
    folder.rows_path("metrics").symlink_to("/dev/full")
    folder.num_rows = lambda: dict.fromkeys(ROW_FILES, 0)


def stall_disk(folder, recorder):
    """From now on the disk takes nothing until the gate is opened, which is returned."""
    gate, reached = threading.Event(), threading.Event()

    def write_status(_):
        reached.set()
        gate.wait(30)

    folder.write_status = write_status
    recorder.status(RunStatus(phase="running"))
    assert reached.wait(10)
    return gate


class Sink:
    """A logger that keeps what it gets; at the named call it waits for the gate, and fails."""

    def __init__(self, *, at="metrics", fail=None, gate=None):
        self.calls, self.at, self.fail, self.gate = [], at, fail, gate

    def _come_to(self, call):
        if call == self.at and self.gate is not None:
            self.gate.wait(30)
        if call == self.at and self.fail is not None:
            raise self.fail

    def open(self):
        self._come_to("open")
        self.calls.append(("open", threading.current_thread().name))

    def metrics(self, row):
        self._come_to("metrics")
        self.calls.append(("metrics", row["step"]))

    def validation(self, row):
        self.calls.append(("validation", row["step"]))

    def flush(self):
        self.calls.append(("flush",))

    def close(self):
        self._come_to("close")
        self.calls.append(("close",))


@pytest.mark.asyncio
async def test_rows_reach_their_files_in_order(folder):
    recorder = FileRecorder(folder)
    for i in range(300):
        recorder.event("ping", number=i)
        recorder.sample({"sample_id": i, "reward": float("nan")})
    recorder.metrics({"step": 1, "loss": 0.5})
    recorder.validation({"step": 1, "score": 0.25})
    assert recorder.num_rows() == {"metrics": 1, "validations": 1, "samples": 300, "events": 300}
    await recorder.flush()
    events = rows(folder, "events")
    assert [event["number"] for event in events] == list(range(300))
    assert {"t_s", "time", "monotonic_s", "event", "number"} == set(events[0])
    assert rows(folder, "samples")[7] == {"sample_id": 7, "reward": None}
    assert rows(folder, "metrics") == [{"step": 1, "loss": 0.5}]
    assert rows(folder, "validations") == [{"step": 1, "score": 0.25}]
    await recorder.aclose()
    await recorder.aclose()
    recorder._thread.join(10)  # the answer is the last thing that it does, not the end of it
    assert not recorder._thread.is_alive()


@pytest.mark.asyncio
async def test_rows_reach_the_disk_without_a_flush(folder):
    recorder = FileRecorder(folder)
    recorder.event("ping")
    recorder.status(RunStatus(phase="running", step=4))
    async with asyncio.timeout(10):
        while not (rows(folder, "events") and folder.read_status()):  # noqa: ASYNC110  # a file
            await asyncio.sleep(0.02)
    assert folder.read_status().status.step == 4
    await recorder.aclose()


@pytest.mark.asyncio
async def test_row_is_taken_as_it_is_at_the_call(folder):
    recorder = FileRecorder(folder)
    row = {"step": 1}
    recorder.metrics(row)
    row["step"] = 2
    await recorder.aclose()
    assert rows(folder, "metrics") == [{"step": 1}]


@pytest.mark.asyncio
async def test_counting_goes_on_after_a_resume(folder):
    recorder = FileRecorder(folder)
    recorder.metrics({"step": 1})
    await recorder.aclose()
    recorder = FileRecorder(folder)
    recorder.metrics({"step": 2})
    assert recorder.num_rows()["metrics"] == 2
    await recorder.aclose()
    assert [row["step"] for row in rows(folder, "metrics")] == [1, 2]


@pytest.mark.asyncio
async def test_loggers_are_called_in_order_in_a_thread_of_their_own(folder):
    sink = Sink()
    recorder = FileRecorder(folder, sinks=[sink])
    recorder.metrics({"step": 1})
    recorder.sample({"sample_id": 1})
    recorder.validation({"step": 1})
    await recorder.aclose()
    await recorder.aclose_loggers()
    await recorder.aclose_loggers()
    assert sink.calls == [
        ("open", "loggers"),
        ("metrics", 1),
        ("validation", 1),
        ("flush",),
        ("close",),
    ]


@pytest.mark.asyncio
async def test_a_failed_write_is_raised_once_by_records_and_always_by_flush(folder):
    fill_disk(folder)
    recorder = FileRecorder(folder)
    recorder.metrics({"step": 1})
    with pytest.raises(RecordError, match="No space left on device"):
        await recorder.flush()
    with pytest.raises(RecordError, match="No space left on device"):
        recorder.event("ping")
    recorder.event("shutdown goes on")
    assert recorder.num_lost == 2
    for _ in range(2):
        with pytest.raises(RecordError):
            await recorder.flush()
    with pytest.raises(RecordError):
        await recorder.aclose()
    assert RecordError.exit_code == 11


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_opened_is_a_named_error(folder):
    recorder_path = folder.rows_path("events")
    recorder_path.mkdir()
    with pytest.raises(IsADirectoryError):
        FileRecorder(folder)


@pytest.mark.asyncio
async def test_a_stalled_disk_neither_blocks_nor_grows_without_bound(folder):
    recorder = FileRecorder(folder, max_waiting_bytes=10_000)
    gate = stall_disk(folder, recorder)
    began = time.monotonic()
    with pytest.raises(RecordError, match="wait for the disk"):
        record_samples(recorder, 1000)
    record_samples(recorder, 1000)
    assert time.monotonic() - began < 5
    assert recorder._waiting_bytes <= 10_000
    with pytest.raises(RecordError, match="wait for the disk"):
        await recorder.flush()
    gate.set()


@pytest.mark.asyncio
async def test_a_flush_that_is_cancelled_harms_nobody(folder):
    recorder = FileRecorder(folder)
    gate = stall_disk(folder, recorder)
    recorder.metrics({"step": 1})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await recorder.flush()
    gate.set()
    await recorder.flush()
    await recorder.aclose()
    assert len(rows(folder, "metrics")) == 1


@pytest.mark.asyncio
async def test_the_loop_turns_while_a_flush_waits(folder):
    recorder = FileRecorder(folder)
    gate = stall_disk(folder, recorder)
    recorder.metrics({"step": 1})
    async with asyncio.TaskGroup() as group:
        task = group.create_task(recorder.flush(), name="flush")
        turns = 0
        for _ in range(20):
            await asyncio.sleep(0.005)
            turns += 1
        assert not task.done()
        gate.set()
    assert turns == 20
    await recorder.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("at", ["open", "metrics", "close"])
async def test_a_slow_logger_delays_neither_the_records_nor_their_end(folder, at):
    gate = threading.Event()
    sink = Sink(at=at, gate=gate)
    recorder = FileRecorder(folder, sinks=[sink])
    recorder.metrics({"step": 1})
    async with asyncio.timeout(10):
        await recorder.flush()
        recorder.metrics({"step": 2})
        await recorder.aclose()
    recorder._thread.join(10)  # the answer is the last thing that it does, not the end of it
    assert not recorder._thread.is_alive()
    assert [row["step"] for row in rows(folder, "metrics")] == [1, 2]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await recorder.aclose_loggers()
    gate.set()


@pytest.mark.asyncio
async def test_a_slow_logger_gets_everything_in_the_end(folder):
    gate = threading.Event()
    sink = Sink(at="open", gate=gate)
    recorder = FileRecorder(folder, sinks=[sink])
    recorder.metrics({"step": 1})
    await recorder.aclose()
    gate.set()
    await recorder.aclose_loggers()
    assert sink.calls == [("open", "loggers"), ("metrics", 1), ("flush",), ("close",)]


@pytest.mark.asyncio
@pytest.mark.parametrize("at", ["open", "metrics"])
@pytest.mark.parametrize("error", [RuntimeError("no api_key"), SystemExit("no api_key")])
async def test_a_failed_logger_ends_the_run_and_loses_no_record(folder, capsys, at, error):
    gate = threading.Event()
    good, bad = Sink(), Sink(at=at, fail=error, gate=gate)
    recorder = FileRecorder(folder, sinks=[bad, good])
    recorder.metrics({"step": 1})
    await recorder.flush()
    gate.set()
    await asyncio.to_thread(recorder._loggers._thread.submit(lambda: None).result, 10)
    with pytest.raises(RecordError, match=f"logger Sink: {type(error).__name__}: no api_key"):
        recorder.event("first")
    recorder.event("second")
    await recorder.flush()
    await recorder.aclose()
    await recorder.aclose_loggers()
    assert [row["event"] for row in rows(folder, "events")] == ["first", "second"]
    assert recorder.num_lost == 0
    assert good.calls[-1] == bad.calls[-1] == ("close",)
    assert capsys.readouterr().err.count("no api_key") == 1


@pytest.mark.asyncio
async def test_each_logger_is_ended_and_a_failed_end_is_said_alone(folder, capsys):
    good, bad = Sink(), Sink(at="close", fail=SystemExit("no network"))
    recorder = FileRecorder(folder, sinks=[bad, good])
    await recorder.aclose()
    await recorder.aclose_loggers()
    assert good.calls[-1] == ("close",)
    assert capsys.readouterr().err == "logger Sink: SystemExit: no network\n"


@pytest.mark.asyncio
async def test_loggers_that_take_nothing_end_the_run_rather_than_fill_the_memory(folder):
    gate = threading.Event()
    recorder = FileRecorder(folder, sinks=[Sink(gate=gate)], max_waiting_bytes=10_000)
    for step in range(40):
        recorder.metrics({"step": step, "text": "x" * 300})
        await recorder.flush()
        if recorder._logger_error is not None:
            break
    with pytest.raises(RecordError, match="wait for the loggers, which take none; at most 10000"):
        recorder.event("ping")
    await recorder.aclose()
    gate.set()


@pytest.mark.asyncio
async def test_a_note_leaves_the_error_to_the_next_record(folder):
    fill_disk(folder)
    recorder = FileRecorder(folder)
    recorder.metrics({"step": 1})
    with pytest.raises(RecordError):
        await recorder.flush()
    recorder.note("loop_blocked")
    with pytest.raises(RecordError, match="No space left on device"):
        recorder.event("ping")


@pytest.mark.asyncio
async def test_files_that_were_opened_are_closed_if_one_cannot_be(folder, monkeypatch):
    opened = []
    real = type(folder.path).open

    def open_path(path, *args, **options):
        if path.name == "events.jsonl":
            raise OSError(24, "Too many open files")
        file = real(path, *args, **options)
        if path.suffix == ".jsonl":
            opened.append(file)
        return file

    monkeypatch.setattr(type(folder.path), "open", open_path)
    recorder = FileRecorder(folder)
    with pytest.raises(RecordError, match="Too many open files"):
        await recorder.aclose()
    assert len(opened) == 3
    assert all(file.closed for file in opened)
