"""Real runs of a few steps on the shipped tiny model, started as a user would."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]

BASE: dict[str, Any] = {
    "data": {
        "train_files": str(ROOT / "recipes/data/train.jsonl"),
        "val_files": str(ROOT / "recipes/data/val.jsonl"),
        "train_max_samples": 40,
        "val_max_samples": 16,
    },
    "model": {"path": str(ROOT / "recipes/tiny")},
    "rollout": {
        "replicas": 1,
        "n": 4,
        "max_prompt_length": 16,
        "max_response_length": 24,
        "reward": "numeric_match",
        "timeout_s": 20,
        "reward_timeout_s": 5,
        "kv_cache_bytes": 1 << 26,
        "device": "cpu",
    },
    "actor": {"ppo_mini_batch_size": 4, "device": "cpu", "optim": {"lr": 3e-4}},
    "async_training": {"staleness_threshold": 0.5, "concurrent_samples_per_replica": 6},
    "validation": {"n": 2, "timeout_s": 60},
    "trainer": {"total_training_steps": 8, "test_freq": 4, "save_freq": 4},
    "health": {"startup_timeout_s": 120, "grace_s": 3},
    "logging": {"interval_s": 0.2},
    "ray": {"cpus_per_replica": 0.4, "cpus_per_trainer": 0.8, "object_store_bytes": 1 << 28},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The base with nested changes."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) else value
    return result


@dataclass(slots=True)
class Finished:
    """A run that ended: its exit code, what it printed, the folder it left."""

    code: int
    out: str
    err: str
    folder: Path
    max_rss_bytes: int

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("events") if row["event"] == name]


LIVE: list["LiveRun"] = []
"""The runs of the present test."""


class LiveRun:
    """A run in a process of its own, and everything that it started."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        python_path: Path | None = None,
        module: str = "freewheel",
    ) -> None:
        paths = [str(ROOT / "src"), *([str(python_path)] if python_path else [])]
        self.folder = folder
        self.max_rss_bytes = 0
        self._out = folder.parent / f"{folder.name}.out"
        self._err = folder.parent / f"{folder.name}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = psutil.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        self.started: set[psutil.Process] = set()
        LIVE.append(self)

    def wait_for_event(self, name: str, *, count: int = 1, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.look()
            if self.count(name) >= count:
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)  # noqa: TID251 - a test process without a loop
        raise AssertionError(f"no {count} x {name}: {self._err.read_text()}")

    def count(self, name: str) -> int:
        """How many events of a name there are so far."""
        path = self.folder / "events.jsonl"
        return path.read_text().count(f'"event": "{name}"') if path.exists() else 0

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 180) -> Finished:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.look()
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(
                    f"still running after {timeout_s} s:\n{self._out.read_text()[-3000:]}\n"
                    f"{self._err.read_text()[-3000:]}"
                )
            time.sleep(0.05)  # noqa: TID251 - a test process without a loop
        return Finished(
            code=self.process.returncode,
            out=self._out.read_text(),
            err=self._err.read_text(),
            folder=self.folder,
            max_rss_bytes=self.max_rss_bytes,
        )

    def left_over(self, timeout_s: float = 10) -> list[str]:
        """Processes that the run started and that still live after so long."""
        _, alive = psutil.wait_procs(self.started, timeout=timeout_s)
        return [f"{process.pid} {process.name()}" for process in alive]

    def kill(self) -> None:
        """End what still lives of it, so that a test that failed disturbs no other."""
        self.look()
        for process in (self.process, *self.started):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def errors(self) -> str:
        """What it wrote to stderr so far."""
        return self._err.read_text()

    def look(self) -> None:
        """Note its memory and the processes that it started."""
        try:
            self.max_rss_bytes = max(self.max_rss_bytes, self.process.memory_info().rss)
            self.started.update(self.process.children(recursive=True))
        except psutil.NoSuchProcess:
            return


def start(tmp_path: Path, changes: dict[str, Any] | None = None, **options: Any) -> LiveRun:
    """Start a training run with changes to the base configuration."""
    recipe = tmp_path / "recipe.yaml"
    folder = tmp_path / "run"
    config = merged(BASE, changes or {})
    config["trainer"]["run_dir"] = str(folder)
    recipe.write_text(yaml.safe_dump(config))
    return LiveRun(["train", str(recipe)], folder, **options)


def resume(folder: Path, *overrides: str, **options: Any) -> LiveRun:
    """Go on with a run."""
    return LiveRun(["resume", str(folder), *overrides], folder, **options)


def freewheel(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that is over soon."""
    return subprocess.run(
        [sys.executable, "-m", "freewheel", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
