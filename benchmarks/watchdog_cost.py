"""What the watchers cost: their share of the control plane's CPU time in the quickstart.

    python benchmarks/watchdog_cost.py [--steps 60]

Runs the quickstart in this process, through the command line's own entry, and times every step of
the watchers' coroutines (`watch`, `replica-health`, `process-watch` and the tasks that these start)
on the clock of the event loop's thread, and the thread of the loop watch on its own. What one of
their calls costs in Ray's threads is measured when the run is over: some more of them, against as
long a time without. Counted is from the first training step to the last, so that start-up does not
make the share look small.
"""

import argparse
import asyncio
import functools
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from freewheel.backends.ray.process import RemoteProcess
from freewheel.cli.main import main as freewheel
from freewheel.control.process_watch import ProcessWatch
from freewheel.control.replica_health import ReplicaHealth
from freewheel.control.train_loop import TrainLoop
from freewheel.control.validation import Validator
from freewheel.control.watchdog import Watchdog

WATCHED = [
    (Watchdog, "run", "watchdog"),
    (ReplicaHealth, "run", "replica health"),
    (ReplicaHealth, "_check", "replica health"),
    (ProcessWatch, "run", "process watch"),
    (ProcessWatch, "_watch", "process watch"),
]
CALLS = {"watch", "stats"}
NUM_PROBES, PROBE_S = 200, 0.01
LOOP_WATCH, WHOLE, LOOP, REAL = "loop watch (thread)", "whole process", "event loop", "wall"

spent_s: Counter[str] = Counter()
num_steps: Counter[str] = Counter()
num_calls: Counter[str] = Counter()


@types.coroutine
def stepped(coroutine: Coroutine[Any, Any, Any], role: str) -> Generator[Any, Any, Any]:
    """Drive a coroutine, with each of its steps under the clock of this thread."""
    step: Callable[[], Any] = functools.partial(coroutine.send, None)
    while True:
        began_s = time.thread_time()
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        finally:
            spent_s[role] += time.thread_time() - began_s
            num_steps[role] += 1
        try:
            step = functools.partial(coroutine.send, (yield awaited))
        except BaseException as error:  # noqa: BLE001 - passed on to whom it is for
            step = functools.partial(coroutine.throw, error)


def time_method(owner: type, name: str, role: str) -> None:
    """Put the coroutines of a method under the clock."""
    original = getattr(owner, name)

    @functools.wraps(original)
    async def timed(*args: Any) -> Any:
        return await stepped(original(*args), role)

    setattr(owner, name, timed)


def count_calls() -> None:
    """Count the remote calls by method."""
    original = RemoteProcess.submit

    def counted(self: RemoteProcess, method: str, *args: object, num_returns: int = 1) -> Any:
        num_calls[method] += 1
        return original(self, method, *args, num_returns=num_returns)

    RemoteProcess.submit = counted


def take() -> dict[str, Counter[str]]:
    """All counters now."""
    (watch,) = [thread for thread in threading.enumerate() if thread.name == "loop-watch"]
    clock = time.pthread_getcpuclockid(watch.ident or 0)
    cpu_s = {
        **spent_s,
        LOOP_WATCH: time.clock_gettime(clock),
        WHOLE: time.process_time(),
        LOOP: time.thread_time(),
        REAL: time.monotonic(),
    }
    return {"cpu_s": Counter(cpu_s), "steps": Counter(num_steps), "calls": Counter(num_calls)}


def measure_training() -> list[dict[str, Counter[str]]]:
    """Take all counters when training begins and when it has ended."""
    taken: list[dict[str, Counter[str]]] = []
    original = TrainLoop.run

    async def measured(self: TrainLoop) -> None:
        taken.append(take())
        await original(self)
        taken.append(take())

    TrainLoop.run = measured
    return taken


def measure_calls() -> list[float]:
    """CPU seconds that a call to a worker costs outside the loop's thread, when all is done."""
    costs_s: list[float] = []
    original, processes = Validator.drain, []
    init = ProcessWatch.__init__

    def keep(self: ProcessWatch, **options: Any) -> None:
        init(self, **options)
        processes.append(options["processes"])

    async def measured(self: Validator, *args: Any) -> None:
        await original(self, *args)
        process = next(iter(processes[0]().values()))
        elsewhere_s = []
        for is_calling in (False, True):
            began_s = time.process_time() - time.thread_time()
            for _ in range(NUM_PROBES):
                await asyncio.sleep(PROBE_S)
                if is_calling:
                    await process.watch(sys.maxsize, 0.0)
            elsewhere_s.append(time.process_time() - time.thread_time() - began_s)
        costs_s.append(max(0.0, elsewhere_s[1] - elsewhere_s[0]) / NUM_PROBES)

    ProcessWatch.__init__, Validator.drain = keep, measured
    return costs_s


def tell(
    num: int, before: dict[str, Counter[str]], after: dict[str, Counter[str]], *, call_s: float
) -> None:
    """Print each cost and the sum, as a share of the process's CPU time."""
    diff = {kind: {k: after[kind][k] - before[kind][k] for k in after[kind]} for kind in after}
    cpu_s, steps, calls = diff["cpu_s"], diff["steps"], diff["calls"]
    num_theirs = sum(calls.get(method, 0) for method in CALLS)
    print(
        f"control plane: {cpu_s[WHOLE]:.2f} s of CPU in {cpu_s[REAL]:.1f} s, {num} steps, event "
        f"loop {cpu_s[LOOP]:.2f} s; {num_theirs} of {sum(calls.values())} calls to workers are the "
        f"watchers', each {call_s * 1e3:.2f} ms in Ray's threads"
    )
    costs_s = {role: cpu_s[role] for _, _, role in WATCHED}
    costs_s |= {LOOP_WATCH: cpu_s[LOOP_WATCH], "calls, in Ray's threads": num_theirs * call_s}
    for role, cost_s in {**costs_s, "together": sum(costs_s.values())}.items():
        turns = f"{steps[role]} turns" if role in steps else ""
        print(f"{role:24} {cost_s * 1e3:9.2f} ms {cost_s / cpu_s[WHOLE]:8.3%}  {turns}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    for owner, name, role in WATCHED:
        time_method(owner, name, role)
    count_calls()
    taken, call_costs_s = measure_training(), measure_calls()
    with tempfile.TemporaryDirectory() as folder:
        code = freewheel(
            [
                *("train", "quickstart", f"trainer.run_dir={Path(folder) / 'run'}"),
                f"trainer.total_training_steps={options.steps}",
                "logging.progress=none",
            ]
        )
    if code:
        return code
    tell(options.steps, *taken, call_s=call_costs_s[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
