"""Memory of every process of the quickstart over 500 steps: does it stay flat?

    python benchmarks/memory.py [--steps 500] [--warm-up 100] [--interval 1.0]

Samples the control plane, the workers and Ray's own processes every second. Each is judged by its
anonymous memory, which is what it allocated itself: the least of it in each of ten equal parts of
the run after the warm-up, and a line through these. What is leaked never goes away, so it lifts the
least; keys and values, which follow the requests that run, do not. A process is flat if the line
rises by less than 1 KB a step, or by less than twice its own error.

Beside it stands the shared memory that a process has touched. Ray's object store is one mapping of
a fixed size in every process that reads or writes weights; each new version may lie in another
place of it, so what a process has touched grows until it is the whole store. Those pages are there
once, whoever maps them, and `ray.object_store_bytes` bounds them.
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

FLAT_KB = 1.0
PARTS = 10


@dataclass
class Series:
    """Samples of one process: (trainer step, anonymous, shared), in KB."""

    name: str
    samples: list[tuple[float, float, float]] = field(default_factory=list)


def start(run_dir: Path, steps: int) -> psutil.Popen:
    return psutil.Popen(
        [
            *(sys.executable, "-m", "freewheel", "train", "quickstart"),
            f"trainer.run_dir={run_dir}",
            f"trainer.total_training_steps={steps}",
            "logging.progress=none",
        ],
        stdout=subprocess.DEVNULL,
    )


def name_of(process: psutil.Process) -> str:
    """A name that tells the roles apart; Ray sets the title of its workers."""
    with suppress(psutil.Error):
        words = process.cmdline()
        title = words[0] if len(words) == 1 else Path(words[0]).name
        scripts = [Path(word).name for word in words[1:] if word.endswith(".py")]
        modules = [b for a, b in itertools.pairwise(words) if a == "-m"]
        # Ray's title of a worker ends with the method that it runs at the moment.
        return (scripts or modules or [title.partition(".")[0]])[0]
    return "?"


def resident(pid: int) -> tuple[float, float]:
    """Anonymous and shared memory of a process, in KB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    sizes = dict(line.split(":") for line in lines if line.startswith("Rss"))
    if not sizes:
        raise psutil.NoSuchProcess(pid)  # it ended, and its parent has not asked how
    return tuple(float(sizes[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def sample(
    run: psutil.Process, step: float, series: dict[int, Series], since: dict[int, float]
) -> None:
    processes = [run]
    with suppress(psutil.NoSuchProcess):
        processes += run.children(recursive=True)
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            anonymous, shared = resident(process.pid)
            since.setdefault(process.pid, process.create_time())
            if since[process.pid] != process.create_time():
                continue  # another process under an old number
            one = series.setdefault(process.pid, Series(name_of(process)))
            one.name = name_of(process)
            one.samples.append((step, anonymous, shared))


def current_step(run_dir: Path) -> float:
    """The newest trainer step: the number of lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    return float(path.read_bytes().count(b"\n")) if path.exists() else 0.0


def watch(steps: int, interval_s: float) -> tuple[dict[int, Series], dict]:
    series: dict[int, Series] = {}
    since: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run = start(run_dir, steps)
        while run.poll() is None:
            # At 0 nothing is trained yet; at the end the run puts itself away.
            if 0 < (step := current_step(run_dir)) < steps:
                sample(run, step, series, since)
            time.sleep(interval_s)  # noqa: TID251 - a program without a loop
        summary = json.loads((run_dir / "summary.json").read_text())
        if run.returncode:
            sys.exit(f"the run ended with exit code {run.returncode}: {summary['cause']}")
    return series, summary


def fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope of a line and its standard error."""
    xs, ys = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(xs, ys)
    rest = sum((y - intercept - slope * x) ** 2 for x, y in points)
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    return slope, math.sqrt(rest / max(len(points) - 2, 1) / spread)


def least(samples: list[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """The sample with the least anonymous memory in each of `PARTS` equal parts: (step, KB)."""
    first, last = samples[0][0], samples[-1][0]
    parts: dict[int, list[tuple[float, float]]] = {}
    for step, anonymous, _ in samples:
        part = min(int(PARTS * (step - first) / max(last - first, 1)), PARTS - 1)
        parts.setdefault(part, []).append((step, anonymous))
    return [min(part, key=lambda row: row[1]) for part in parts.values()]


def verdict(slope: float, error: float) -> str:
    if slope < FLAT_KB:
        return "flat"
    return "flat within noise" if slope < 2 * error else "GROWS"


def report(series: dict[int, Series], warm_up: int) -> bool:
    """Print a line a process; True if all are flat."""
    print(f"{'process':34} {'pid':>8} {'samples':>8} {'anonymous MB':>13} {'KB/step':>16}", end="")
    print(f" {'shared MB':>21} {'KB/step':>8}")
    flat = True
    for pid, one in sorted(series.items(), key=lambda item: item[1].name):
        late = [row for row in one.samples if row[0] > warm_up]
        if len({row[0] for row in late}) < 2 * PARTS:
            continue  # it came up for a moment
        slope, error = fit(least(late))
        shared_slope, _ = fit([(step, shared) for step, _, shared in late])
        says = verdict(slope, error)
        flat = flat and says != "GROWS"
        _, anonymous, shared = late[-1]
        print(
            f"{one.name[:34]:34} {pid:8} {len(late):8} {anonymous / 1024:13.1f} "
            f"{slope:7.2f} ± {error:6.2f}  {says:17} {shared / 1024:9.1f} {shared_slope:8.2f}"
        )
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--interval", type=float, default=1.0)
    options = parser.parse_args()
    series, summary = watch(options.steps, options.interval)
    print(f"{summary['steps']} steps in {summary['wall_s']:.0f} s; slopes after {options.warm_up}")
    flat = report(series, options.warm_up)
    print("all processes are flat" if flat else "memory grows")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
