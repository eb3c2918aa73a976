"""A lost trainer is replaced and brought back to where it was, and nothing else changes."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from freewheel.errors import TrainerLostError, TrajectoriesLostError, WeightsLostError
from freewheel.simulation.run import simulate
from freewheel.simulation.settings import SimSettings
from tests.simulation.scenarios import (
    FIELD_MODES,
    VALIDATION_MODES,
    before_updates,
    random_config,
    random_settings,
    run_and_check,
    small_config,
)

CALLS = ("train_step", "publish", "copy_state", "write_state")


class Trainers:
    """Every trainer of a run: lost or overdue at random calls; remembers each step's digest."""

    def __init__(self, seed, *, chance, ways=("before", "during", "after")):
        self.rng = random.Random(seed)
        self.chance = chance
        self.ways = ways
        self.digests = {}
        self.num_lost = Counter()
        self.all = []

    def __call__(self, controller, backend):
        make = backend.trainer

        def trainer():
            fake = make()
            self.all.append(fake)
            for name in CALLS:
                setattr(fake, name, self._mortal(fake, name, getattr(fake, name)))
            return fake

        backend.trainer = trainer
        # The first one is made before anyone can look.
        controller.roles.trainer._make = trainer
        controller.roles.trainer._trainer = trainer()

    def _mortal(self, fake, name, method):
        async def call(*args, **kwargs):
            if fake.is_dead:
                raise TrainerLostError("the trainer was dead before the call")
            way = self.rng.choice(self.ways) if self.rng.random() < self.chance else None
            if way == "before":
                self._lose(fake, name, way)
            result = await self._run(fake, name, way, method(*args, **kwargs))
            if fake.is_dead:
                raise TrainerLostError(f"the trainer died in {name}")
            if name == "train_step":
                self._check(result.step, fake.digest)
            if name == "publish":
                self._check(("version", result.version), result.ref)
            if way == "after":
                self._lose(fake, name, way)
            return result

        return call

    async def _run(self, fake, name, way, task):
        if way != "during":
            return await task
        try:
            async with asyncio.timeout(0.05):
                return await task
        except TimeoutError:
            self._lose(fake, name, way)

    def _lose(self, fake, name, way):
        self._note(name, way)
        fake.kill()
        raise TrainerLostError(f"the trainer died {way} {name}")

    def _note(self, name, way):
        self.num_lost[name, way] += 1

    def _check(self, key, digest):
        assert self.digests.setdefault(key, digest) == digest, f"{key} was another one"


def num_events(run, name):
    return sum(row["event"] == name for row in run.recorder.rows("events"))


def patient(config, **health):
    return replace(config, health=replace(config.health, max_restarts=1000, **health))


@pytest.mark.parametrize("mode", FIELD_MODES)
@pytest.mark.parametrize("seed", range(25))
def test_random_losses_change_nothing(mode, seed):
    rng = random.Random(f"{mode}-{seed}")
    config = patient(random_config(rng, mode, rng.choice(VALIDATION_MODES)))
    trainers = Trainers(seed, chance=0.05)
    run = run_and_check(config, random_settings(rng, seed, faults=False), act=trainers)
    assert run.end.summary["restarts"] == num_events(run, "worker_lost")
    assert len(trainers.all) == 1 + run.end.summary["restarts"]
    steps = {key: digest for key, digest in trainers.digests.items() if isinstance(key, int)}
    assert set(steps) == set(range(1, run.end.summary["steps"] + 1))
    for state in run.disk.states.values():
        assert state["digest"] == steps[state["step"]]


def test_all_calls_are_lost_in_all_ways_over_the_seeds():
    lost = Counter()
    for seed in range(30):
        trainers = Trainers(seed, chance=0.06)
        run_and_check(patient(small_config()), SimSettings(seed=seed), act=trainers)
        lost += trainers.num_lost
    assert {name for name, _ in lost} == set(CALLS)
    assert {way for _, way in lost} == {"before", "during", "after"}


