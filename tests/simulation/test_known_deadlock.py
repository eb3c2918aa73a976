"""The hang that Freewheel exists to make impossible, rebuilt, found, and shown not to happen.

A fully-async run froze for ever at its first validation: a synchronous `do_validate` on the
rollouter's event loop blocked it, waiting for a worker that the loop's own frozen rollouts held.
"""

import asyncio
import concurrent.futures
import threading

import pytest

from freewheel.simulation.settings import Lengths, SimSettings
from freewheel.simulation.virtual_time import BlockedLoopError, DeadlockError, run_virtual
from tests.simulation.scenarios import FIELD_MODES, VALIDATION_MODES, run_and_check, small_config

NUM_WORKERS = 3


class NaiveRollouter:
    """Rollouts that take a worker from a shared queue and put it back when they are done."""

    def __init__(self):
        self.workers = asyncio.Queue()
        for worker in range(NUM_WORKERS):
            self.workers.put_nowait(worker)

    async def rollout(self, seconds):
        worker = await self.workers.get()
        await asyncio.sleep(seconds)
        self.workers.put_nowait(worker)

    async def validate(self):
        worker = await self.workers.get()
        await asyncio.sleep(1.0)
        self.workers.put_nowait(worker)

    def do_validate(self):
        """Synchronous, called on the loop's thread: drives the coroutine from another thread."""
        done = concurrent.futures.Future()

        def drive():
            try:
                done.set_result(asyncio.run(asyncio.wait_for(self.validate(), timeout=0.2)))
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                done.set_exception(error)

        threading.Thread(target=drive, daemon=True).start()
        return done.result()


async def train_with(validate, rollouter):
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_WORKERS):
            group.create_task(rollouter.rollout(5.0), name=f"rollout-{number}")
        await asyncio.sleep(1.0)
        await validate()


def test_a_sync_validation_on_the_loop_is_reported_with_its_frame():
    async def main():
        rollouter = NaiveRollouter()

        async def validate():
            rollouter.do_validate()

        await train_with(validate, rollouter)

    with pytest.raises(BlockedLoopError) as caught:
        run_virtual(main)
    text = str(caught.value)
    assert "do_validate" in text
    assert "rollout-2: NaiveRollouter.rollout" in text


def test_a_validation_that_waits_for_workers_held_by_frozen_rollouts_is_reported():
    async def main():
        rollouter = NaiveRollouter()
        resume = asyncio.Event()

        async def frozen_rollout():
            await rollouter.workers.get()
            await resume.wait()

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_WORKERS):
                group.create_task(frozen_rollout(), name=f"rollout-{number}")
            await asyncio.sleep(1.0)
            await rollouter.validate()
            resume.set()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    text = str(caught.value)
    assert "NaiveRollouter.validate" in text
    assert "frozen_rollout" in text


@pytest.mark.parametrize("mode", FIELD_MODES)
@pytest.mark.parametrize("validation_mode", VALIDATION_MODES)
def test_the_real_validation_passes_the_same_schedule(mode, validation_mode):
    """All slots are taken by long rollouts when the first validation is due."""
    config = small_config(mode, validation_mode, test_freq=1)
    settings = SimSettings(lengths=Lengths(kind="fixed", mean=150), num_val_prompts=7)
    run = run_and_check(config, settings)
    assert all(row["status"] != "partial" for row in run.recorder.rows("validations"))
