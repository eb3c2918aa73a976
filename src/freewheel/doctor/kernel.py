"""What Linux says of a process and its threads, read from /proc: system call, wake-ups, children.

Everything is optional: another kernel, another user or a process that has just gone gives None.
Reading needs the same right as py-spy does (ptrace) for system calls, and none for the rest.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from freewheel.doctor.stacks import RESTARTED, Child, Syscall

_PROC = Path("/proc")

_X86 = {
    0: "read", 1: "write", 7: "poll", 23: "select", 270: "select", 271: "poll", 35: "sleep",
    230: "sleep", 202: "futex", 449: "futex", 232: "epoll", 281: "epoll", 441: "epoll2",
    61: "wait", 247: "wait", 45: "recv", 47: "recv", 43: "accept", 288: "accept", 42: "connect",
    44: "send", 46: "send", 73: "flock", 72: "fcntl", 17: "read", 2: "open", 257: "open",
}  # fmt: skip
_ARM = {
    63: "read", 64: "write", 73: "poll", 72: "select", 101: "sleep", 115: "sleep", 98: "futex",
    449: "futex", 22: "epoll", 441: "epoll2", 260: "wait", 95: "wait", 207: "recv", 212: "recv",
    202: "accept", 242: "accept", 203: "connect", 206: "send", 211: "send", 32: "flock",
    25: "fcntl", 67: "read", 56: "open",
}  # fmt: skip
# A wait with a timeout that a look has interrupted goes on under this number: which one it was
# is hidden from then on.
_RESTART = {"x86_64": 219, "aarch64": 128}.get(platform.machine())
_SYSCALLS = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFacts:
    """What the kernel says of one thread."""

    syscall: Syscall | None
    num_switches: int | None


def read_threads(pid: int) -> dict[int, ThreadFacts]:
    """The facts of every thread of a process, by the kernel's number."""
    try:
        names = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return {}
    return {
        int(name): ThreadFacts(
            syscall=read_syscall(pid, int(name)), num_switches=read_switches(pid, int(name))
        )
        for name in names
    }


def read_syscall(pid: int, os_thread_id: int) -> Syscall | None:
    """The system call that a thread is in; None if it runs, is unknown or cannot be read."""
    text = _read(_PROC / str(pid) / "task" / str(os_thread_id) / "syscall")
    return parse_syscall(text, pid=pid)


def parse_syscall(text: str | None, *, pid: int | None = None) -> Syscall | None:
    """Parse a line of `/proc/PID/task/TID/syscall`."""
    words = (text or "").split()
    if len(words) < 7 or not words[0].isdigit():
        return None
    if int(words[0]) == _RESTART:
        return Syscall(name=RESTARTED)
    name = _SYSCALLS.get(int(words[0]))
    arguments = [int(word, 16) for word in words[1:7]]
    if name is None:
        return Syscall(name=f"system call {words[0]}")
    # Before 3.11 time.sleep was a select without descriptors.
    if name == "select" and arguments[0] == 0:
        return Syscall(name="sleep")
    if name not in ("epoll", "epoll2"):
        return Syscall(name=name)
    endless = arguments[3] == 0 if name == "epoll2" else arguments[3] & 0xFFFFFFFF == 0xFFFFFFFF
    watched = None if pid is None else _num_watched(pid, arguments[0])
    return Syscall(name="epoll", no_timeout=endless, num_watched=watched)


def read_switches(pid: int, os_thread_id: int) -> int | None:
    """How often a thread has given up the processor of itself since it started."""
    text = _read(_PROC / str(pid) / "task" / str(os_thread_id) / "status")
    for line in (text or "").splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    return None


def read_state(pid: int) -> str | None:
    """The state letter of a process, as in `ps`: R, S, D, T (stopped), Z (defunct)."""
    return parse_stat(_read(_PROC / str(pid) / "stat"))[1]


def parse_stat(text: str | None) -> tuple[str, str | None]:
    """Short name and state letter out of `/proc/PID/stat`; the name may hold any character."""
    head, bracket, rest = (text or "").rpartition(") ")
    if not bracket:
        return "", None
    return head.partition("(")[2], rest[:1]


def read_children(pid: int) -> tuple[Child, ...] | None:
    """The direct children of a process, defunct ones too."""
    try:
        children = psutil.Process(pid).children()
    except psutil.Error:
        return None
    found: list[Child] = []
    for child in children:
        name, state = parse_stat(_read(_PROC / str(child.pid) / "stat"))
        if state is not None:
            found.append(Child(pid=child.pid, name=name, state=state))
    return tuple(found)


def _num_watched(pid: int, descriptor: int) -> int | None:
    """How many descriptors an epoll instance watches beside the loop's own for being woken up.

    asyncio has one of those (a socket pair), uvloop two (an eventfd and a pipe).
    """
    process = _PROC / str(pid)
    text = _read(process / "fdinfo" / str(descriptor))
    if text is None:
        return None
    watched = [line.split()[1] for line in text.splitlines() if line.startswith("tfd:")]
    links = [_link(process / "fd" / number) for number in watched]
    own = 2 if any("eventfd" in link for link in links) else 1
    return max(0, len(watched) - own)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
