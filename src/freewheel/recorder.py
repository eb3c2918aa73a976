"""Records of a run, written by one thread: `*.jsonl` and `status.json`; then loggers get theirs.

A record call turns its row into text, puts it in memory and returns; it never touches the disk. The
thread writes at least every `FLUSH_INTERVAL_S`. When the disk takes nothing any more, or a write
fails, the run must end rather than lose records or memory: the next record call raises RecordError
(once, so that the shutdown can go on and record what it can), and every `flush` does. Loggers have
a thread of their own; when one fails, the next record call raises RecordError too, but all records
are written: `flush` and `aclose` speak of files alone.
"""

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedWriter
from typing import Any

from freewheel.errors import RecordError
from freewheel.files import dump_json
from freewheel.logger_thread import LoggerThread, Sink
from freewheel.run_folder import ROW_FILES, RunClock, RunFolder
from freewheel.status import RunStatus

FLUSH_INTERVAL_S = 0.25
"""Longest time that a row stays in memory while the disk keeps up."""

MAX_WAITING_BYTES = 64 << 20
"""Rows that may wait for the disk: minutes of the largest runs."""

_WRITE_AT_ONCE_BYTES = 1 << 20


@dataclass(slots=True)
class _Flush:
    """Someone waits until all before is on disk."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]

    def resolve(self, error: BaseException | None) -> None:
        """Wake the waiter, from any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._set, error)

    def _set(self, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


@dataclass(slots=True)
class _Batch:
    """What the thread has to do next."""

    rows: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    status: RunStatus | None = None
    flushes: list[_Flush] = field(default_factory=list[_Flush])
    is_last: bool = False


class FileRecorder:
    """Implements `protocols.Recorder` over a run folder.

    Args:
        folder: locked by this process.
        clock: of the run; None: the folder's.
        sinks: loggers besides the files.
        max_waiting_bytes: rows in memory at which the disk counts as stopped; as many more may
            wait for the loggers.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        clock: RunClock | None = None,
        sinks: Sequence[Sink] = (),
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._folder = folder
        self._clock = clock or folder.clock()
        self._max_waiting_bytes = max_waiting_bytes
        self._num_rows = folder.num_rows()
        self._changed = threading.Condition()
        self._batch = _Batch()
        self._waiting_bytes = 0
        self._error: RecordError | None = None
        self._is_reported = False
        self._logger_error: RecordError | None = None
        self._is_closed = False
        self.num_lost = 0
        self._loggers = LoggerThread(
            sinks, on_failure=self._take_logger_failure, max_waiting_bytes=max_waiting_bytes
        )
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def event(self, name: str, **fields: Any) -> None:
        """Append to `events.jsonl`."""
        self._put("events", {**self._clock.stamp(), "event": name, **fields})

    def note(self, name: str, **fields: Any) -> None:
        """As `event`, but never raises RecordError: it is left to the next record call."""
        self._take_in("events", {**self._clock.stamp(), "event": name, **fields})

    def metrics(self, row: dict[str, Any]) -> None:
        """Append to `metrics.jsonl`, one row a training step."""
        self._put("metrics", row)

    def validation(self, row: dict[str, Any]) -> None:
        """Append to `validations.jsonl`."""
        self._put("validations", row)

    def sample(self, row: dict[str, Any]) -> None:
        """Append to `samples.jsonl`, when the fate of a sample is known."""
        self._put("samples", row)

    def status(self, status: RunStatus) -> None:
        """Replace `status.json`; only the newest is written."""
        with self._changed:
            self._batch.status = status
            self._changed.notify()

    def num_rows(self) -> dict[str, int]:
        """Rows recorded so far, by file name without suffix; the checkpoint keeps them."""
        with self._changed:
            return dict(self._num_rows)

    async def flush(self) -> None:
        """Return when everything recorded so far is on disk.

        Raises:
            RecordError: it cannot be.
        """
        await self._request(is_last=False)

    async def aclose(self) -> None:
        """Write everything, after which thread and loggers end by themselves. Idempotent.

        Raises:
            RecordError: some of it could not be written.
        """
        if not self._is_closed:
            self._is_closed = True
            try:
                await self._request(is_last=True)
            finally:
                self._loggers.end()

    async def aclose_loggers(self) -> None:
        """Wait until the loggers have ended; call after `aclose`. Idempotent.

        Takes as long as a logger does: the caller sets the limit. Never raises: what failed is said
        on stderr, and the run's files have all that the loggers were given.
        """
        await self._loggers.aclose()

    async def _request(self, *, is_last: bool) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self._error is not None:
                raise RecordError(str(self._error)) from self._error
            self._batch.flushes.append(_Flush(loop, done))
            self._batch.is_last |= is_last
            self._changed.notify()
        await done

    def _put(self, name: str, row: dict[str, Any]) -> None:
        self._take_in(name, row)
        with self._changed:
            self._report_once()

    def _take_in(self, name: str, row: dict[str, Any]) -> None:
        line = dump_json(row) + "\n"
        with self._changed:
            if self._error is None and self._waiting_bytes + len(line) > self._max_waiting_bytes:
                self._error = RecordError(
                    f"{self._folder.path}: {self._waiting_bytes} bytes of records wait for the "
                    f"disk, which takes none; at most {self._max_waiting_bytes} may"
                )
            if self._error is not None:
                self.num_lost += 1
                return
            self._batch.rows.append((name, line))
            self._waiting_bytes += len(line)
            self._num_rows[name] += 1
            self._changed.notify()

    def _report_once(self) -> None:
        if self._error is not None and not self._is_reported:
            self._is_reported = True
            raise RecordError(str(self._error)) from self._error
        # A logger's failure loses no record, but ends the run as well.
        error, self._logger_error = self._logger_error, None
        if error is not None:
            raise RecordError(str(error)) from error

    def _take_logger_failure(self, error: RecordError) -> None:
        with self._changed:
            self._logger_error = error

    def _run(self) -> None:
        """The thread: takes what is there, writes it, until the last batch or an error."""
        batch = _Batch()
        try:
            with _Files(self._folder, self._loggers) as files:
                while not batch.is_last:
                    batch = self._take()
                    files.write(batch)
                    self._wrote(batch)
        except Exception as error:  # noqa: BLE001  # handed to the callers, whatever it is
            self._fail(error, batch)
        else:
            self._answer(batch.flushes, None)

    def _take(self) -> _Batch:
        """Wait for work, and a little longer for more, so that many rows cost one write."""
        with self._changed:
            deadline: float | None = None
            while not self._is_due(deadline):
                if deadline is None and (self._batch.rows or self._batch.status is not None):
                    deadline = time.monotonic() + FLUSH_INTERVAL_S
                self._changed.wait(None if deadline is None else deadline - time.monotonic())
            batch, self._batch = self._batch, _Batch()
            return batch

    def _is_due(self, deadline: float | None) -> bool:
        urgent = bool(self._batch.flushes) or self._waiting_bytes > _WRITE_AT_ONCE_BYTES
        return urgent or (deadline is not None and time.monotonic() >= deadline)

    def _wrote(self, batch: _Batch) -> None:
        with self._changed:
            self._waiting_bytes -= sum(len(line) for _, line in batch.rows)
        if not batch.is_last:
            self._answer(batch.flushes, None)

    def _fail(self, error: Exception, batch: _Batch) -> None:
        with self._changed:
            if self._error is None:
                self._error = RecordError(
                    f"{self._folder.path}: records cannot be written: "
                    f"{type(error).__name__}: {error}"
                )
                self._error.__cause__ = error
            flushes = [*batch.flushes, *self._batch.flushes]
            self._batch = _Batch()
        self._answer(flushes, self._error)

    @staticmethod
    def _answer(flushes: list[_Flush], error: RecordError | None) -> None:
        for flush in flushes:
            flush.resolve(None if error is None else RecordError(str(error)))


class _Files:
    """The open files of the thread; what lies in them goes on to the loggers."""

    def __init__(self, folder: RunFolder, loggers: LoggerThread) -> None:
        self._folder = folder
        self._loggers = loggers
        self._files: dict[str, BufferedWriter] = {}
        self._open = ExitStack()

    def __enter__(self) -> "_Files":
        with ExitStack() as opening:
            for name in ROW_FILES:
                path = self._folder.rows_path(name)
                self._files[name] = opening.enter_context(path.open("ab"))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def write(self, batch: _Batch) -> None:
        for name, line in batch.rows:
            self._files[name].write(line.encode())
        for file in self._files.values():
            file.flush()
        for name, line in batch.rows:
            self._loggers.put(name, line)
        if batch.status is not None:
            self._folder.write_status(batch.status)
        if batch.flushes:
            self._sync()

    def _sync(self) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())
        self._loggers.flush()
