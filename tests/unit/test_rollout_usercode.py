import asyncio
import re
import threading
import time

import pytest
import pytest_asyncio

from freewheel.rollout.calls import UserCodeError
from freewheel.rollout.usercode import UserCode

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


@pytest_asyncio.fixture
async def user_code():
    code = UserCode(max_environment_threads=2, max_reward_threads=2, max_leaked=1)
    yield code
    await code.aclose()


async def settle(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # conditions in other threads
            await asyncio.sleep(0.01)


async def test_results_and_errors_come_back(user_code):
    async def double(x):
        await asyncio.sleep(0)
        return 2 * x, threading.current_thread().name

    def fail():
        raise ValueError("bad")

    async def fail_in_groups():
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(fail))

    assert await user_code.run_async("double", lambda: double(4)) == (8, "user-code-0")
    name = await user_code.run_sync("reward", "name", lambda: threading.current_thread().name)
    assert name == "reward-0"
    with pytest.raises(UserCodeError, match=r"ValueError: bad \(.*test_rollout_usercode.py"):
        await user_code.run_sync("reward", "fail", fail)
    with pytest.raises(UserCodeError, match=r"ValueError: bad"):
        await user_code.run_async("fail", fail_in_groups)
    assert user_code.num_leaked == 0


async def test_threads_are_started_only_when_all_are_busy(user_code):
    for _ in range(5):
        await user_code.run_sync("reward", "quick", lambda: None)
    assert user_code._pools["reward"].num_threads == 1


async def test_stuck_threads_are_replaced_within_a_bound(user_code):
    release = threading.Event()

    def stuck():
        return release.wait(20)

    for leaked in (1, 2, 3):
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.1):
                await user_code.run_sync("reward", "stuck", stuck)
        assert "in wait" in caught.value.__cause__.__notes__[0]
        assert user_code.num_leaked == leaked
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.1):
            await user_code.run_sync("reward", "late", stuck)
    (note,) = caught.value.__cause__.__notes__
    assert re.fullmatch(r"\d\.[1-9] s waiting for one of 3 threads", note)
    assert user_code.num_leaked == 3  # the last one never ran
    assert await user_code.run_sync("environment", "other pool", lambda: 1) == 1
    release.set()
    await settle(lambda: user_code.num_leaked == 0)
    assert await user_code.run_sync("reward", "again", lambda: 2) == 2


async def test_a_blocked_loop_is_named_and_replaced(user_code):
    release = threading.Event()

    async def block_the_loop():
        release.wait(20)

    async def name():
        return threading.current_thread().name

    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.1):
            await user_code.run_async("block", block_the_loop)
    assert caught.value.__cause__.__notes__[0].startswith("its event loop is at ")
    assert user_code.num_leaked == 1
    await asyncio.sleep(1.2)
    async with asyncio.timeout(2):
        assert await user_code.run_async("name", name) == "user-code-1"
    release.set()
    await settle(lambda: user_code.num_leaked == 0)


async def test_a_loop_that_takes_its_cancellation_stays(user_code):
    async def name():
        return threading.current_thread().name

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await user_code.run_async("wait", asyncio.Event().wait)
    await asyncio.sleep(1.2)
    assert user_code.num_leaked == 0
    assert await user_code.run_async("name", name) == "user-code-0"


async def test_closing_ends_threads_and_loops():
    code = UserCode(max_environment_threads=2, max_reward_threads=2)
    await code.run_sync("reward", "quick", lambda: None)
    await code.run_async("quick", lambda: asyncio.sleep(0))
    before = {thread.name for thread in threading.enumerate()}
    assert {"reward-0", "user-code-0"} <= before
    started = time.monotonic()
    await code.aclose()
    assert time.monotonic() - started < 1
    await settle(lambda: not any(t.name == "user-code-0" for t in threading.enumerate()))
