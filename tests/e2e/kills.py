"""SIGKILL of a whole run, all of its processes at once, at a moment that is watched for."""

import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.e2e.ray_helpers import alive
from tests.e2e.runs import LiveRun

POLL_S = 0.004


def kill_whole(live: LiveRun) -> set[psutil.Process]:
    """Freeze every process of a run, then kill them: none sees another one die.

    The driver is frozen first, and the tree is read again until nothing new is in it: a frozen
    process starts no other.
    """
    known = [live.process, *live.started]
    frozen: set[psutil.Process] = set()
    while new := [process for process in known if process not in frozen]:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        frozen.update(new)
        with contextlib.suppress(psutil.NoSuchProcess):
            known = live.process.children(recursive=True)
    return frozen


def end_frozen(live: LiveRun, frozen: set[psutil.Process], timeout_s: float = 20) -> list[str]:
    """Kill what is frozen; names what survives."""
    for process in frozen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    live.process.wait(timeout_s)
    deadline = time.monotonic() + timeout_s
    while (left := alive(frozen)) and time.monotonic() < deadline:
        time.sleep(POLL_S)  # noqa: TID251 - a test process without a loop
    return [f"{process.pid}" for process in left]


@dataclass(slots=True)
class Events:
    """Events of one life of a run: those after the last whole line that was there before."""

    path: Path
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        content = self.path.read_bytes() if self.path.exists() else b""
        self.offset = content.rfind(b"\n") + 1

    def rows(self) -> list[dict]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            lines = file.read().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def counts(self) -> Counter[str]:
        return Counter(row["event"] for row in self.rows())


class Moments:
    """Kinds of moments at which to kill; each waits in its own way, then a random while."""

    def __init__(self, rng: random.Random, live: LiveRun, events: Events) -> None:
        self._rng = rng
        self._live = live
        self._events = events
        self._checkpoints = live.folder / "checkpoints"
        self._began_ns = time.time_ns()

    def wait_for(self, kind: str, timeout_s: float) -> bool:
        """Return when the moment is there; False if the run ended before."""
        reached = {
            "start-up": lambda: self._events.counts()["run_started"] > 0,
            "training": self._after_saves(self._rng.randint(1, 2), lambda: True),
            "writing": self._after_saves(self._rng.randint(0, 1), self.is_writing),
            "validation": self.is_validating,
        }[kind]
        most_s = {"start-up": 3.0, "training": 0.6, "writing": 0.03, "validation": 0.3}[kind]
        return self._until(reached, timeout_s) and self._pause(self._rng.uniform(0, most_s))

    def is_writing(self) -> bool:
        """A checkpoint is being written now; not one that an earlier kill left half-written."""
        for folder in self._checkpoints.glob(".writing-step_*"):
            with contextlib.suppress(FileNotFoundError):
                if folder.stat().st_ctime_ns > self._began_ns:
                    return True
        return False

    def is_validating(self) -> bool:
        """A validation holds a replica."""
        counts = self._events.counts()
        return counts["pinned"] > counts["unpinned"]

    def _after_saves(self, number: int, reached):
        """After so many checkpoints of this life: a run that is killed must get on, too."""
        return lambda: self._events.counts()["checkpoint_saved"] >= number and reached()

    def _until(self, reached, timeout_s: float) -> bool:
        deadline, polls = time.monotonic() + timeout_s, 0
        while time.monotonic() < deadline:
            if polls % 50 == 0:
                self._live.look()
            if self._live.process.poll() is not None:
                return False
            if reached():
                return True
            polls += 1
            time.sleep(POLL_S)  # noqa: TID251 - a test process without a loop
        raise AssertionError(f"not within {timeout_s} s; events: {self._events.counts()}")

    def _pause(self, seconds: float) -> bool:
        time.sleep(seconds)  # noqa: TID251 - a test process without a loop
        return self._live.process.poll() is None
