"""A worker that answers what an earlier attempt was asked: ignored, counted, tried again."""

from dataclasses import replace

import pytest

from freewheel.simulation.settings import Faults, SimSettings
from freewheel.types import Purpose
from tests.simulation.scenarios import VALIDATION_MODES, run_and_check, small_config


class LateAnswers:
    """Every worker gives its answer to the first attempt again, once, when asked for another."""

    def __init__(self):
        self.num_late = {Purpose.TRAINING: 0, Purpose.VALIDATION: 0}
        self.first = {}
        self.given = set()

    def __call__(self, _controller, backend):
        make = backend.rollout_worker

        def worker(worker_id):
            fake = make(worker_id)
            fake.run_group = self.late(fake.run_group)
            return fake

        backend.rollout_worker = worker

    def late(self, run_group):
        async def run(request, replica):
            result = await run_group(request, replica)
            key = (request.purpose, request.members[0].sample_id)
            if request.members[0].attempt == 1:
                self.first[key] = result
            elif key in self.first and key not in self.given:
                self.given.add(key)
                asked = {member.sample_id for member in request.members}
                late = [o for o in self.first[key].outcomes if o.sample_id in asked]
                self.num_late[request.purpose] += len(late)
                return replace(self.first[key], outcomes=tuple(late))
            return result

        return run


@pytest.mark.parametrize("validation_mode", VALIDATION_MODES)
def test_late_answers_change_nothing_and_are_counted(validation_mode):
    config = small_config("async_partial", validation_mode)
    config = replace(config, trainer=replace(config.trainer, total_training_steps=16))
    late = LateAnswers()
    settings = SimSettings(seed=3, faults=Faults(environment=0.25))
    run = run_and_check(config, settings, act=late)
    assert min(late.num_late.values()) > 0
    assert run.end.summary["late_results"] == sum(late.num_late.values())
    events = [row for row in run.recorder.rows("events") if row["event"] == "late_results"]
    assert sum(len(row["samples"]) for row in events) == sum(late.num_late.values())
    assert run.end.summary["restarts"] == 0
