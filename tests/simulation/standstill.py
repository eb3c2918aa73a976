"""Measures how long anything that has work stood still, without asking the watchdog.

The observer looks whenever the virtual clock is about to jump, at most once in `LOOK_S`. What it
follows are single things with a deadline of their own (a lease, a start, an update), not stages.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from freewheel.control.controller import Controller
from freewheel.simulation.fakes import FakeBackend
from freewheel.types import Purpose

LOOK_S = 0.5
"""Something may have begun, or moved, so long before the observer sees it."""


@dataclass(slots=True)
class Rule:
    """Each of `subjects`, (identity, progress), may keep its progress for `limit_s` at most."""

    name: str
    limit_s: float
    subjects: Callable[[], Iterable[tuple[object, object]]]
    since: dict[object, tuple[object, float]] = field(default_factory=dict)

    def look(self, now_s: float) -> list[str]:
        """What is past the limit now."""
        seen: dict[object, tuple[object, float]] = {}
        late: list[str] = []
        for subject, progress in self.subjects():
            before, since_s = self.since.get(subject, (None, now_s))
            since_s = since_s if before == progress else now_s
            seen[subject] = (progress, since_s)
            if now_s - since_s > self.limit_s:
                late.append(f"{self.name} {subject}: {now_s - since_s:.1f} s > {self.limit_s:g} s")
        self.since = seen
        return late


class Observer:
    """`act` and `on_jump` of a simulation; `late` lists what stood still past its limit."""

    def __init__(self) -> None:
        self.late: list[str] = []
        self._rules: list[Rule] = []
        self._looked_s = -1.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, controller: Controller, backend: FakeBackend) -> None:
        self._rules = make_rules(controller, backend)
        self._loop = asyncio.get_running_loop()
        self._loop.on_jump = self.look

    def look(self) -> None:
        """Look at everything, if it is time."""
        now_s = self._loop.time()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for rule in self._rules:
            self.late += rule.look(now_s)


def make_rules(  # noqa: C901 - one short function a rule
    controller: Controller, backend: FakeBackend
) -> list[Rule]:
    """The documented limits, each plus the grace for what is found by its absence."""
    config, health = controller.config, controller.config.health
    pool, train, workers = controller.roles.pool, controller.roles.train, controller.roles.workers

    def leases(purpose: Purpose) -> list[tuple[object, object]]:
        # While no rollout worker is up a lease waits for its start, which has a limit of its own.
        moves = sum(slot.worker is not None for slot in workers.slots), workers.num_started
        return [
            ((lease.holder, id(lease)), moves)
            for slot in pool.slots.values()
            for lease in slot.leases
            if lease.purpose is purpose
        ]

    def replicas_that_start() -> list[tuple[object, object]]:
        slots = pool.slots.values()
        return [(s.replica_id, backend.replicas.get(s.replica_id)) for s in slots if not s.replica]

    def workers_that_start() -> list[tuple[object, object]]:
        slots = workers.slots
        return [(s.worker_id, backend.workers.get(s.worker_id)) for s in slots if not s.worker]

    def engines_at_work() -> list[tuple[object, object]]:
        stats = [(r.replica_id, r) for r in backend.replicas.values() if r.is_sampling]
        return [(replica_id, (r, r.num_tokens)) for replica_id, r in stats]

    def updates() -> list[tuple[object, object]]:
        slots = [slot for slot in pool.slots.values() if slot.updating_to is not None]
        return [(slot.replica_id, (slot.updating_to, slot.incarnation)) for slot in slots]

    def validation(*, has_begun: bool) -> list[tuple[object, object]]:
        run = controller.roles.validator.current
        return [] if run is None or run.has_begun != has_begun else [(run.step, None)]

    def trainer_moves() -> tuple[int, ...]:
        """A trainer that is replaced has each limit again, and so has each step of its replay."""
        return controller.roles.restarts.count, controller.roles.trainer.num_moves

    def copies() -> list[tuple[object, object]]:
        checkpointer = controller.roles.checkpointer
        if not checkpointer.num_copies or checkpointer.overdue:
            return []  # one that is overdue is told, and ends the run when the next is due
        return [("copy", (len(checkpointer.saved_steps), *trainer_moves()))]

    def anything() -> list[tuple[object, object]]:
        rows = sum(controller._recorder.num_rows().values())
        return [("the run", (rows, controller.roles.ledger.num_moves, train.state.step))]

    rollout_s = config.rollout.timeout_s + health.grace_s
    trial_s = config.trial_timeout_s + health.grace_s
    drain_s = rollout_s if config.validation_mode == "exclusive" else 0.0
    limits: list[tuple[str, float, Callable[[], Iterable[tuple[object, object]]]]] = [
        ("start of replica", health.startup_timeout_s, replicas_that_start),
        ("start of rollout worker", health.startup_timeout_s, workers_that_start),
        (
            "start of trainer and first publication",
            health.startup_timeout_s + health.sync_timeout_s,
            lambda: [] if controller.roles.store.latest else [("trainer", trainer_moves())],
        ),
        ("rollout lease", rollout_s, lambda: leases(Purpose.TRAINING)),
        ("validation lease", trial_s, lambda: leases(Purpose.VALIDATION)),
        ("engine", health.replica_stall_s * 1.5, engines_at_work),
        (
            "training step",
            health.train_step_timeout_s,
            lambda: [("step", (train.state.step, *trainer_moves()))] if train.is_training else [],
        ),
        ("weight update", health.sync_timeout_s, updates),
        (
            "placement of a validation",
            drain_s + health.startup_timeout_s + health.sync_timeout_s,
            lambda: validation(has_begun=False),
        ),
        ("validation", config.validation.timeout_s, lambda: validation(has_begun=True)),
        # A copy, then its write; each has the limit.
        ("checkpoint", 2 * health.checkpoint_timeout_s, copies),
    ]
    longest_s = max(limit_s for _, limit_s, _ in limits)
    limits.append(("nothing moved", longest_s, anything))
    return [Rule(name, limit_s + LOOK_S, subjects) for name, limit_s, subjects in limits]
