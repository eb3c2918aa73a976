"""A blocked loop is noticed from outside, with the frame that blocks it."""

import asyncio
import concurrent.futures
import queue
import threading
import time

import pytest

from freewheel.loop_watch import LoopWatch


def sleep_culprit():
    time.sleep(0.8)  # noqa: TID251 - the blocking call is what is tested


def future_culprit():
    future = concurrent.futures.Future()
    threading.Timer(0.8, future.set_result, [None]).start()
    future.result()


def queue_culprit():
    items = queue.Queue()
    threading.Timer(0.8, items.put, [None]).start()
    items.get()


def busy_culprit():
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        sum(range(1000))


@pytest.mark.parametrize("culprit", [sleep_culprit, future_culprit, queue_culprit, busy_culprit])
def test_the_blocking_function_is_named_while_it_blocks(culprit):
    blocks, turns = [], []

    async def main():
        watch = LoopWatch(limit_s=0.2, on_block=blocks.append, on_turn=turns.append)
        await asyncio.sleep(0.1)
        culprit()
        await asyncio.sleep(0.3)
        watch.close()

    asyncio.run(main())
    assert blocks
    assert 0.2 <= blocks[0].blocked_s < 0.8
    assert blocks[0].frame.startswith(f"{culprit.__name__} (")
    assert "test_loop_watch.py" in blocks[0].sentence()
    assert len(turns) == 1


def test_an_idle_and_a_busy_loop_raise_no_alarm():
    blocks = []

    async def main():
        watch = LoopWatch(limit_s=0.5, on_block=blocks.append)
        await asyncio.sleep(0.8)
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            sum(range(1000))
            await asyncio.sleep(0)
        watch.close()

    asyncio.run(main())
    assert blocks == []


def test_the_thread_ends_with_the_loop():
    async def main():
        return LoopWatch(limit_s=0.2, on_block=lambda _: None)

    watch = asyncio.run(main())
    watch._thread.join(2)
    assert not watch._thread.is_alive()


def test_the_watch_outlives_errors_of_those_whom_it_tells(capsys):
    told = []

    def fail(news):
        told.append(news)
        raise OSError(28, "No space left on device")

    async def main():
        watch = LoopWatch(limit_s=0.1, on_block=fail, on_turn=fail)
        await asyncio.sleep(0.1)
        sleep_culprit()
        await asyncio.sleep(0.3)
        assert len(told) >= 3
        sleep_culprit()
        await asyncio.sleep(0.3)
        assert watch._thread.is_alive()
        watch.close()
        return sum(isinstance(news, float) for news in told)

    assert asyncio.run(main()) == 2
    assert "No space left on device" in capsys.readouterr().err
