import asyncio
import json
import threading
import time

import pytest

from freewheel.config import Config
from freewheel.errors import RecordError
from freewheel.recorder import FileRecorder
from freewheel.run_folder import RunFolder
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


class Sink:
    """Keeps what it gets; may block or fail."""

    def __init__(self, *, fail=None, gate=None):
        self.calls, self.fail, self.gate = [], fail, gate

    def open(self):
        self.calls.append(("open", threading.current_thread().name))

    def metrics(self, row):
        if self.gate is not None:
            self.gate.wait(30)
        if self.fail is not None:
            raise self.fail
        self.calls.append(("metrics", row["step"]))

    def validation(self, row):
        self.calls.append(("validation", row["step"]))

    def flush(self):
        self.calls.append(("flush",))

    def close(self):
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
async def test_loggers_are_called_in_the_recorders_thread(folder):
    sink = Sink()
    recorder = FileRecorder(folder, sinks=[sink])
    recorder.metrics({"step": 1})
    recorder.sample({"sample_id": 1})
    recorder.validation({"step": 1})
    await recorder.aclose()
    assert sink.calls == [
        ("open", "recorder"),
        ("metrics", 1),
        ("validation", 1),
        ("flush",),
        ("close",),
    ]


@pytest.mark.asyncio
async def test_a_failed_write_is_raised_once_by_records_and_always_by_flush(folder):
    recorder = FileRecorder(folder, sinks=[Sink(fail=OSError(28, "No space left on device"))])
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
    gate = threading.Event()
    recorder = FileRecorder(folder, sinks=[Sink(gate=gate)], max_waiting_bytes=10_000)
    recorder.metrics({"step": 1})
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
    gate = threading.Event()
    recorder = FileRecorder(folder, sinks=[Sink(gate=gate)])
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
    gate = threading.Event()
    recorder = FileRecorder(folder, sinks=[Sink(gate=gate)])
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
