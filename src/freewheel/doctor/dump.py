"""Takes and reads dumps of py-spy: live ones under a deadline, and saved ones (text or JSON).

py-spy pauses the process for some milliseconds. If it must be killed at its deadline, a process
that it left stopped is let go on.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from freewheel.doctor import kernel
from freewheel.doctor.stacks import Frame, Process, Sample, Thread
from freewheel.errors import ConfigError

_PERMISSION = """\
no permission to look into process {pid}. One of these gives it:
  - run as the same user as the process, or as root: sudo {python} -m freewheel doctor ...
  - Linux, ptrace restricted to child processes: sudo sysctl kernel.yama.ptrace_scope=0
  - in a container: start it with the capability SYS_PTRACE (docker run --cap-add=SYS_PTRACE;
    Kubernetes: securityContext.capabilities.add: ["SYS_PTRACE"])"""
_THREAD = re.compile(
    r"^Thread (?P<id>0x[0-9a-fA-F]+|\d+)\s+\((?P<state>[^)]*)\)(?:: \"(?P<name>.*)\")?\s*$"
)
_FRAME = re.compile(r"^ {4}(?P<function>\S.*) \((?P<path>.+?)(?::(?P<line>\d+))?\)\s*$")
_PROCESS = re.compile(r"^Process (?P<pid>\d+): (?P<command>.*)$")
_VERSION = re.compile(r"^Python v(?P<version>\S+)")


class CannotExamineError(ConfigError):
    """A process or a dump cannot be examined; says why and what would help."""


def take_sample(pid: int, *, timeout_s: float, native: bool = False) -> Sample:
    """Look at a process once.

    Args:
        pid: the process.
        timeout_s: py-spy is killed after this time.
        native: show native frames too.

    Raises:
        CannotExamineError: no such process, not Python, no permission, or too slow.
    """
    state = kernel.read_state(pid)
    options = ["--json", *(["--native"] if native else [])]
    # A stopped process cannot answer to ptrace; its memory can be read all the same.
    if state in ("T", "t"):
        options.append("--nonblocking")
    time_s = time.monotonic()
    # Before the dump, whose pause interrupts the system calls.
    facts = kernel.read_threads(pid)
    records = json.loads(run_py_spy(pid, options, timeout_s=timeout_s))
    threads = tuple(_with_facts(_thread(record), facts) for record in records)
    return Sample(time_s=time_s, threads=threads, state=state, children=kernel.read_children(pid))


def run_py_spy(pid: int, options: list[str], *, timeout_s: float) -> str:
    """The output of `py-spy dump`.

    Raises:
        CannotExamineError: as for `take_sample`.
    """
    command = [_find_py_spy(), "dump", "--pid", str(pid), *options]
    was_stopped = kernel.read_state(pid) in ("T", "t")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        if not was_stopped:
            _let_go_on(pid)
        raise CannotExamineError(
            f"py-spy gave no dump of process {pid} within {timeout_s:g} s"
        ) from None
    if done.returncode != 0:
        raise CannotExamineError(explain_failure(pid, done.stderr))
    return done.stdout


def explain_failure(pid: int, stderr: str) -> str:
    """What a failure of py-spy means, from its error output."""
    text = stderr.lower()
    if any(word in text for word in ("permission denied", "operation not permitted", "eperm")):
        return _PERMISSION.format(pid=pid, python=sys.executable)
    if "no such process" in text or "no such file" in text or "doesn't exist" in text:
        return f"there is no process {pid}"
    if "find python" in text or "python version" in text or "python interpreter" in text:
        return f"process {pid} is not a Python process (or only just starting)"
    first = stderr.strip().partition("\n")[0]
    return f"py-spy cannot read process {pid}: {first}"


def read_dump(path: Path) -> list[Process]:
    """The processes in a saved dump, as `py-spy dump` or `py-spy dump --json` writes it.

    Raises:
        CannotExamineError: no such file, or no dump in it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CannotExamineError(f"dump {path}: {error.strerror or error}") from error
    found = _parse_json(text) if text.lstrip().startswith("[") else _parse_text(text)
    if not found:
        raise CannotExamineError(
            f"dump {path}: no thread found; expected the output of `py-spy dump --pid PID`, "
            "with or without --json"
        )
    return found


def _parse_json(text: str) -> list[Process]:
    try:
        records = json.loads(text)
        by_pid: dict[int, list[Thread]] = {}
        commands: dict[int, str] = {}
        for record in records:
            info = record.get("process_info") or {}
            by_pid.setdefault(record["pid"], []).append(_thread(record))
            commands.setdefault(record["pid"], str(info.get("command_line", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return [
        Process(pid=pid, command=commands[pid], samples=(_alone(threads),))
        for pid, threads in by_pid.items()
    ]


def _parse_text(text: str) -> list[Process]:
    """Read the text form; several dumps may follow each other in one file."""
    found: list[Process] = []
    head: dict[str, Any] = {"pid": 0, "command": "", "python_version": ""}
    threads: list[Thread] = []

    def close() -> None:
        if threads:
            found.append(Process(samples=(_alone(threads),), **head))

    for line in text.splitlines():
        if match := _PROCESS.match(line):
            close()
            threads = []
            head = {"pid": int(match["pid"]), "command": match["command"], "python_version": ""}
        elif match := _VERSION.match(line):
            head["python_version"] = match["version"]
        elif match := _THREAD.match(line):
            threads.append(_text_thread(match))
        elif threads and (match := _FRAME.match(line)):
            frame = _text_frame(match)
            threads[-1] = replace(threads[-1], frames=(*threads[-1].frames, frame))
    close()
    return found


def _alone(threads: list[Thread]) -> Sample:
    return Sample(time_s=0.0, threads=tuple(threads))


def _text_thread(match: re.Match[str]) -> Thread:
    number = int(match["id"], 0)
    return Thread(
        thread_id=number,
        # Python's own identifiers are printed in hexadecimal, the kernel's in decimal.
        os_thread_id=None if match["id"].startswith("0x") else number,
        name=match["name"] or "",
        active="active" in match["state"],
        owns_gil="gil" in match["state"],
        frames=(),
    )


def _text_frame(match: re.Match[str]) -> Frame:
    path = match["path"]
    return Frame(
        function=match["function"], path=path, short_path=path, line=int(match["line"] or 0)
    )


def _thread(record: dict[str, Any]) -> Thread:
    return Thread(
        thread_id=record["thread_id"],
        os_thread_id=record.get("os_thread_id"),
        name=record.get("thread_name") or "",
        active=bool(record["active"]),
        owns_gil=bool(record["owns_gil"]),
        frames=tuple(_frame(frame) for frame in record["frames"]),
    )


def _frame(record: dict[str, Any]) -> Frame:
    path = str(record["filename"])
    return Frame(
        function=str(record["name"]),
        path=path,
        short_path=str(record.get("short_filename") or path),
        line=int(record["line"]),
        native=not path.endswith((".py", ">")),
    )


def _with_facts(thread: Thread, facts: dict[int, kernel.ThreadFacts]) -> Thread:
    known = facts.get(thread.os_thread_id or 0)
    if known is None:
        return thread
    return replace(thread, syscall=known.syscall, num_switches=known.num_switches)


def _find_py_spy() -> str:
    beside = str(Path(sys.executable).parent)
    found = shutil.which("py-spy", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if found is None:
        raise CannotExamineError("py-spy is not installed: pip install py-spy")
    return found


def _let_go_on(pid: int) -> None:
    """A killed py-spy can leave the process stopped."""
    if kernel.read_state(pid) == "T":
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
