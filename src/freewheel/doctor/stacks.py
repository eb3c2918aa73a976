"""What one look at a process shows: its Python threads with their frames, and the kernel's facts.

Plain data, built by `dump` and `kernel`, judged by `patterns`. Frames are innermost first. A fact
that could not be read (a saved dump has no kernel facts) is None, and no pattern takes None for
an answer.
"""

import re
import sys
from dataclasses import dataclass, field
from enum import StrEnum

_SITE = re.compile(r".*/(?:site|dist)-packages/(?P<tail>.+)")
_STDLIB = re.compile(r".*/lib(?:64)?/python3\.\d+t?/(?P<tail>.+)")
RESTARTED = "restarted"
# py-spy's pause makes a waiting thread wake and wait again.
_SWITCHES_PER_LOOK = 3
_BUNDLED = frozenset({"ray", "torch", "uvloop", "nest_asyncio", "IPython", "trio", "grpc"})


class Origin(StrEnum):
    """Whose code a frame is."""

    STDLIB = "stdlib"
    LIBRARY = "library"
    USER = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One Python frame; two are equal if they are at the same line of the same function.

    Attributes:
        function: qualified name where the interpreter has it (3.11 and later).
        path: file name, full where the dump has it.
        short_path: the file name as py-spy shortens it.
        line: line number.
        source: the text of that line, or None if the file could not be read.
        held: expressions of the `with` blocks that enclose the line; () if not looked up.
        native: a frame of native code.
    """

    function: str
    path: str
    short_path: str
    line: int
    source: str | None = field(default=None, compare=False)
    held: tuple[str, ...] = field(default=(), compare=False)
    native: bool = False

    @property
    def name(self) -> str:
        """The function's own name, without its class."""
        return self.function.rpartition(".")[2]

    @property
    def tail(self) -> str:
        """The file within its package folder: `threading.py`, `ray/_private/worker.py`."""
        match = _SITE.match(self.path) or _STDLIB.match(self.path)
        return match["tail"] if match else self.short_path

    @property
    def origin(self) -> Origin:
        """Whether it is the user's code; by name alone where the dump has only short paths."""
        if self.path.startswith("<frozen"):
            return Origin.STDLIB
        if _SITE.match(self.path):
            return Origin.LIBRARY
        if _STDLIB.match(self.path):
            return Origin.STDLIB
        if self.path.startswith(("/", "<")):
            return Origin.USER
        top = self.path.partition("/")[0].removesuffix(".py")
        if top in _BUNDLED:
            return Origin.LIBRARY
        return Origin.STDLIB if top in sys.stdlib_module_names else Origin.USER

    def is_at(self, tail: str, *names: str) -> bool:
        """Whether it is one of these functions of this file (any function if none is named).

        `tail` may end with `/`: any file of that folder.
        """
        if names and self.name not in names:
            return False
        return self.tail.startswith(tail) if tail.endswith("/") else self.tail == tail

    def __str__(self) -> str:
        return f"{self.function} ({self.short_path}:{self.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Syscall:
    """The system call that a thread is in.

    Attributes:
        name: `futex`, `epoll`, ...; `sleep` for every way of sleeping; RESTARTED for a wait with a
            timeout that a look has interrupted.
        no_timeout: for a wait on epoll: whether it has no timer.
        num_watched: for a wait on epoll: descriptors it watches beside the loop's own, or None.
    """

    name: str
    no_timeout: bool | None = None
    num_watched: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One Python thread in one sample.

    Attributes:
        thread_id: Python's identifier.
        os_thread_id: the kernel's, or None.
        name: Python's name, or "".
        active: whether it was running (by the kernel's account) rather than waiting.
        owns_gil: whether it held the interpreter lock.
        frames: innermost first.
        syscall: what it waits in, or None if unknown or running.
        num_switches: times it has given up the processor of itself since it started, or None.
    """

    thread_id: int
    os_thread_id: int | None
    name: str
    active: bool
    owns_gil: bool
    frames: tuple[Frame, ...]
    syscall: Syscall | None = None
    num_switches: int | None = None

    @property
    def label(self) -> str:
        """Its name and the kernel's number, for a person."""
        number = f"{self.os_thread_id}" if self.os_thread_id else f"{self.thread_id:#x}"
        return f"{self.name!r} ({number})" if self.name else f"thread {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A child process: its short name (`comm`) and its state letter as in `ps`."""

    pid: int
    name: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a process; `children` and `state` are None where the kernel was not asked."""

    time_s: float
    threads: tuple[Thread, ...]
    state: str | None = None
    children: tuple[Child, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process and the samples taken of it, oldest first; at least one."""

    pid: int
    command: str
    samples: tuple[Sample, ...]
    python_version: str = ""

    @property
    def last(self) -> Sample:
        """The newest sample."""
        return self.samples[-1]

    @property
    def seconds(self) -> float:
        """Time between the first and the last sample."""
        return self.samples[-1].time_s - self.samples[0].time_s

    @property
    def span(self) -> str:
        """How long it was looked at, for a sentence."""
        if len(self.samples) < 2:
            return "in the one dump there is"
        return f"in all {len(self.samples)} samples over {self.seconds:.1f} s"

    @property
    def actor(self) -> str | None:
        """The class of the Ray actor (or the name of the Ray task), from the process title."""
        match = re.match(r"ray::([^\s.(:]+)", self.command)
        return match[1] if match else None

    @property
    def method(self) -> str | None:
        """The method that a Ray actor runs, from the process title."""
        match = re.match(r"ray::[^\s.(:]+(?:\([^)]*\))?\.(\w+)", self.command)
        return match[1] if match else None

    @property
    def label(self) -> str:
        """For a person: the command, shortened, and the pid."""
        command = " ".join(self.command.split())
        return f"{command[:77] + '...' if len(command) > 80 else command or '?'} (pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One thread over all samples of its process; `history` ends with its last look."""

    history: tuple[Thread, ...]
    num_samples: int
    seconds: float

    @property
    def last(self) -> Thread:
        """The thread in the newest sample."""
        return self.history[-1]

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Its frames in the newest sample."""
        return self.history[-1].frames

    @property
    def syscall(self) -> Syscall | None:
        """The system call it was last seen in; a look makes the kernel restart it, and hides it."""
        known = [thread.syscall for thread in self.history if thread.syscall is not None]
        named = [syscall for syscall in known if syscall.name != RESTARTED]
        return (named or known or [None])[-1]

    @property
    def still(self) -> bool:
        """Whether it was there, at the same lines, in every sample."""
        same = all(thread.frames == self.frames for thread in self.history)
        return len(self.history) == self.num_samples and same

    @property
    def waiting(self) -> bool:
        """Whether it was still, and never running."""
        return self.still and not any(thread.active for thread in self.history)

    @property
    def wakeups_per_s(self) -> float | None:
        """How often it gave up the processor of itself, less our own pauses; None if unknown."""
        first, last = self.history[0].num_switches, self.history[-1].num_switches
        if first is None or last is None or self.seconds <= 0 or len(self.history) < 2:
            return None
        own = last - first - _SWITCHES_PER_LOOK * (len(self.history) - 1)
        return max(0, own) / self.seconds


def tracks(process: Process) -> list[Track]:
    """The threads of the newest sample, each with its earlier looks."""
    found: list[Track] = []
    for thread in process.last.threads:
        key = (thread.thread_id, thread.os_thread_id)
        history = tuple(
            earlier
            for sample in process.samples
            for earlier in sample.threads
            if (earlier.thread_id, earlier.os_thread_id) == key
        )
        found.append(
            Track(history=history, num_samples=len(process.samples), seconds=process.seconds)
        )
    return found
