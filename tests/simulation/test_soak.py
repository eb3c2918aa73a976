"""Ten thousand steps of the real control plane over fakes: memory, tasks and buffers stay flat.

It runs in a process of its own (`soak.py`), so that no memory that another test gave back hides its
growth. Memory is measured twice. RSS is what a user sees and counts what C code allocates, but it
moves by pages. The interpreter's count of allocated blocks is exact, and finds a leak of one object
in a few steps. (tracemalloc would name the line, but makes the run seven times as long.)
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 10_000
MAX_RSS_BYTES_A_STEP = 1024
MAX_BLOCKS_A_STEP = 1.0
"""The list of saved steps has one integer every nine steps; nothing else may stay."""
MUST_HAPPEN = (
    *("trainer_replayed", "trajectories_lost", "replica_lost", "rollout_worker_lost"),
    *("validation_done", "checkpoint_saved", "worker_lost"),
)


@pytest.fixture(scope="module")
def soak():
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.soak", str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# The limits below are not of speed: 10,000 steps take about 20 s on a quiet core.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(660)]


def test_it_goes_through_all_steps_and_all_faults(soak):
    assert soak["cause"] == ""
    assert (soak["summary"]["steps"], soak["summary"]["samples"]["open"]) == (STEPS, 0)
    assert soak["hang_reports"] == 0
    assert soak["last_status_step"] > STEPS - 10
    seldom = {name: soak["events"].get(name, 0) for name in MUST_HAPPEN}
    assert min(seldom.values()) >= 10, seldom
    assert soak["summary"]["restarts"] == soak["events"]["worker_lost"]


def test_memory_does_not_grow(soak):
    assert soak["rss_bytes_a_step"] < MAX_RSS_BYTES_A_STEP
    assert soak["blocks_a_step"] < MAX_BLOCKS_A_STEP


def test_every_buffer_keeps_its_bound(soak):
    assert len(soak["sizes"]) >= 15
    too_large = {name: pair for name, pair in soak["sizes"].items() if pair[0] > pair[1]}
    assert not too_large
    unused = {name for name, pair in soak["sizes"].items() if pair[0] == 0}
    # What is always empty proves nothing; these two are filled and emptied between two looks.
    assert unused <= {"groups to run again", "losses of the trainer"}


def test_no_task_and_no_thread_is_left_behind(soak):
    # The loops are the same from the warm-up to the end; the other tasks come and go.
    (tasks,) = soak["tasks"].values()
    assert {"train", "feed", "rollouter", "validate", "checkpoint", "watch"} <= set(tasks)
    assert set(tasks.values()) <= {1, 2}
    (threads,) = soak["threads"].values()
    assert threads == 1
    passing = soak["passing_tasks"]
    assert passing["group-N"] <= soak["sizes"]["ledger.open"][1]
    # One a process; the watch of one that was replaced ends a moment later.
    assert passing["watch-replica-N"] <= 2 * 2
    assert max(passing["watch-rollout-worker-N"], passing["watch-trainer-N"]) <= 2
    assert passing["checkpoint-N"] <= 1
    assert sum(soak["tasks_left"].values()) == 1