@pytest.mark.parametrize("name", CALLS[:3])
def test_an_overdue_trainer_is_replaced(name):
    trainers = Trainers(3, chance=0.0, ways=("hang",))
    limits = {"train_step_timeout_s": 20.0, "sync_timeout_s": 20.0, "checkpoint_timeout_s": 20.0}

    def act(controller, backend):
        trainers(controller, backend)
        first = trainers.all[0]
        method, calls = getattr(first, name), []

        async def hang_at_second(*args):
            calls.append(args)
            if len(calls) == 2:
                await asyncio.Event().wait()
            return await method(*args)

        setattr(first, name, hang_at_second)

    run = run_and_check(patient(small_config(), **limits), SimSettings(seed=3), act=act)
    assert run.end.summary["restarts"] == 1
    assert len(trainers.all) == 2


def test_a_step_that_always_loses_the_trainer_ends_the_run():
    def act(controller, backend):
        trainers = Trainers(0, chance=0.0)
        trainers(controller, backend)

        def deadly():
            fake = trainers.all[-1]
            method = fake.train_step

            async def train_step(request):
                if request.step == 4:
                    raise TrainerLostError("out of memory")
                return await method(request)

            fake.train_step = train_step
            return fake

        make = controller.roles.trainer._make
        deadly()

        def remake():
            make()
            return deadly()

        controller.roles.trainer._make = remake

    run = simulate(small_config(), SimSettings(seed=1), act=act)
    assert run.end.exit_code == 5
    assert "out of memory" in run.end.cause
    assert run.end.summary["steps"] == 3
    assert run.end.summary["restarts"] == 2


def test_a_trainer_that_cannot_be_replayed_ends_the_run_and_says_why():
    config = small_config(save_freq=0)
    config = patient(config, trainer_replay_bytes=2000)
    trainers = Trainers(0, chance=0.0)

    def act(controller, backend):
        trainers(controller, backend)
        method = trainers.all[0].train_step

        async def train_step(request):
            if request.step == 6:
                raise TrainerLostError("gone")
            return await method(request)

        trainers.all[0].train_step = train_step

    run = simulate(config, SimSettings(seed=1), act=act)
    assert run.end.exit_code == 5
    assert "health.trainer_replay_bytes=2000" in run.end.cause


@pytest.mark.parametrize("mode", FIELD_MODES)
@pytest.mark.parametrize("seed", range(10))
def test_lost_trajectories_are_generated_again(mode, seed):
    rng = random.Random(f"lost-{mode}-{seed}")
    config = random_config(rng, mode, "parallel")
    num_lost = 0

    def act(controller, backend):
        def lose(method):
            async def call(*args):
                nonlocal num_lost
                payloads = args[0].payloads if len(args) == 1 else args[2]
                if payloads and rng.random() < 0.3:
                    num_lost += 1
                    raise TrajectoriesLostError((rng.randrange(len(payloads)),), "node lost")
                return await method(*args)

            return call

        for name in ("train_step", "write_state"):
            fake = backend.fake_trainer
            setattr(fake, name, lose(getattr(fake, name)))

    run = run_and_check(config, random_settings(rng, seed, faults=False), act=act)
    assert num_lost == num_events(run, "trajectories_lost")


@pytest.mark.parametrize("mode", FIELD_MODES)
@pytest.mark.parametrize("seed", range(10))
def test_lost_weights_are_published_again_or_their_validation_ends(mode, seed):
    rng = random.Random(f"weights-{mode}-{seed}")
    config = patient(random_config(rng, mode, "parallel"))
    refused = {}

    def act(_controller, backend):
        async def refuse(_replica_id, weights):
            if id(weights) in refused or rng.random() < 0.1:
                refused[id(weights)] = weights  # kept: no other one may get its id
                raise WeightsLostError(f"version {weights.version} is gone")

        before_updates(backend, refuse)

    run = run_and_check(config, random_settings(rng, seed, faults=False), act=act)
    gone = {row["version"] for row in run.recorder.rows("events") if row["event"] == "weights_lost"}
    for row in run.recorder.rows("validations"):
        if "is gone" in row["reason"]:
            assert row["policy_version"] in gone
