"""A long run of the real control plane over fakes, in a process of its own; says how it grew.

    python -m tests.simulation.soak [STEPS]

Everything is on: faults of all kinds, lost trainers and trajectories, validations, checkpoints, the
watchdog, replicas' health, status reports. Nothing that the run does not hold itself is kept, so
that what grows is the control plane. The last line of the output is the result, as JSON.
"""

import asyncio
import gc
import json
import os
import random
import re
import statistics
import sys
import threading
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from pathlib import Path

from freewheel.control.controller import Controller
from freewheel.errors import TrainerLostError, TrajectoriesLostError
from freewheel.simulation.fakes import FakeBackend, FakeDisk
from freewheel.simulation.records import FILES, MemoryCheckpoints
from freewheel.simulation.settings import Faults, SimSettings
from freewheel.simulation.virtual_time import run_virtual
from freewheel.types import Purpose
from tests.simulation.scenarios import small_config

WARM_UP_STEPS = 500
TRIALS = 4
"""Validation groups."""
STATUS_S = 5.0
MAX_RESTARTS = 100

SETTINGS = SimSettings(
    seed=1,
    num_prompts=64,
    num_val_prompts=TRIALS,
    train_step_s=1.0,
    write_s=5.0,
    faults=Faults(
        environment=0.03,
        hang=0.003,
        over_long_prompt=0.05,
        replica_deaths_per_s=0.002,
        worker_deaths_per_s=0.002,
        update_death=0.002,
    ),
)


def make_config(steps):
    config = small_config(total_training_steps=steps, test_freq=25, save_freq=9)
    return replace(
        config,
        rollout=replace(config.rollout, n=2),
        actor=replace(config.actor, ppo_mini_batch_size=2),
        health=replace(config.health, max_restarts=MAX_RESTARTS),
        logging=replace(config.logging, interval_s=STATUS_S),
    )


class CountingRecorder:
    """Counts rows and keeps none; the soak looks at each event and each trainer step."""

    def __init__(self, soak):
        self.num = dict.fromkeys(FILES, 0)
        self.events = Counter()
        self._soak = soak

    def event(self, name, **_fields):
        self.num["events"] += 1
        self.events[name] += 1
        self._soak.see_sizes()

    def metrics(self, row):
        self.num["metrics"] += 1
        self._soak.see_step(row["step"])

    def validation(self, _row):
        self.num["validations"] += 1

    def sample(self, _row):
        self.num["samples"] += 1

    def num_rows(self):
        return dict(self.num)

    async def flush(self):
        await asyncio.sleep(0)


class NewestStates(dict):
    """The disk of the fakes, which forgets old checkpoints as the real store does."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        while len(self) > 4:
            del self[next(iter(self))]


class Reporter:
    """Counts the watchdog's reports."""

    num = 0

    async def report(self, _stall):
        self.num += 1


class MortalBackend(FakeBackend):
    """Fakes whose trainers are lost now and then, and lose trajectories."""

    def trainer(self):
        fake = super().trainer()
        fake.trained = deque(maxlen=0)  # its memory of all it was trained on is a test's own
        self.rng_of_losses = getattr(self, "rng_of_losses", random.Random(7))
        for name in ("train_step", "publish", "copy_state", "write_state"):
            setattr(fake, name, partial(self._call, fake, getattr(fake, name)))
        return fake

    async def _call(self, fake, method, *args):
        if fake.is_dead:
            raise TrainerLostError("the trainer was dead before the call")
        luck = self.rng_of_losses.random()
        if luck < 0.001:
            fake.kill()
            raise TrainerLostError("the trainer died")
        if luck < 0.002 and method.__name__ == "train_step":
            raise TrajectoriesLostError((0,), "the object store was full")
        return await method(*args)


