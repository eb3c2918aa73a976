"""The thread in which loggers work, apart from the records: a logger may take its time.

Opening W&B takes up to minutes without a network, and so does its end; neither the loops, nor the
records, nor a checkpoint wait for it. A logger that fails, or takes nothing any more, ends the run.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from freewheel.errors import RecordError
from freewheel.last_resort import say
from freewheel.threads import CallThread


class Sink(Protocol):
    """A logger. All calls come from the loggers' thread, in order; errors end the run."""

    def open(self) -> None:
        """Begin."""
        ...

    def metrics(self, row: dict[str, Any]) -> None:
        """One training step."""
        ...

    def validation(self, row: dict[str, Any]) -> None:
        """One validation."""
        ...

    def flush(self) -> None:
        """Bring what was logged to where it belongs."""
        ...

    def close(self) -> None:
        """End. Idempotent; also called if `open` failed, or was never called."""
        ...


class LoggerThread:
    """Owns the loggers of a run. Its methods return at once, but for `aclose`.

    Args:
        sinks: the loggers.
        on_failure: told of the first failure, in any thread; the loggers get nothing after it.
        max_waiting_bytes: rows that may wait for them.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        on_failure: Callable[[RecordError], None],
        max_waiting_bytes: int,
    ) -> None:
        self._sinks = tuple(sinks)
        self._on_failure = on_failure
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._has_failed = False
        self._ended: Future[None] | None = None
        self._thread = CallThread("loggers")
        for sink in self._sinks:
            self._thread.submit(self._do, sink, sink.open)

    def put(self, name: str, line: str) -> None:
        """Give a row to all loggers.

        Args:
            name: of the row's file; loggers get `metrics` and `validations` alone.
            line: the row, JSON.
        """
        if not self._sinks or name not in ("metrics", "validations"):
            return
        with self._lock:
            self._waiting_bytes += len(line)
            waiting_bytes = self._waiting_bytes
        if waiting_bytes > self._max_waiting_bytes:
            self._fail(
                f"{waiting_bytes} bytes of records wait for the loggers, which take none; at most "
                f"{self._max_waiting_bytes} may"
            )
        else:
            self._thread.submit(self._log, name, line)

    def flush(self) -> None:
        """Have the loggers bring to its place what they were given; not waited for."""
        for sink in self._sinks:
            self._thread.submit(self._do, sink, sink.flush)

    def end(self) -> None:
        """End the loggers when they have taken what they were given. Idempotent."""
        if self._ended is None:
            self._ended = self._thread.submit(self._close)
            self._thread.close()

    async def aclose(self) -> None:
        """End the loggers and wait for it. A failure is said, not raised: the run has ended."""
        self.end()
        if self._ended is not None:
            await asyncio.wrap_future(self._ended)

    def _log(self, name: str, line: str) -> None:
        row = json.loads(line)
        for sink in self._sinks:
            self._do(sink, sink.metrics if name == "metrics" else sink.validation, row)
        with self._lock:
            self._waiting_bytes -= len(line)

    def _do(self, sink: Sink, call: Callable[..., None], *args: object) -> None:
        if self._has_failed:
            return
        try:
            call(*args)
        except BaseException as error:  # noqa: BLE001  # foreign code: sys.exit must not pass for the thread's end
            self._fail(_describe(sink, error))

    def _fail(self, text: str) -> None:
        with self._lock:
            is_first, self._has_failed = not self._has_failed, True
        if is_first:
            say(text)
            self._on_failure(RecordError(text))

    def _close(self) -> None:
        """Each logger gets its end, whatever became of the others."""
        for sink in self._sinks:
            try:
                sink.close()
            except BaseException as error:  # noqa: BLE001  # as in `_do`
                say(_describe(sink, error))


def _describe(sink: Sink, error: BaseException) -> str:
    return f"logger {type(sink).__name__}: {type(error).__name__}: {error}"
