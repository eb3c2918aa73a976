"""Tools of environments: off the environment's loop, in time, and never silent."""

import asyncio
import time
from pathlib import Path

import pytest

from freewheel.errors import FailureClass
from tests.unit import rollout_usercode as user
from tests.unit.rollout_fakes import failures, group_request, open_bench, until

LIMIT_S = 0.4

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), pytest.mark.usefixtures("user_code")]


@pytest.fixture
def bench(tmp_path, tokenizer):
    def make(tool="none", *, catches=False, **settings):
        return open_bench(
            tmp_path,
            tokenizer,
            [{"prompt": "?", "ground_truth": tool, "n": int(catches)}],
            tool_timeout_s=LIMIT_S,
            **settings,
        )

    return make


async def run_one(at, **fields):
    (outcome,), _ = await at.worker.run_group(
        group_request(1, **fields), at.engine(lambda request: "ok")
    )
    return outcome


async def test_sync_and_async_tools_return_their_results(bench):
    async with bench(environment="UsesTools") as at:
        assert (await run_one(at)).reward == 20.0
        assert user.SEEN == ["tool-0", "tool-loop-0", "tool-loop-0", "tool-0"]
    user.SEEN.clear()
    async with bench(environment="SyncUsesTools") as at:
        assert (await run_one(at)).reward == 15.0
        assert user.SEEN == ["tool-0", "tool-loop-0", "tool-loop-0"]


@pytest.mark.parametrize("tool", ["blocking_tool", "tool_that_waits", "tool_that_blocks_its_loop"])
async def test_an_environment_may_go_on_without_its_tool(bench, tool):
    async with bench(tool, catches=True, environment="CallsTool") as at:
        began_s = time.monotonic()
        outcome = await run_one(at)
        assert time.monotonic() - began_s < LIMIT_S + 2
        assert (outcome.failure, outcome.reward) == (None, 0.5)
        if tool != "tool_that_waits":  # which ends when it is asked to, though not at once
            assert at.worker.num_leaked == 1
            user.RELEASE.set()
        await until(lambda: at.worker.num_leaked == 0)


@pytest.mark.parametrize("tool", ["blocking_tool", "tool_that_waits", "tool_that_blocks_its_loop"])
async def test_an_uncaught_time_out_of_a_tool_names_it(bench, tool):
    async with bench(tool, environment="CallsTool") as at:
        outcome = await run_one(at)
        assert outcome.failure is FailureClass.TIMEOUT
        assert f"tool {tool} did not return within rollout.tool_timeout_s=0.4 s" in outcome.message
        if tool != "tool_that_waits":
            assert "threading.py" in outcome.message  # the frame that blocks


async def test_a_tool_has_the_name_and_the_limit_of_its_call(bench):
    async with bench(environment="CallsToolOfItsOwnLimit") as at:
        outcome = await run_one(at)
        assert outcome.failure is FailureClass.TIMEOUT
        assert outcome.message.startswith("tool search did not return within 0.2 s")


async def test_an_error_of_a_tool_reaches_the_environment_as_it_is(bench):
    async with bench(environment="CatchesWhatAToolRaises") as at:
        assert (await run_one(at)).reward == 0.25
        assert user.SEEN == ["no such page"]


async def test_an_uncaught_error_of_a_tool_names_it(bench):
    async with bench("raising_tool", environment="CallsTool") as at:
        outcome = await run_one(at)
        assert outcome.failure is FailureClass.ENVIRONMENT
        assert "raised LookupError: no such page" in outcome.message
        assert "rollout_usercode.py" in outcome.message
        assert outcome.message.endswith(", in tool raising_tool")


async def test_a_tool_cannot_end_the_process(bench):
    async with bench("exiting_tool", environment="CallsTool") as at:
        for _ in range(2):
            outcome = await run_one(at)
            assert outcome.failure is FailureClass.ENVIRONMENT
            assert "tool exiting_tool raised SystemExit: 3" in outcome.message


async def test_the_rollout_s_deadline_holds_in_a_tool(bench):
    async with bench("tool_that_waits", catches=True, environment="CallsTool") as at:
        outcome = await run_one(at, timeout_s=0.2)
        assert outcome.failure is FailureClass.TIMEOUT
        assert "in tool tool_that_waits for " in outcome.message
        await until(lambda: user.SEEN == ["tool cancelled"])


async def test_the_end_of_an_episode_cancels_a_tool_left_behind(bench):
    async with bench(environment="LeavesAToolBehind") as at:
        outcomes, _ = await at.worker.run_group(group_request(1), at.engine(lambda r: "ok"))
        assert failures(outcomes) == [None]
        await until(lambda: "tool cancelled" in user.SEEN)
        await until(lambda: at.worker.num_leaked == 0)
        assert len(asyncio.all_tasks()) == 1


async def test_the_environment_of_the_documentation(bench, tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "documented_environment.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    async with bench("done", environment="documented_environment:Search") as at:
        engine = at.engine(
            lambda request: "done" if request.request_id.endswith("/1") else '{"query": "x"}'
        )
        (outcome,), _ = await at.worker.run_group(group_request(1), engine)
        assert (outcome.failure, outcome.reward) == (None, 1.0)
        prompt = at.decode(engine.calls[1][0].prompt_token_ids)
        assert "no page about x" in prompt