def sizes(controller):
    """The control plane's own structures: (entries, most that there may be)."""
    config, ledger, keeper = controller.config, controller.roles.ledger, controller.roles.trainer
    capacity = config.async_training.concurrent_samples_per_replica * len(
        controller.roles.pool.slots
    )
    queued, replicas = config.validation.max_queued, len(controller.roles.pool.slots)
    # A cut waits while another is written, and both are behind the step that is trained.
    steps_since_saved = 4 * config.trainer.save_freq
    return {
        "ledger.open": (len(ledger.open), config.max_slots),
        "ledger: failures of prompts": (len(ledger._prompt_failures), SETTINGS.num_prompts),
        "staleness history": (
            len(controller.roles.staleness._published),
            config.async_training.staleness_bound + 2,
        ),
        "weights": (len(controller.roles.store._weights), 2 + queued),
        "holds on weights": (len(controller.roles.store._holds), 3 + queued),
        **{f"leases: {p}": (controller.roles.pool.num_leases(p), capacity) for p in Purpose},
        "journal": (len(keeper._journal), steps_since_saved),
        "copies": (len(keeper._copies), 2),
        "restored versions": (len(keeper._carried), 3),
        "losses of the trainer": (len(keeper._num_lost), 2),
        "validations due": (len(controller.roles.validator._queue), queued + 1),
        "jobs of checkpoints": (len(controller.roles.checkpointer._jobs), 2),
        "prompts fed": (len(controller.roles.feed.prompts), 64),
        "groups running": (len(controller.roles.rollouter._running), config.max_slots),
        "groups to run again": (len(controller.roles.rollouter._again), config.max_slots),
        "restarts in the window": (len(controller.roles.restarts._spent_s), MAX_RESTARTS + 1),
        "prompts named as dropped": (len(ledger._named), SETTINGS.num_prompts),
        "status history": (len(controller._status_report._history), 30 / STATUS_S + 2),
        "waits": (
            len(controller.roles.waits._entries),
            # Of the loops, of each group and trial, of each replica's loop and health check.
            10 + config.max_slots + TRIALS + 2 * replicas + config.rollout.num_workers,
        ),
    }


def tasks_by_name():
    return Counter(re.sub(r"\d+", "N", task.get_name()) for task in asyncio.all_tasks())


PASSING = (
    *("group-N", "validation-N-prompt-N", "check-replica-N"),
    *("watch-replica-N", "watch-rollout-worker-N", "watch-trainer-N", "checkpoint-N"),
    *("Task-N", "rollout N-N", "rollout valN-N-N"),
)
"""Tasks that come and go: of groups, of trials, of checks, of each process; the fakes' own."""


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """Looks at the run at each event and step."""

    def __init__(self):
        self.controller = None
        self.rss = []
        self.blocks = []
        self.sizes = {}
        self.passing = Counter()
        self.tasks = {}
        self.threads = {}

    def see_sizes(self):
        if self.controller is None:
            return
        for name, (size, most) in sizes(self.controller).items():
            before = self.sizes.get(name, (0, most))[0]
            self.sizes[name] = (max(before, size), most)

    def see_step(self, step):
        self.see_sizes()
        if step % 7 == 0:
            self._see_tasks(step)
        if step % 50 == 0:
            self.rss.append((step, rss_bytes()))
        if step % 250 == 0:
            gc.collect()
            self.blocks.append((step, sys.getallocatedblocks()))

    def _see_tasks(self, step):
        tasks = tasks_by_name()
        for name in PASSING:
            self.passing[name] = max(self.passing[name], tasks.pop(name, 0))
        if step >= WARM_UP_STEPS:
            self.tasks.setdefault(json.dumps(tasks, sort_keys=True), step)
            self.threads.setdefault(threading.active_count(), step)


def slope(points):
    """Change a step, by a linear fit after the warm-up."""
    late = [point for point in points if point[0] >= WARM_UP_STEPS]
    return statistics.linear_regression(*zip(*late, strict=True)).slope


def run(steps):
    config, soak, reporter = make_config(steps), Soak(), Reporter()
    statuses = deque(maxlen=1)
    recorder = CountingRecorder(soak)

    async def main():
        soak.controller = Controller(
            config,
            backend=MortalBackend(config, SETTINGS, FakeDisk(states=NewestStates())),
            recorder=recorder,
            checkpoints=MemoryCheckpoints(2),
            reporter=reporter,
            on_status=statuses.append,
        )
        return await soak.controller.run(), tasks_by_name()

    end, tasks_left = run_virtual(main)
    return {
        "cause": end.cause,
        "summary": end.summary,
        "events": recorder.events,
        "hang_reports": reporter.num,
        "last_status_step": statuses[0].step,
        "rss_bytes_a_step": slope(soak.rss),
        "blocks_a_step": slope(soak.blocks),
        "sizes": soak.sizes,
        "passing_tasks": soak.passing,
        "tasks": {step: json.loads(names) for names, step in soak.tasks.items()},
        "threads": {step: num for num, step in soak.threads.items()},
        "tasks_left": tasks_left,
    }


if __name__ == "__main__":
    result = run(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    sys.stdout.write(json.dumps(result) + "\n")
