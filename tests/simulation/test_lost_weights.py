"""Published weights go down with the trainer's node while a checkpoint or a replica needs them."""

import asyncio
import json
import random
from dataclasses import replace

import pytest

from freewheel.errors import StalledError
from freewheel.simulation.run import simulate
from freewheel.simulation.settings import SimSettings
from tests.simulation.nodes import Nodes
from tests.simulation.scenarios import (
    FIELD_MODES,
    VALIDATION_MODES,
    check_each_validation_has_its_row,
    check_samples,
    random_config,
    random_settings,
    run_and_check,
    small_config,
    trials_that_hang,
)
from tests.simulation.test_trainer_replacement import num_events, patient


def events(run, name):
    return [row for row in run.recorder.rows("events") if row["event"] == name]


def at_event(controller, name, act, *, after_s=0.0, **fields):
    """Act once, so long after the first event of this name with these fields."""
    seen = []

    def on_event(row):
        if not seen and row["event"] == name and fields.items() <= row.items():
            seen.append(row)
            asyncio.get_running_loop().call_later(after_s, act)

    controller._recorder._on_event = on_event


def injured(nodes, *, lose, when, after_s, besides=None, **fields):
    """For `act`: what lies on the trainer's node is lost so long after an event."""

    def act(controller, backend):
        nodes(controller, backend)
        if besides is not None:
            besides(controller, backend)
        at_event(controller, when, getattr(nodes, lose), after_s=after_s, **fields)

    return act


def check_resumes(config, settings, run, act, step):
    """Killed after the checkpoint of this step was saved, the run goes on from it."""
    saved_s = next(row["t_s"] for row in events(run, "checkpoint_saved") if row["step"] == step)
    killed = simulate(config, settings, act=act, kill_at_s=saved_s + 0.01)
    control = json.loads(killed.checkpoints.saved[killed.checkpoints.latest])
    held = killed.disk.states[str(killed.checkpoints.latest)]["held"]
    assert [weights.version for weights in held] == control["held_versions"]
    resumed = simulate(config, settings, run=killed)
    assert resumed.end.exit_code == 0, resumed.end.cause
    check_samples(config, resumed)
    return control, resumed


BETWEEN = {"test_freq": 0, "save_freq": 4, "total_training_steps": 9}
"""Publications after every third step, a cut after the fourth."""


