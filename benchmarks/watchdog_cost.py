"""What the watchers cost: their share of the control plane's CPU time in the quickstart.

    python benchmarks/watchdog_cost.py [--steps 60]

Runs the quickstart in this process, through the command line's own entry, and times every step of
the watchers' coroutines (`watch`, `replica-health`, `process-watch` and the tasks that these start)
on the clock of the event loop's thread, and the thread of the loop watch on its own. What they
cost in Ray's threads cannot be told apart there: it is taken as the share of the calls that are
theirs, which is too much, as theirs carry next to nothing. Counted is from the first training step
to the last, so that start-up does not make the share look small.
"""

import argparse
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
from freewheel.control.watchdog import Watchdog

WATCHED = [
    (Watchdog, "run", "watchdog"),
    (ReplicaHealth, "run", "replica health"),
    (ReplicaHealth, "_check", "replica health"),
    (ProcessWatch, "run", "process watch"),
    (ProcessWatch, "_watch", "process watch"),
]
CALLS = {"watch", "stats"}
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


def measure_training() -> list[tuple[Counter[str], Counter[str], Counter[str]]]:
    """Take all counters when training begins and when it has ended."""
    taken: list[tuple[Counter[str], Counter[str], Counter[str]]] = []
    original = TrainLoop.run

    def take() -> None:
        (watch,) = [t for t in threading.enumerate() if t.name == "loop-watch"]
        clock = time.pthread_getcpuclockid(watch.ident or 0)
        now = {
            **spent_s,
            LOOP_WATCH: time.clock_gettime(clock),
            WHOLE: time.process_time(),
            LOOP: time.thread_time(),
            REAL: time.monotonic(),
        }
        taken.append((Counter(now), Counter(num_steps), Counter(num_calls)))

    async def measured(self: TrainLoop) -> None:
        take()
        await original(self)
        take()

    TrainLoop.run = measured
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    for owner, name, role in WATCHED:
        time_method(owner, name, role)
    count_calls()
    taken = measure_training()
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
    (before, steps_before, calls_before), (after, steps_after, calls_after) = taken
    spent = Counter({key: after[key] - before[key] for key in after})
    calls = {method: calls_after[method] - calls_before[method] for method in calls_after}
    share = sum(calls.get(method, 0) for method in CALLS) / sum(calls.values())
    elsewhere_s = spent[WHOLE] - spent[LOOP] - spent[LOOP_WATCH]
    costs_s = {role: spent[role] for _, _, role in WATCHED} | {
        LOOP_WATCH: spent[LOOP_WATCH],
        "their calls, in Ray's threads": elsewhere_s * share,
    }
    print(
        f"control plane: {spent[WHOLE]:.2f} s of CPU in {spent[REAL]:.1f} s, {options.steps} steps "
        f"(event loop {spent[LOOP]:.2f} s); {share:.1%} of {sum(calls.values())} calls to workers "
        "are the watchers'"
    )
    for role, cost_s in costs_s.items():
        num = steps_after[role] - steps_before[role]
        turns = f"{num} turns" if num else ""
        print(f"{role:32} {cost_s * 1e3:9.2f} ms {cost_s / spent[WHOLE]:8.3%}  {turns}")
    total_s = sum(costs_s.values())
    print(f"{'together':32} {total_s * 1e3:9.2f} ms {total_s / spent[WHOLE]:8.3%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
