"""Loops of user code that are blocked: reported, avoided, and given up at their limit."""

import asyncio
import time

import pytest

from freewheel.errors import FailureClass
from tests.unit import rollout_usercode as user
from tests.unit.rollout_fakes import (
    failures,
    generation,
    group_request,
    open_bench,
    until,
)

ROWS = [{"prompt": "2+2", "ground_truth": "4"}]
BLOCKED_S, END_S = 0.3, 1.2
SLACK_S = 2.0
"""For a busy machine."""

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), pytest.mark.usefixtures("user_code")]


@pytest.fixture
def bench(tmp_path, tokenizer):
    def make(*, end_s=END_S, **settings):
        return open_bench(
            tmp_path,
            tokenizer,
            ROWS,
            health={"loop_blocked_s": BLOCKED_S, "loop_blocked_end_s": end_s},
            **settings,
        )

    return make


def states(at):
    return [report.state for report in at.reports]


async def test_who_blocks_a_loop_times_out_and_the_others_on_it_are_lost(bench):
    async with bench(environment="BlockingLater") as at:
        forever = asyncio.Event()

        async def answer(request):
            if request.request_id.endswith("/1"):
                await forever.wait()
            return generation(request, at.encode("ok"))

        engine = at.engine(answer)
        began_s = time.monotonic()
        outcomes, _ = await at.worker.run_group(group_request(3, timeout_s=30.0), engine)
        assert time.monotonic() - began_s < 0.2 + END_S + SLACK_S
        culprit, *others = outcomes
        assert culprit.failure is FailureClass.TIMEOUT
        assert failures(others) == [FailureClass.LOST_WORKER] * 2
        assert "rollout s0 in environment" in culprit.message
        assert "has blocked the event loop" in culprit.message
        assert f"{END_S:g} s (health.loop_blocked_end_s)" in culprit.message
        for outcome in outcomes:
            assert "rollout s0" in outcome.message
            assert "wait_blocking (" in outcome.message
            assert "rollout_usercode.py" in outcome.message
            assert "RELEASE.wait" in outcome.message
        await until(lambda: {"r7/s1/1", "r7/s2/1"} <= set(engine.aborted))
        assert len(asyncio.all_tasks()) == 1  # nothing is left on the serving loop
        assert states(at)[:2] == ["blocked", "blocked"]
        assert "given_up" in states(at)


async def test_the_report_comes_in_time_and_new_calls_go_elsewhere_at_once(bench):
    async with bench(environment="Blocking", end_s=20.0) as at:
        engine = at.engine(lambda request: "ok")
        async with asyncio.TaskGroup() as group:
            first = group.create_task(at.worker.run_group(group_request(1, timeout_s=30), engine))
            began_s = time.monotonic()
            await until(lambda: at.reports)
            # The limit, and the 1 s within which a watch is to notice.
            assert time.monotonic() - began_s < BLOCKED_S + 1
            (report,) = at.reports
            assert (report.loop, report.state, report.sample_id) == ("user-code-0", "blocked", "s0")
            assert "wait_blocking (" in report.cause
            assert report.call.startswith("wait (threading.py:")
            await asyncio.sleep(0)  # the serving loop hears of it by a callback
            members = group_request(3).members[1:]
            request = group_request(members=members, request_id="r8")
            outcomes, _ = await at.worker.run_group(request, engine)
            assert failures(outcomes) == [None, None]
            assert not first.done()
            user.RELEASE.set()
        assert failures(first.result()[0]) == [None]


async def test_a_loop_that_turns_again_in_time_harms_nobody(bench):
    async with bench(environment="BlocksForAMoment", end_s=20.0) as at:
        engine = at.engine(lambda request: "ok")
        for _ in range(2):
            outcomes, _ = await at.worker.run_group(group_request(2), engine)
            assert failures(outcomes) == [None, None]
            await until(lambda: states(at)[-1:] == ["turned"])
            await asyncio.sleep(0.05)
        assert set(user.SEEN) == {"user-code-0"}
        assert "given_up" not in states(at)
        assert {report.blocked_s >= BLOCKED_S for report in at.reports} == {True}


async def test_an_environment_cannot_hide_that_its_reward_blocks(bench):
    reward = f"{user.__name__}:blocking_async_reward"
    async with bench(environment="HidesARewardThatBlocks", reward=reward) as at:
        engine = at.engine(lambda request: "ok")
        (outcome,), trajectories = await at.worker.run_group(
            group_request(1, timeout_s=30.0), engine
        )
        assert outcome.failure is FailureClass.TIMEOUT
        assert f"rollout s0 in reward {reward} has blocked" in outcome.message
        assert trajectories == []


async def test_a_blocked_loop_holds_nobody_at_the_end(bench):
    began_s = time.monotonic()
    async with bench(environment="Blocking") as at:
        await at.worker.run_group(group_request(1, timeout_s=30.0), at.engine(lambda request: "ok"))
        await at.worker.close()
    assert time.monotonic() - began_s < END_S + 2 * 2 + SLACK_S