def test_a_cut_between_two_publications_is_written_with_the_weights_of_the_next_trainer():
    nodes = Nodes()
    config = patient(small_config("stream_off_policy", **BETWEEN))
    settings = SimSettings(seed=1, write_s=10.0)
    act = injured(nodes, lose="lose_node", when="checkpoint_cut", after_s=1.0, step=4)
    run = simulate(config, settings, act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert [write for write in nodes.written if write[0] == 4] == [(4, [1]), (4, [1])]
    assert num_events(run, "weights_lost") == 0
    assert run.end.summary["checkpoints"] == [4, 8, 9]
    control, _ = check_resumes(config, settings, run, act, 4)
    assert control["held_versions"] == [1]


def test_the_version_of_a_cut_is_published_again_also_when_a_newer_one_is_out():
    """Without it no rollout of the cut could go on after a resume."""
    nodes = Nodes()
    config = patient(small_config("stream_off_policy", **BETWEEN))
    settings = SimSettings(seed=1, write_s=30.0, train_step_s=1.0)
    act = injured(nodes, lose="lose_node", when="weights_published", after_s=0.5, version=2)
    run = simulate(config, settings, act=act)
    assert run.end.exit_code == 0, run.end.cause
    published_s = next(r["t_s"] for r in events(run, "weights_published") if r["version"] == 2)
    assert published_s < events(run, "checkpoint_saved")[0]["t_s"]
    assert [write for write in nodes.written if write[0] == 4] == [(4, [1]), (4, [1])]
    assert run.end.summary["checkpoints"] == [4, 8, 9]
    control, _ = check_resumes(config, settings, run, act, 4)
    assert control["held_versions"] == [1]


@pytest.mark.parametrize("version", [1, 2])
def test_weights_of_a_cut_that_are_lost_alone_cost_one_trainer(version):
    """Whether they are still the newest, or needed by the cut's rollouts alone."""
    nodes = Nodes()
    config = patient(small_config("stream_off_policy", **BETWEEN))
    settings = SimSettings(seed=1, write_s=30.0, train_step_s=1.0)

    def begin_late(controller, _backend):
        write = controller.roles.trainer.write_state

        async def write_state(*args):
            published = controller.roles.store.latest.version
            while published < version or not nodes.lost:
                await asyncio.sleep(0.1)
                published = controller.roles.store.latest.version
            return await write(*args)

        controller.roles.trainer.write_state = write_state

    act = injured(
        nodes,
        lose="lose_weights",
        when="checkpoint_cut" if version == 1 else "weights_published",
        after_s=0.1 if version == 1 else 5.0,
        besides=begin_late,
        **({"step": 4} if version == 1 else {"version": 2}),
    )
    run = simulate(config, settings, act=act)
    assert run.end.exit_code == 0, run.end.cause
    assert [row["version"] for row in events(run, "weights_lost") if "step" in row] == [1]
    assert run.end.summary["restarts"] == 1
    assert run.end.summary["checkpoints"] == [4, 8, 9]
    assert [weights.version for weights in run.disk.states["/simulated/step_000004"]["held"]] == [1]


def test_a_validation_whose_version_is_gone_does_not_cost_the_checkpoint():
    """The node goes down while a cut is written in which a validation of an older version runs."""
    nodes = Nodes()
    config = patient(small_config(test_freq=2, save_freq=6, val_before_train=False))
    config = replace(config, validation=replace(config.validation, timeout_s=100.0))
    settings = SimSettings(seed=1, write_s=20.0, train_step_s=1.0)
    act = injured(
        nodes,
        lose="lose_node",
        when="checkpoint_cut",
        after_s=5.0,
        step=6,
        besides=trials_that_hang(0),
    )
    run = simulate(config, settings, act=act)
    assert run.end.exit_code == 0, run.end.cause
    writes = [held for step, held in nodes.written if step == 6]
    assert writes[0][0] == 1
    assert 1 not in writes[-1]
    assert run.end.summary["checkpoints"] == [6, 8]
    assert run.end.summary["restarts"] == 1
    assert {row["version"] for row in events(run, "weights_lost") if "step" in row} == {1}
    check_each_validation_has_its_row(run)
    control, resumed = check_resumes(config, settings, run, act, 6)
    assert 1 not in control["held_versions"]
    row = next(row for row in resumed.recorder.rows("validations") if row["step"] == 2)
    assert (row["status"], row["policy_version"]) == ("skipped", 1)
    assert "its policy version is gone" in row["reason"]


def slow_publication(version, seconds):
    """Publications of this version take so long, whichever trainer makes them."""

    def injure(controller, _backend):
        keeper = controller.roles.trainer
        make = keeper._make

        def slow(fake):
            publish = fake.publish

            async def call(wanted):
                if wanted == version:
                    await asyncio.sleep(seconds)
                return await publish(wanted)

            fake.publish = call
            return fake

        keeper._make = lambda: slow(make())
        slow(keeper._trainer)

    return injure


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_version_that_cannot_be_published_again_costs_one_trainer(num_replicas):
    """It is older than the newest checkpoint, and the next one is not out yet."""
    nodes = Nodes()
    config = patient(small_config(save_freq=4, test_freq=0))
    config = replace(config, rollout=replace(config.rollout, replicas=num_replicas))
    settings = SimSettings(seed=3, write_s=0.5)

    def act(controller, backend):
        nodes(controller, backend)
        slow_publication(2, 20.0)(controller, backend)

        def lose_replica(slot):
            backend.replicas[slot.replica_id].kill()
            controller.roles.pool.down(slot.replica_id, slot.incarnation)

        def lose():
            nodes.lose_node()
            for slot in controller.roles.pool.slots.values():
                # The first finds it out during the trainer's replacement, the others later.
                after_s = 6.0 * slot.replica_id
                asyncio.get_running_loop().call_later(after_s, lose_replica, slot)

        at_event(controller, "checkpoint_saved", lose, after_s=1.0, step=4)

    run = simulate(config, settings, act=act)
    assert run.end.exit_code == 0, run.end.cause
    check_samples(config, run)
    lost = events(run, "worker_lost")
    assert [row["worker"] for row in lost].count("trainer") == 1
    assert num_events(run, "weights_lost") == num_replicas
    assert {row["version"] for row in events(run, "weights_lost")} == {1}


def test_a_version_that_cannot_be_published_again_and_has_no_successor_ends_the_run():
    """The keeper's books are wrong: nobody waits for ever."""
    nodes = Nodes()
    config = patient(small_config(save_freq=0, test_freq=0))

    def act(controller, backend):
        nodes(controller, backend)

        async def renew(*_args, **_kwargs):
            return None

        def lose():
            nodes.lose_weights()
            backend.replicas[1].kill()
            controller.roles.pool.down(1, controller.roles.pool.slots[1].incarnation)
            controller.roles.ledger.num_ready = -100  # no step, so no publication

        controller.roles.trainer.renew = renew
        at_event(controller, "weights_published", lose, after_s=2.0, version=1)

    run = simulate(config, SimSettings(seed=3), act=act)
    assert type(run.end.error) is StalledError
    assert "version 1 are gone" in run.end.cause
    assert "35 s" in run.end.cause


@pytest.mark.parametrize("mode", FIELD_MODES)
@pytest.mark.parametrize("seed", range(8))
def test_nodes_that_go_down_at_random_cost_no_checkpoint(mode, seed):
    rng = random.Random(f"nodes-{mode}-{seed}")
    nodes = Nodes()
    config = patient(random_config(rng, mode, rng.choice(VALIDATION_MODES)))

    def act(controller, backend):
        nodes(controller, backend)
        record = controller._recorder.event

        def event(name, **fields):
            record(name, **fields)
            if name in ("checkpoint_cut", "weights_published") and rng.random() < 0.3:
                lose = rng.choice([nodes.lose_node, nodes.lose_node, nodes.lose_weights])
                asyncio.get_running_loop().call_later(rng.uniform(0.0, 8.0), lose)

        controller._recorder.event = event

    run = run_and_check(config, random_settings(rng, seed, faults=False), act=act)
    for folder, text in run.checkpoints.saved.items():
        control = json.loads(text)
        held = [weights.version for weights in run.disk.states[str(folder)]["held"]]
        assert held == control["held_versions"]
