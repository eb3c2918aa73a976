"""The one deadline of a stop: by it the process is gone, whatever still hangs."""

import threading
import time
from collections.abc import Callable


class StopDeadline:
    """Counts from the stop's begin; calls `on_overdue` in a thread of its own when time is up.

    Args:
        limit_s: from the begin to the end of the process.
        on_overdue: ends the process. Not on the event loop, which may be what hangs.
    """

    def __init__(self, limit_s: float, on_overdue: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._timer = threading.Timer(limit_s, on_overdue)
        self._timer.name = "stop-deadline"
        self._timer.daemon = True
        self._ends: float | None = None

    def begin(self) -> None:
        """The stop was asked for. Once only."""
        self._ends = time.monotonic() + self._limit_s
        self._timer.start()

    def left_s(self, otherwise: float) -> float:
        """Seconds that are left; `otherwise` before a stop was asked for."""
        return otherwise if self._ends is None else max(0.0, self._ends - time.monotonic())

    def cancel(self) -> None:
        """All is done, or someone else ends the process. Idempotent."""
        self._timer.cancel()
