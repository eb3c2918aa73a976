"""Finds the processes of Ray on this machine that run the user's code: workers and drivers."""

import os
import re
from pathlib import Path

import psutil

_NOT_USERS = re.compile(r"ray::(?:DashboardAgent|RuntimeEnvAgent|IDLE_SpillWorker|RestoreWorker)")
_RAY_CORE = "/ray/_raylet"
_OF_RAY = re.compile(r"/ray/(?:dashboard|autoscaler|_private|scripts|core|util)/|/bin/ray(?:\s|$)")


def ray_processes() -> list[int]:
    """The pids of all Ray workers (actors, tasks, idle ones) and drivers on this machine."""
    found: list[int] = []
    for process in psutil.process_iter():
        command = command_of(process.pid)
        if process.pid != os.getpid() and _runs_user_code(process.pid, command):
            found.append(process.pid)
    return sorted(found)


def command_of(pid: int) -> str:
    """The command line of a process (for a Ray worker its title); "" if it has gone."""
    try:
        return " ".join(" ".join(psutil.Process(pid).cmdline()).split())
    except (psutil.Error, OSError):
        return ""


def _runs_user_code(pid: int, command: str) -> bool:
    if command.startswith("ray::"):
        return _NOT_USERS.match(command) is None
    return not _OF_RAY.search(command) and _has_ray_core(pid)


def _has_ray_core(pid: int) -> bool:
    """Whether Ray's core library is loaded: in a driver; import alone does it too."""
    try:
        return _RAY_CORE in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
