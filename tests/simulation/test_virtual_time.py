"""The virtual clock: time jumps, deadlocks are raised by name, blocking calls are refused."""

import asyncio
import concurrent.futures
import queue
import threading
import time

import pytest

from freewheel.control.waits import Channel, Signal
from freewheel.simulation.virtual_time import BlockedLoopError, DeadlockError, run_virtual


def test_time_jumps_to_the_next_timer():
    order = []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        order.append((seconds, asyncio.get_running_loop().time()))

    async def main():
        async with asyncio.TaskGroup() as group:
            for seconds in (3600.0, 0.5, 86400.0 * 30):
                group.create_task(sleeper(seconds))

    began = time.monotonic()
    run_virtual(main)
    assert [seconds for seconds, _ in order] == [0.5, 3600.0, 86400.0 * 30]
    assert all(at == pytest.approx(seconds) for seconds, at in order)
    assert time.monotonic() - began < 30


def test_a_deadlock_names_the_tasks_and_where_they_wait():
    async def waits_for_ever(signal):
        await signal.wait()

    async def main():
        first, second = Signal(), Channel(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_ever(first), name="the-first")
            group.create_task(second.get(), name="the-second")

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    text = str(caught.value)
    assert "the-first" in text
    assert "waits_for_ever" in text
    assert "the-second: Channel.get" in text


@pytest.mark.parametrize(
    "block",
    [
        lambda: time.sleep(1),  # noqa: TID251 - the blocking call is what is tested
        lambda: threading.Event().wait(),
        lambda: queue.Queue().get(),
        lambda: concurrent.futures.Future().result(),
    ],
    ids=["sleep", "event", "queue", "future"],
)
def test_a_blocking_call_is_refused_with_the_frame_that_made_it(block):
    async def culprit():
        block()

    with pytest.raises(BlockedLoopError, match="culprit"):
        run_virtual(culprit)
    if block.__code__.co_names[0] != "time":
        return
    time.sleep(0)  # noqa: TID251 - outside the loop it works again


def test_an_error_in_the_main_coroutine_is_raised():
    async def main():
        await asyncio.sleep(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_virtual(main)
