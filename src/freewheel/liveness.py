"""Whether a run is alive, as far as its folder tells."""

import socket
from typing import Literal

import psutil

from freewheel.run_folder import LastStatus, RunFolder

Liveness = Literal["live", "dead", "unknown"]

SILENT_S = 10.0
"""A live run that has not renewed its status for so long has a blocked control plane."""


def liveness(folder: RunFolder, last: LastStatus | None, *, now_s: float) -> Liveness:
    """Whether a process runs the run of a folder that has no summary.

    By the folder's lock; where that cannot be looked at, by the last sign of life. A lock that is
    free says little of a run on another machine: some shared file systems keep locks to each.

    Args:
        folder: of the run.
        last: what the run said of itself last.
        now_s: the wall clock, in seconds since the epoch.
    """
    lock = folder.lock_state()
    if lock == "held":
        return "live"
    is_here = last is None or last.host == socket.gethostname()
    if lock == "free" and is_here:
        return "dead"
    if last is not None and now_s - last.updated <= SILENT_S:
        return "live"
    if lock == "free" or (last is not None and is_here and not psutil.pid_exists(last.pid)):
        return "dead"
    return "unknown"
