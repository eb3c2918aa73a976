"""One run, several lives of it in one process.

What takes down more than can be replaced (the trainer together with the batches since its newest
checkpoint) ends a life, not the run: it goes on from that checkpoint, as a resume would. It does so
once for each checkpoint, so that a cause that comes again ends it; and not after a stop.
"""

import contextlib
import signal
from collections.abc import Callable, Generator
from pathlib import Path

from freewheel.control.run_end import RunEnd, make_run_end
from freewheel.control.run_state import ResumePoint
from freewheel.errors import TrainerStateLostError, WeightsLostError
from freewheel.last_resort import attempt, say

_STATE_LOST = (TrainerStateLostError, WeightsLostError)
_SUMMARY_S = 10.0
_BESIDE_NUMBERS = ("status", "exit_code", "cause")


def run_lives(
    live: Callable[[ResumePoint | None], RunEnd],
    point: ResumePoint | None,
    *,
    newest: Callable[[], Path | None],
    take_up: Callable[[], ResumePoint | None],
    write_summary: Callable[[dict[str, object]], None],
) -> RunEnd:
    """Run until the run has ended.

    Args:
        live: one life, from a checkpoint or from the beginning.
        point: where the first one begins.
        newest: folder of the newest whole checkpoint, if there is one.
        take_up: brings the run's folder back to it.
        write_summary: writes the summary of a run that ended between two lives.

    Returns:
        The end of the last life, also if the run cannot be taken up after it, or of the stop.
    """
    while True:
        end = live(point)
        if not isinstance(end.error, _STATE_LOST) or end.stop_signal is not None:
            return end
        folder = newest()
        if folder is None or (point is not None and point.folder == folder):
            return end
        say(f"{end.cause}\nthe run goes on from {folder}")
        with _signals_noted() as taken:
            try:
                point = take_up()
            except Exception as error:  # noqa: BLE001 - the first cause stays the run's end
                say(f"it cannot: {error}")
                attempt("summary.json", _SUMMARY_S, write_summary, end.summary)
                return end
        if taken:
            return _stopped(end, taken[0], write_summary)


@contextlib.contextmanager
def _signals_noted() -> Generator[list[str]]:
    """Names of the signals that come meanwhile: no life is there to take them."""
    taken: list[str] = []

    def note(number: int, _frame: object) -> None:
        taken.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield taken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(end: RunEnd, name: str, write_summary: Callable[[dict[str, object]], None]) -> RunEnd:
    numbers = {key: value for key, value in end.summary.items() if key not in _BESIDE_NUMBERS}
    reason = f"while the run was brought back to a checkpoint after {end.cause}"
    stopped = make_run_end(error=None, stop_signal=name, cut_short=reason, numbers=numbers)
    attempt("summary.json", _SUMMARY_S, write_summary, stopped.summary)
    return stopped
