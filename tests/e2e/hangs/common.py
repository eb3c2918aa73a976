"""What the hang injections share: short limits, and how to reach what is to fail."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.runs import ROOT, Finished, LiveRun, start

USER_CODE = ROOT / "tests/e2e/user_code"
LATE_S = 5
"""What a run may be past the limit that finds a hang; for the machine, not for the run."""

QUICK: dict[str, dict[str, Any]] = {
    "rollout": {"timeout_s": 6, "reward_timeout_s": 2},
    "async_training": {"concurrent_samples_per_replica": 12},
    "health": {"replica_stall_s": 4, "grace_s": 2, "loop_blocked_s": 1, "loop_blocked_end_s": 4},
    "trainer": {"total_training_steps": 12, "test_freq": 0, "val_before_train": False},
}


def quick(**changes: dict[str, Any]) -> dict[str, Any]:
    """Changes to the base configuration: limits of seconds, and these."""
    return {name: {**section, **changes.get(name, {})} for name, section in QUICK.items()} | {
        name: section for name, section in changes.items() if name not in QUICK
    }


def workers(live: LiveRun, *names: str) -> list[psutil.Process]:
    """The processes of a run's workers, by Ray's title of them."""
    found = [
        process
        for process in psutil.Process(live.process.pid).children(recursive=True)
        if process.name().startswith("ray::") and any(name in process.name() for name in names)
    ]
    assert found, f"no process of {names}: {live.started}"
    return found


class Faults:
    """Runs whose workers hold faulty cores (`user_code/faulty_*.py`), each fault once."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = tmp_path / "faults"
        self._folder.mkdir()
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("FAULTS", str(self._folder))

    def start(self, tmp_path: Path, changes: dict[str, Any], **cores: str) -> LiveRun:
        """Start a run with these `Cores`."""
        self._monkeypatch.setenv("FAULTY_CORES", json.dumps(cores))
        return start(tmp_path, changes, python_path=USER_CODE, module="with_faulty_cores")


def happened_s(run: Finished, fault: str) -> float:
    """When a fault of a run happened: seconds on the machine's monotonic clock, as events have."""
    return float((run.folder.parent / "faults" / fault).read_text())
