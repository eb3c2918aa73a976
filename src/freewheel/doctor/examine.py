"""Looks at processes several times, a short time apart, and runs every pattern on what it saw.

All processes are looked at in each round, a few at once. Nothing here waits without a deadline.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from freewheel.doctor.dump import CannotExamineError, take_sample
from freewheel.doctor.find import command_of
from freewheel.doctor.findings import Finding
from freewheel.doctor.patterns_distributed import waiting_collectives
from freewheel.doctor.patterns_loop import blocked_loops
from freewheel.doctor.patterns_process import (
    dead_loader_workers,
    gil_suspect,
    held_gil,
    lock_waits,
    stopped,
)
from freewheel.doctor.sources import annotate
from freewheel.doctor.stacks import Process, Sample

_AT_ONCE = 4
_NUM_NATIVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to look: how often, how far apart, and how long one look may take."""

    num_samples: int = 3
    interval_s: float = 0.4
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The examined processes, the findings, and why some could not be examined (by pid)."""

    processes: tuple[Process, ...]
    findings: tuple[Finding, ...]
    failures: dict[int, str]

    def of(self, pid: int) -> list[Finding]:
        """The findings of one process."""
        return [finding for finding in self.findings if finding.pid == pid]


def examine(pids: Iterable[int], sampling: Sampling) -> Examination:
    """Look at live processes and judge them.

    Takes about `num_samples * interval_s`, and at most `timeout_s` more for each look.
    """
    pids = list(dict.fromkeys(pids))
    failures: dict[int, str] = {}
    rounds: list[dict[int, Sample]] = []
    for number in range(sampling.num_samples):
        if number:
            threading.Event().wait(sampling.interval_s)
        alive = [pid for pid in pids if pid not in failures]
        rounds.append(_look(alive, failures, partial(take_sample, timeout_s=sampling.timeout_s)))
    processes = [
        Process(pid=pid, command=command_of(pid), samples=tuple(seen[pid] for seen in rounds))
        for pid in pids
        if pid not in failures
    ]
    return judge([annotate(process) for process in processes], failures, sampling)


def judge(
    processes: list[Process],
    failures: dict[int, str] | None = None,
    sampling: Sampling | None = None,
) -> Examination:
    """Run every pattern on processes that were sampled, or read from a dump (no `sampling`)."""
    findings: list[Finding] = []
    for process in processes:
        halted = stopped(process)
        findings += halted or _judge_one(process, sampling)
    running = [process for process in processes if not stopped(process)]
    findings += waiting_collectives(running)
    return Examination(
        processes=tuple(processes), findings=tuple(findings), failures=failures or {}
    )


def _judge_one(process: Process, sampling: Sampling | None) -> list[Finding]:
    starving = held_gil(process, _native_samples(process, sampling))
    # Who waits for the interpreter lock looks blocked wherever it stands: the cause is one.
    if starving:
        return starving
    return [*blocked_loops(process), *lock_waits(process), *dead_loader_workers(process)]


def _native_samples(process: Process, sampling: Sampling | None) -> tuple[Sample, ...]:
    """Two more looks, with native frames, if one thread seems to keep the interpreter lock."""
    if sampling is None or gil_suspect(process) is None:
        return ()
    take = partial(take_sample, timeout_s=sampling.timeout_s, native=True)
    found: list[Sample] = []
    for _ in range(_NUM_NATIVE):
        failures: dict[int, str] = {}
        found += _look([process.pid], failures, take).values()
        threading.Event().wait(sampling.interval_s / 2)
    return tuple(found) if len(found) == _NUM_NATIVE else ()


def _look(
    pids: list[int], failures: dict[int, str], take: Callable[[int], Sample]
) -> dict[int, Sample]:
    """One sample of each process; notes the failures."""
    seen: dict[int, Sample] = {}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="doctor") as pool:
        looks = {pid: pool.submit(take, pid) for pid in pids}
        for pid, look in looks.items():
            try:
                seen[pid] = look.result()
            except CannotExamineError as error:
                failures[pid] = str(error)
    return seen
