"""What the terminal shows of a run: a live display, plain lines, or nothing.

`update` returns at once: a thread draws, so that neither a slow terminal nor one that is paused
(Ctrl-S) holds up a loop or the records. A terminal that is gone ends the display, not the run.
"""

import sys
import threading
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freewheel.progress_text import (
    describe_checkpoint,
    describe_rollouts,
    describe_speed,
    describe_steps,
    describe_summary,
    describe_training,
    describe_validation,
    describe_waits,
    news,
    one_line,
)
from freewheel.status import RunStatus

CLOSE_TIMEOUT_S = 2.0
"""How long the end of a run waits for a terminal that does not take its last lines."""

MIN_INTERVAL_S = 2.0
"""Between two plain lines about steps."""

MAX_INTERVAL_S = 30.0
"""Longest silence of the plain display."""


class Progress(Protocol):
    """Where the state of a run is shown."""

    def update(self, status: RunStatus) -> None:
        """Show a newer state. Returns at once."""
        ...

    def close(self, summary: dict[str, Any] | None) -> None:
        """Show the end, given the content of `summary.json`. Idempotent; takes at most 2 s."""
        ...


class Renderer(Protocol):
    """Draws, in the thread of a `BackgroundProgress`."""

    def draw(self, status: RunStatus) -> None:
        """Show a state."""
        ...

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Show the end and give the terminal back."""
        ...


def make_progress(
    mode: Literal["auto", "rich", "plain", "none"], *, stream: TextIO | None = None
) -> Progress:
    """The display that `logging.progress` names; `auto` looks whether the stream is a terminal."""
    target = sys.stdout if stream is None else stream
    if mode == "none":
        return NoProgress()
    if mode == "plain" or (mode == "auto" and not target.isatty()):
        return BackgroundProgress(PlainRenderer(target))
    return BackgroundProgress(RichRenderer(Console(file=target)))


class NoProgress:
    """Shows nothing."""

    def update(self, status: RunStatus) -> None:
        """Nothing."""

    def close(self, summary: dict[str, Any] | None) -> None:
        """Nothing."""


class BackgroundProgress:
    """Draws the newest state in a thread of its own; states that come too fast are skipped."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._changed = threading.Condition()
        self._status: RunStatus | None = None
        self._summary: dict[str, Any] | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def update(self, status: RunStatus) -> None:
        """Show a newer state. Returns at once."""
        with self._changed:
            self._status = status
            self._changed.notify()

    def close(self, summary: dict[str, Any] | None) -> None:
        """Show the end. Idempotent; takes at most `CLOSE_TIMEOUT_S`."""
        with self._changed:
            if not self._is_closed:
                self._summary = summary
                self._is_closed = True
                self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (status := self._take()) is not None:
                self._renderer.draw(status)
            self._renderer.finish(self._summary)
        except (OSError, ValueError):
            # The terminal is gone (broken pipe, closed file): nobody looks, the run goes on.
            return

    def _take(self) -> RunStatus | None:
        """Wait for a newer state; None at the end, after the last one was drawn."""
        with self._changed:
            self._changed.wait_for(lambda: self._status is not None or self._is_closed)
            status, self._status = self._status, None
            return status


class PlainRenderer:
    """A line for a step, not more often than `MIN_INTERVAL_S`, and one for each piece of news."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: RunStatus | None = None
        self._last_line: RunStatus | None = None

    def draw(self, status: RunStatus) -> None:
        """Write what is new."""
        for text in news(self._drawn, status):
            self._write(text)
        self._drawn = status
        if self._is_due(status):
            self._last_line = status
            self._write(one_line(status))

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Write the last step, if it had no line yet, and the end."""
        drawn, last = self._drawn, self._last_line
        if drawn is not None and (last is None or last.step != drawn.step):
            self._write(one_line(drawn))
        for text in describe_summary(summary):
            self._write(text)

    def _is_due(self, status: RunStatus) -> bool:
        if self._last_line is None:
            return True
        silent_s = status.wall_s - self._last_line.wall_s
        has_step = status.step != self._last_line.step
        return silent_s >= MAX_INTERVAL_S or (has_step and silent_s >= MIN_INTERVAL_S)

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class RichRenderer:
    """A live table with a bar; validations and checkpoints scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._drawn: RunStatus | None = None

    def draw(self, status: RunStatus) -> None:
        """Draw the table anew."""
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        for text in news(self._drawn, status):
            self._console.print(Text(text))
        self._drawn = status
        self._live.update(render_table(status), refresh=True)

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Leave the last table standing and write the end below it."""
        if self._live is not None:
            self._live.stop()
        for text in describe_summary(summary):
            self._console.print(Text(text))


def render_table(status: RunStatus) -> Group:
    """The live display of one state."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for label, text in (
        ("steps", describe_steps(status)),
        ("rollouts", describe_rollouts(status)),
        ("speed", describe_speed(status)),
        ("training", describe_training(status)),
        ("validation", describe_validation(status)),
        ("checkpoint", describe_checkpoint(status)),
        ("waits", describe_waits(status)),
    ):
        table.add_row(label, Text(text))
    # A bar ends no line by itself; a grid gives it one of its own.
    bar = Table.grid()
    bar.add_row(ProgressBar(total=status.total_steps or None, completed=status.step, width=60))
    return Group(bar, table)
