"""Recognises what a waiting thread waits in, from its innermost frames and its system call.

A frame of the standard library or of Ray is proof by itself. A call implemented in C has no frame
(`time.sleep`, `Lock.acquire`): there the text of the line and the system call must agree.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from freewheel.doctor.findings import Certainty
from freewheel.doctor.stacks import RESTARTED, Frame, Origin, Syscall


class WaitKind(StrEnum):
    """What is waited for."""

    RESULT = "concurrent.futures result()"
    FUTURES = "concurrent.futures wait"
    SHUTDOWN = "the shutdown of an executor"
    RAY_GET = "ray.get"
    RAY_WAIT = "ray.wait"
    QUEUE = "a queue"
    SUBPROCESS = "a subprocess"
    JOIN = "Thread.join"
    EVENT = "a threading event or condition"
    PIPE = "a pipe of multiprocessing"
    SOCKET = "a socket"
    RPC = "a gRPC call"
    LOCK = "a lock"
    SLEEP = "time.sleep"
    FILE_LOCK = "a file lock"
    INPUT = "input"
    NATIVE = "native code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A recognised wait: its kind, the position of the frame that shows it, and how sure."""

    kind: WaitKind
    index: int
    certainty: Certainty


# The first row that matches any of the innermost frames which are not the user's decides.
_FRAMES: tuple[tuple[WaitKind, str, tuple[str, ...]], ...] = (
    (WaitKind.RAY_GET, "ray/_private/worker.py", ("get", "get_objects")),
    (WaitKind.RAY_WAIT, "ray/_private/worker.py", ("wait",)),
    (WaitKind.RAY_GET, "ray/util/client/worker.py", ("get", "_get")),
    (WaitKind.RAY_WAIT, "ray/util/client/worker.py", ("wait",)),
    (WaitKind.RESULT, "concurrent/futures/_base.py", ("result", "exception")),
    (WaitKind.FUTURES, "concurrent/futures/_base.py", ("wait", "as_completed")),
    (WaitKind.SHUTDOWN, "concurrent/futures/thread.py", ("shutdown",)),
    (WaitKind.SHUTDOWN, "concurrent/futures/process.py", ("shutdown",)),
    (WaitKind.SUBPROCESS, "subprocess.py", ()),
    (WaitKind.SUBPROCESS, "multiprocessing/process.py", ("join",)),
    (WaitKind.QUEUE, "queue.py", ("get", "put", "join")),
    (WaitKind.QUEUE, "multiprocessing/queues.py", ("get", "put", "join")),
    (WaitKind.RPC, "grpc/_channel.py", ()),
    (WaitKind.JOIN, "threading.py", ("join",)),
    (WaitKind.EVENT, "threading.py", ("wait", "wait_for", "acquire")),
    (WaitKind.LOCK, "multiprocessing/synchronize.py", ()),
    (WaitKind.PIPE, "multiprocessing/connection.py", ()),
    (WaitKind.SOCKET, "ssl.py", ()),
    (WaitKind.SOCKET, "socket.py", ()),
    (WaitKind.SOCKET, "socketserver.py", ()),
    (WaitKind.SOCKET, "http/client.py", ()),
    (WaitKind.SOCKET, "selectors.py", ("select",)),
)

# Of the innermost line: its text, and the system calls that go with it.
_TEXTS: tuple[tuple[WaitKind, str, frozenset[str]], ...] = (
    (WaitKind.SLEEP, r"\bsleep\(", frozenset({"sleep"})),
    (WaitKind.LOCK, r"\.acquire\(|^with\s", frozenset({"futex"})),
    (WaitKind.SUBPROCESS, r"\b(?:system|wait|wait3|wait4|waitpid|waitid)\(", frozenset({"wait"})),
    (
        WaitKind.SOCKET,
        r"\.(?:recv\w*|accept|connect|send|sendall|sendto)\(|\bgetaddrinfo\(|\bgethostby\w+\(",
        frozenset({"recv", "send", "accept", "connect", "poll", "read"}),
    ),
    (WaitKind.QUEUE, r"\.(?:get|put)\(", frozenset({"futex"})),
    (WaitKind.FILE_LOCK, r"\b(?:flock|lockf)\(", frozenset({"flock", "fcntl"})),
    (WaitKind.INPUT, r"\binput\(|\bstdin\.read", frozenset({"read", "poll", "select"})),
)
_BY_SYSCALL = {
    "sleep": WaitKind.SLEEP,
    "wait": WaitKind.SUBPROCESS,
    "recv": WaitKind.SOCKET,
    "accept": WaitKind.SOCKET,
    "connect": WaitKind.SOCKET,
    "flock": WaitKind.FILE_LOCK,
}


def recognise(frames: tuple[Frame, ...], syscall: Syscall | None) -> Wait | None:
    """What the innermost of these frames wait in.

    Args:
        frames: innermost first; of a thread that was seen waiting.
        syscall: the system call it is in, or None if unknown.

    Returns:
        The wait; of kind NATIVE if the thread waits in something that has no name here; None if
        there are no frames.
    """
    if not frames:
        return None
    return _by_frames(frames) or _by_text(frames[0], syscall) or _by_syscall(syscall)


def _by_frames(frames: tuple[Frame, ...]) -> Wait | None:
    foreign = list(takewhile(lambda frame: frame.origin is not Origin.USER, frames))
    for kind, tail, names in _FRAMES:
        matching = [i for i, frame in enumerate(foreign) if frame.is_at(tail, *names)]
        if matching:
            return Wait(kind=kind, index=matching[-1], certainty=Certainty.CERTAIN)
    return None


def _by_text(frame: Frame, syscall: Syscall | None) -> Wait | None:
    if frame.source is None:
        return None
    for kind, pattern, syscalls in _TEXTS:
        if re.search(pattern, frame.source) is None:
            continue
        if syscall is None:
            return Wait(kind=kind, index=0, certainty=Certainty.LIKELY)
        if syscall.name in syscalls or syscall.name == RESTARTED:
            return Wait(kind=kind, index=0, certainty=Certainty.CERTAIN)
    return None


def _by_syscall(syscall: Syscall | None) -> Wait:
    kind = WaitKind.NATIVE if syscall is None else _BY_SYSCALL.get(syscall.name, WaitKind.NATIVE)
    sure = Certainty.POSSIBLE if kind is WaitKind.NATIVE else Certainty.CERTAIN
    return Wait(kind=kind, index=0, certainty=sure)
