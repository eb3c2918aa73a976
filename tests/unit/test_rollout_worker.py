import asyncio
import dataclasses
import re
import time

import numpy as np
import pytest

from freewheel.config.sections import (
    ActorConfig,
    AsyncTrainingConfig,
    Config,
    DataConfig,
    RolloutConfig,
    ValidationConfig,
)
from freewheel.errors import ConfigError, DataError, FailureClass, ReplicaLostError, RolloutError
from freewheel.rollout.worker import RolloutWorkerCore, max_environment_threads
from freewheel.types import DatasetInfo, Purpose, Split
from tests.unit import rollout_usercode as user
from tests.unit.rollout_fakes import (
    END,
    config_for,
    failures,
    generation,
    group_request,
    open_bench,
    until,
)

HERE = "tests.unit.rollout_usercode"
ROWS = [{"prompt": "2+2", "ground_truth": "4", "n": 9}]

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), pytest.mark.usefixtures("user_code")]


@pytest.fixture
def bench(tmp_path, tokenizer):
    def make(rows=ROWS, **settings):
        return open_bench(tmp_path, tokenizer, rows, **settings)

    return make


async def test_start_and_prepare(tmp_path, tokenizer):
    rows = [
        *ROWS,
        {"prompt": "y" * 300, "ground_truth": "1"},
        {"prompt": [{"role": "alien", "content": "?"}], "ground_truth": "1"},
        {"prompt": 5, "ground_truth": "1"},
    ]
    config = config_for(tmp_path, rows, data_val_files=str(tmp_path / "rows.jsonl"))
    worker = RolloutWorkerCore(config, tokenizer, 0)
    infos = await worker.start()
    assert set(infos) == {Split.TRAIN, Split.VALIDATION}
    assert infos[Split.TRAIN] == DatasetInfo(
        num_prompts=4, fingerprint=infos[Split.VALIDATION].fingerprint
    )
    good, long, alien, bad = await worker.prepare(Split.VALIDATION, [0, 1, 2, 3])
    assert good.failure is None
    assert good.num_prompt_tokens > 10
    assert long.failure is FailureClass.OVER_LONG_PROMPT
    assert long.num_prompt_tokens > 300
    assert "rows.jsonl line 2: the prompt has 3" in long.message
    assert "rollout.max_prompt_length is 200" in long.message
    assert alien.failure is bad.failure is FailureClass.BAD_PROMPT
    assert "line 3: the chat template refused" in alien.message
    assert "no role alien" in alien.message
    assert "line 4, column 'prompt'" in bad.message
    outcomes, trajectories = await worker.run_group(group_request(2, prompt_index=1), None)
    assert failures(outcomes) == [FailureClass.OVER_LONG_PROMPT] * 2
    assert trajectories == []
    await worker.close()


async def test_start_without_validation(tmp_path, tokenizer):
    worker = RolloutWorkerCore(config_for(tmp_path, ROWS), tokenizer, 0)
    assert set(await worker.start()) == {Split.TRAIN}
    await worker.close()


async def test_start_without_training_prompts(tmp_path, tokenizer):
    config = config_for(tmp_path, ROWS, data_val_files=str(tmp_path / "rows.jsonl"))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train_files=""))
    worker = RolloutWorkerCore(config, tokenizer, 0)
    assert set(await worker.start()) == {Split.VALIDATION}
    await worker.close()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"reward": "exact_mach"}, ConfigError, "nearest: 'exact_match'"),
        ({"environment": f"{HERE}:Nevr"}, ConfigError, "nearest: 'Never'"),
        ({"environment": f"{HERE}:NoRun"}, ConfigError, "'NoRun' without `run`"),
        ({"data_prompt_key": "q"}, DataError, "no column 'q'"),
    ],
)
async def test_start_refuses(tmp_path, tokenizer, fields, error, message):
    worker = RolloutWorkerCore(config_for(tmp_path, ROWS, **fields), tokenizer, 0)
    with pytest.raises(error, match=message):
        await worker.start()
    await worker.close()


async def test_single_turn_goes_out_as_one_call_and_comes_back_as_trajectories(bench):
    async with bench() as at:
        answers = {"s0": f"4{END}", "s1": f"five{END}", "s2": f" 4 {END}"}
        engine = at.engine(lambda request: answers[request.request_id.split("/")[1]])
        outcomes, trajectories = await at.worker.run_group(group_request(3), engine)
        (call,) = engine.calls
    assert [request.request_id for request in call] == ["r7/s0/0", "r7/s1/0", "r7/s2/0"]
    assert [request.sampling.seed for request in call] == [0, 100, 200]
    assert {request.sampling.temperature for request in call} == {0.7}
    assert engine.timeouts[0] == pytest.approx(20 - 2, abs=1)  # a tenth is kept for rewards
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 1.0]
    assert [outcome.answer for outcome in outcomes] == ["4", "five", "4"]
    assert all(o.wall_s >= o.gen_s + o.reward_s > 0 for o in outcomes)
    assert [outcome.num_response_tokens for outcome in outcomes] == [2, 5, 4]
    assert outcomes[1].version_spans == ((4, 5),)
    assert {outcome.finish_reason for outcome in outcomes} == {"stop"}
    assert all(outcome.gen_s > 0 and outcome.reward_s > 0 for outcome in outcomes)
    assert [trajectory.sample_id for trajectory in trajectories] == ["s0", "s1", "s2"]
    one = trajectories[1]
    prompt = call[1].prompt_token_ids
    assert one.group_id == 12
    assert at.decode(one.token_ids) == "system\nBe brief.\nuser\n2+2\nassistant\nfive"
    assert one.loss_mask.tolist() == [False] * len(prompt) + [True] * 5
    assert one.rollout_logprobs.tolist() == [0.0] * len(prompt) + [-1, -2, -3, -4, -5]
    assert one.versions.tolist() == [-1] * len(prompt) + [4] * 5
    assert (one.token_ids.dtype, one.loss_mask.dtype) == (np.int32, np.bool_)
    assert (one.rollout_logprobs.dtype, one.versions.dtype) == (np.float32, np.int32)


async def test_version_spans_and_validation(bench):
    async with bench() as at:
        versions = [3, 3, 5, 5, 5, 3]
        engine = at.engine(lambda r: generation(r, at.encode("abcdef"), versions=versions))
        request = group_request(1, purpose=Purpose.VALIDATION)
        (outcome,), trajectories = await at.worker.run_group(request, engine)
    assert outcome.version_spans == ((3, 2), (5, 3), (3, 1))
    assert (outcome.min_version, outcome.max_version) == (3, 5)
    assert trajectories == []


async def test_several_turns_make_one_trajectory(bench):
    said = ["call", "abcde", f"4{END}"]
    async with bench(environment="TwoTurns") as at:
        engine = at.engine(lambda request: said[int(request.request_id.split("/")[2])])
        outcomes, trajectories = await at.worker.run_group(group_request(1), engine)
        first, second, third = (call[0] for call in engine.calls)
    assert failures(outcomes) == [None]
    assert user.SEEN == [("call", "abc", "4", "stop")]
    assert [r.request_id for r in (first, second, third)] == ["r7/s0/0", "r7/s0/1", "r7/s0/2"]
    assert [r.sampling.seed for r in (first, second, third)] == [0, 1, 2]
    assert (second.sampling.temperature, second.sampling.stop) == (0.0, ("x",))
    assert (second.sampling.max_tokens, third.sampling.temperature) == (3, 0.7)
    # The second turn was cut by its limit, so the template's end of turn is added for it.
    added = f"{END}\n<|im_start|>user\nagain?{END}\n<|im_start|>assistant\n"
    # Nor is it trained on: it was sampled at temperature 0, and the trainer scores at 0.7.
    parts = [
        ("call", True), ("[tool]", False), ("abc", False), (added, False), (f"4{END}", True),
    ]  # fmt: skip
    token_ids, mask = list(first.prompt_token_ids), [False] * len(first.prompt_token_ids)
    for text, sampled in parts:
        token_ids += at.encode(text)
        mask += [sampled] * len(at.encode(text))
    (trajectory,) = trajectories
    assert trajectory.token_ids.tolist() == token_ids
    assert trajectory.loss_mask.tolist() == mask
    assert ((trajectory.versions == -1) == ~trajectory.loss_mask).all()
    assert (trajectory.rollout_logprobs[~trajectory.loss_mask] == 0).all()
    assert third.prompt_token_ids.tolist() == token_ids[:-2]
    assert outcomes[0].num_response_tokens == len(token_ids) - len(first.prompt_token_ids)
    assert outcomes[0].version_spans == ((4, 4 + 3 + 2),)


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_an_episode_without_a_turn_to_train_on_fails_in_training_only(bench, purpose):
    async with bench(environment="AlwaysGreedy") as at:
        request = group_request(1, purpose=purpose)
        (outcome,), _ = await at.worker.run_group(request, at.engine(lambda _: f"4{END}"))
    if purpose is Purpose.VALIDATION:
        assert outcome.reward == 1.0
    else:
        assert outcome.failure is FailureClass.ENVIRONMENT
        assert "another temperature, top_p, top_k or min_p" in outcome.message


async def test_a_sync_environment_runs_in_a_thread(bench):
    async with bench(environment="SyncTwoTurns") as at:
        both = asyncio.Barrier(2)

        async def answer(_):
            async with asyncio.timeout(20):
                await both.wait()  # each turn of one while the other one's is under way, too
            return f"4{END}"

        engine = at.engine(answer)
        outcomes, trajectories = await at.worker.run_group(group_request(2), engine)
        assert [outcome.reward for outcome in outcomes] == [1.0, 1.0]
        assert {name for name, _, _ in user.SEEN} == {"environment-0", "environment-1"}
        # The end of turn was sampled: it is in the record once.
        text = at.decode(trajectories[0].token_ids)
        assert text.endswith("assistant\n4\ntool\n4\nassistant\n4")
        ends = at.encode(END)[0]
        assert (trajectories[0].token_ids == ends).sum() == 5


async def test_an_environment_may_bring_its_own_prompt(bench):
    async with bench(environment="OwnPrompt") as at:
        engine = at.engine(lambda request: "ok")
        (outcome,), _ = await at.worker.run_group(group_request(1), engine)
        assert outcome.reward == 0.5
        assert "my own 2+2 9" in at.decode(engine.calls[0][0].prompt_token_ids)


async def test_the_response_stays_within_its_limit_over_all_turns(bench):
    async with bench(environment="Talkative") as at:
        engine = at.engine(lambda request: "y" * 50)
        request = group_request(1, max_tokens=200)
        (outcome,), (trajectory,) = await at.worker.run_group(request, engine)
        asked = [call[0] for call in engine.calls]
    (turns,) = user.SEEN
    assert turns[0] == ("y" * 50, "stop")
    assert turns[-1] == ("", "length")
    assert len(turns) == 6
    assert outcome.num_response_tokens <= 200
    assert len(trajectory.token_ids) == outcome.num_prompt_tokens + outcome.num_response_tokens
    for request in asked:
        used = len(request.prompt_token_ids) - outcome.num_prompt_tokens
        assert request.sampling.max_tokens == 200 - used
    assert outcome.finish_reason == "length"


@pytest.mark.parametrize("environment", ["Never", "Stubborn", "Blocking", "BlockingSync"])
async def test_an_environment_that_does_not_end_holds_nobody(bench, environment):
    async with bench(environment=environment) as at:
        engine = at.engine(lambda request: "ok")
        started = time.monotonic()
        outcomes, trajectories = await at.worker.run_group(group_request(3, timeout_s=1.0), engine)
        assert 0.9 < time.monotonic() - started < 2.5
        assert outcomes[0].failure is FailureClass.TIMEOUT
        assert f"in environment {HERE}:{environment} for " in outcomes[0].message
        assert outcomes[0].num_response_tokens == 2
        if environment.startswith("Blocking"):
            assert "wait" in outcomes[0].message  # the frame that blocks
        others = 3 if environment != "Blocking" else 1
        assert [o.reward for o in outcomes[1:others]] == [1.0] * (others - 1)
        assert len(trajectories) == sum(outcome.failure is None for outcome in outcomes)
        if environment == "Never":
            await until(lambda: at.worker.num_leaked == 0)
        else:
            assert at.worker.num_leaked >= 1
        user.RELEASE.set()
        await until(lambda: at.worker.num_leaked == 0)
        if environment in ("Stubborn", "BlockingSync"):
            await until(lambda: "the episode of rollout s0 is over" in user.SEEN[-1])
        assert len(engine.calls) <= 3  # what came late went nowhere


async def test_a_blocked_loop_of_user_code_is_replaced(bench):
    async with bench(environment="Blocking") as at:
        engine = at.engine(lambda request: "ok")
        outcomes, _ = await at.worker.run_group(group_request(1, timeout_s=0.5), engine)
        assert failures(outcomes) == [FailureClass.TIMEOUT]
        await asyncio.sleep(1.2)
        request = group_request(2, timeout_s=5.0)
        request = group_request(0, members=request.members[1:], timeout_s=5.0)
        outcomes, _ = await at.worker.run_group(request, engine)
        assert failures(outcomes) == [None]


async def test_the_serving_loop_turns_while_user_code_blocks(bench):
    async with bench(environment="Blocking") as at:
        ticks: list[float] = []

        async def tick():
            while True:
                await asyncio.sleep(0.01)
                ticks.append(time.monotonic())

        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(tick())
            await at.worker.run_group(group_request(2, timeout_s=1.0), at.engine(lambda r: "ok"))
            ticking.cancel()
    assert max(np.diff(ticks)) < 0.4


async def test_a_constructor_that_blocks(bench):
    async with bench(environment="BlockingConstructor") as at:
        engine = at.engine(lambda request: "ok")
        outcomes, _ = await at.worker.run_group(group_request(1, timeout_s=0.4), engine)
        assert failures(outcomes) == [FailureClass.TIMEOUT]


@pytest.mark.parametrize("reward", ["blocking_reward", "endless_reward"])
async def test_a_reward_that_does_not_end(bench, reward):
    async with bench(reward=f"{HERE}:{reward}", reward_timeout_s=0.5) as at:
        engine = at.engine(lambda r: "slow" if "/s1/" in r.request_id else "fast")
        started = time.monotonic()
        outcomes, trajectories = await at.worker.run_group(group_request(3), engine)
        assert time.monotonic() - started < 3
        assert failures(outcomes) == [None, FailureClass.TIMEOUT, None]
        assert f"reward {HERE}:{reward} did not return" in outcomes[1].message
        assert "rollout.reward_timeout_s=0.5" in outcomes[1].message
        assert [trajectory.sample_id for trajectory in trajectories] == ["s0", "s2"]
        if reward == "blocking_reward":
            assert at.worker.num_leaked == 1
            assert "wait" in outcomes[1].message
        user.RELEASE.set()
        await until(lambda: at.worker.num_leaked == 0)


async def test_the_rollout_s_deadline_holds_in_a_reward(bench):
    async with bench(reward=f"{HERE}:blocking_reward", reward_timeout_s=30) as at:
        engine = at.engine(lambda request: "slow")
        (outcome,), _ = await at.worker.run_group(group_request(1, timeout_s=0.5), engine)
        assert outcome.failure is FailureClass.TIMEOUT
        assert "rollout s0 is past its 0.5 s: in reward" in outcome.message


async def test_more_stuck_rewards_than_threads(bench):
    async with bench(reward=f"{HERE}:blocking_reward", reward_timeout_s=0.3) as at:
        engine = at.engine(lambda r: "slow")
        outcomes, _ = await at.worker.run_group(group_request(24), engine)
        assert failures(outcomes) == [FailureClass.TIMEOUT] * 24
        engine = at.engine(lambda r: "fast")
        outcomes, _ = await at.worker.run_group(group_request(4), engine)
        assert failures(outcomes) == [None] * 4
        assert at.worker.num_leaked >= 16
        user.RELEASE.set()
        await until(lambda: at.worker.num_leaked == 0)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("raising_reward", r"raised KeyError: 'no such thing' \(.*rollout_usercode.py:\d+ in rai"),
        ("exiting_reward", "raised SystemExit: 3"),
        ("nan_reward", "returned nan"),
        ("text_reward", r"returned '1.0' \(str\)"),
        ("none_reward", "returned None"),
    ],
)
async def test_a_reward_that_fails(bench, reward, message):
    async with bench(reward=f"{HERE}:{reward}") as at:
        engine = at.engine(lambda request: "ok")
        outcomes, trajectories = await at.worker.run_group(group_request(2), engine)
        assert failures(outcomes) == [FailureClass.REWARD] * 2
        with pytest.raises(AssertionError, match=f"reward {HERE}:{reward} {message}"):
            raise AssertionError(outcomes[0].message)
        assert outcomes[0].num_response_tokens == 2
        assert trajectories == []


@pytest.mark.parametrize(
    ("environment", "failure", "message"),
    [
        ("Raising", FailureClass.ENVIRONMENT, "raised ValueError: the tool broke (.*in run)"),
        ("RaisingHalfAnEmoji", FailureClass.ENVIRONMENT, "raised ValueError: unknown tool \ufffd"),
        ("Exiting", FailureClass.ENVIRONMENT, "raised SystemExit: enough"),
        ("CancelsItself", FailureClass.ENVIRONMENT, "raised CancelledError"),
        ("Silent", FailureClass.ENVIRONMENT, "returned before the policy spoke"),
        ("NotANumber", FailureClass.REWARD, "returned inf"),
        ("Misspelt", FailureClass.ENVIRONMENT, "no argument 'temprature'.*nearest: 'temperature'"),
        ("Alien", FailureClass.ENVIRONMENT, "the chat template refused"),
        ("AtOnce", FailureClass.ENVIRONMENT, "generate was called while it ran"),
    ],
)
async def test_an_environment_that_fails(bench, environment, failure, message):
    async with bench(environment=environment) as at:
        engine = at.engine(lambda request: asyncio.sleep(0.05, "ok"))
        outcomes, _ = await at.worker.run_group(group_request(2), engine)
        assert outcomes[0].failure is failure
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(outcomes[0].message)
        if environment == "Raising":
            assert outcomes[1].reward == 1.0


async def test_text_that_is_not_unicode_goes_to_the_model_with_a_replacement(bench):
    rows = [{"prompt": "half an emoji: \ud83d", "ground_truth": "1"}]
    async with bench(rows, environment="AddsHalfAnEmoji") as at:
        [info] = await at.worker.prepare(Split.TRAIN, [0])
        assert info.failure is None
        engine = at.engine(lambda request: f"ok{END}")
        outcomes, [trajectory, _] = await at.worker.run_group(group_request(2), engine)
        assert [outcome.reward for outcome in outcomes] == [1.0, 1.0]
        text = at.decode(trajectory.token_ids)
        assert "the tool says \ufffd" in text
    async with bench(rows) as at:
        engine = at.engine(lambda request: f"ok{END}")
        _, [trajectory, _] = await at.worker.run_group(group_request(2), engine)
        assert "half an emoji: \ufffd" in at.decode(trajectory.token_ids)


@pytest.mark.parametrize("environment", ["single_turn", "CatchesAll"])
@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ReplicaLostError("replica 3 is gone"), FailureClass.LOST_REPLICA),
        (RolloutError(FailureClass.ENGINE, "out of memory"), FailureClass.ENGINE),
        (ValueError("a bug"), FailureClass.ENGINE),
    ],
)
async def test_an_engine_that_fails(bench, environment, error, failure):
    async with bench(environment=environment) as at:
        engine = at.engine(lambda request: "ok")

        async def fail(requests, *, timeout_s):
            raise error

        engine.generate = fail
        outcomes, trajectories = await at.worker.run_group(group_request(2), engine)
        assert failures(outcomes) == [failure] * 2
        assert str(error) in outcomes[0].message
        assert trajectories == []


async def test_generation_cut_by_its_limit(bench):
    async with bench() as at:

        def answer(request):
            if "/s1/" in request.request_id:
                return generation(request, at.encode("abc"), finish_reason="timeout")
            return "4"

        outcomes, _ = await at.worker.run_group(group_request(2), at.engine(answer))
        assert failures(outcomes) == [None, FailureClass.TIMEOUT]
        assert "rollout s1: generating turn 0 was cut after" in outcomes[1].message
        assert "3 tokens" in outcomes[1].message


async def test_an_engine_that_does_not_answer_is_given_up_and_aborted(bench):
    async with bench() as at:
        engine = at.engine(lambda request: asyncio.Event().wait())
        started = time.monotonic()
        outcomes, _ = await at.worker.run_group(group_request(2, timeout_s=0.5), engine)
        assert time.monotonic() - started < 2
        assert failures(outcomes) == [FailureClass.TIMEOUT] * 2
        assert "is past its 0.5 s: generating turn 0 for 0." in outcomes[0].message
        assert {"r7/s0/0", "r7/s1/0"} <= set(engine.aborted)


async def test_wrong_answers_of_an_engine(bench):
    async with bench() as at:
        engine = at.engine(lambda request: "4")
        honest = engine.generate

        async def swapped(requests, *, timeout_s):
            return list(reversed(await honest(requests, timeout_s=timeout_s)))

        engine.generate = swapped
        outcomes, _ = await at.worker.run_group(group_request(2), engine)
        assert failures(outcomes) == [FailureClass.ENGINE] * 2
        assert "the engine answered requests ['r7/s1/0', 'r7/s0/0']" in outcomes[0].message


@pytest.mark.parametrize("environment", ["single_turn", "TwoTurns", "SyncTwoTurns", "Stubborn"])
async def test_cancelling_a_group_aborts_its_requests(bench, environment):
    async with bench(environment=environment) as at:
        hangs = asyncio.Event()
        engine = at.engine(lambda request: hangs.wait())
        async with asyncio.TaskGroup() as group:
            task = group.create_task(at.worker.run_group(group_request(2), engine))
            await until(lambda: sum(map(len, engine.calls)) == 2)
            started = time.monotonic()
            task.cancel()
        assert task.cancelled()
        assert time.monotonic() - started < 1
        assert set(engine.aborted) == {"r7/s0/0", "r7/s1/0"}
        user.RELEASE.set()
        await until(lambda: at.worker.num_leaked == 0)


async def test_cancelling_a_group_in_user_code(bench):
    async with bench(environment="Stubborn") as at:
        engine = at.engine(lambda request: "ok")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(at.worker.run_group(group_request(1), engine))
            await until(lambda: engine.calls)
            await asyncio.sleep(0.1)
            task.cancel()
        assert task.cancelled()
        assert at.worker.num_leaked == 1
        user.RELEASE.set()
        await until(lambda: at.worker.num_leaked == 0)


async def test_an_environment_may_cut_its_own_turn(bench):
    async with bench(environment="GivesUpATurn") as at:
        never = asyncio.Event()
        engine = at.engine(lambda r: never.wait() if r.request_id.endswith("/0") else "4")
        started = time.monotonic()
        (outcome,), (trajectory,) = await at.worker.run_group(group_request(1), engine)
        assert time.monotonic() - started < 3
        assert user.SEEN == ["own timeout"]
        assert outcome.reward == 1.0
        assert "r7/s0/0" in engine.aborted
        assert trajectory.loss_mask.sum() == 1


async def test_a_turn_left_behind_is_cancelled(bench):
    async with bench(environment="LeavesATurnBehind") as at:
        never = asyncio.Event()
        engine = at.engine(lambda r: never.wait() if r.request_id.endswith("/1") else "ok")
        started = time.monotonic()
        (outcome,), (trajectory,) = await at.worker.run_group(group_request(1), engine)
        assert time.monotonic() - started < 3
        assert outcome.reward == 1.0
        assert "r7/s0/1" in engine.aborted
        assert trajectory.loss_mask.sum() == 2
        await until(lambda: user.SEEN[0].done())


async def test_all_trials_of_a_prompt_find_a_thread(bench, tmp_path):
    settings = {"validation": {"n": 48}, "data_val_files": str(tmp_path / "rows.jsonl"), "n": 1}
    async with bench(environment="SyncTwoTurns", **settings) as at:
        together = asyncio.Barrier(48)

        async def answer(request):
            await together.wait()
            return f"4{END}"

        request = group_request(48, purpose=Purpose.VALIDATION)
        outcomes, _ = await at.worker.run_group(request, at.engine(answer))
        assert failures(outcomes) == [None] * 48


async def test_a_timeout_tells_what_went_by_until_a_thread_was_free(bench, monkeypatch):
    monkeypatch.setattr("freewheel.rollout.worker._MAX_ENVIRONMENT_THREADS", 1)
    async with bench(environment="SyncTwoTurns") as at:

        async def answer(request):
            if request.request_id == "r7/s0/0":
                await asyncio.sleep(0.5)
            if request.request_id == "r7/s1/0":
                return generation(request, at.encode("abc"), finish_reason="timeout")
            if request.request_id == "r7/s2/0":
                await asyncio.Event().wait()
            return f"4{END}"

        request = group_request(4, timeout_s=2.0)
        outcomes, _ = await at.worker.run_group(request, at.engine(answer))
    assert failures(outcomes) == [None] + [FailureClass.TIMEOUT] * 3
    waited = r"\(after (\d+\.\d) s of waiting for a thread\)"
    # It may get the thread of the one before in the moment in which both are given up.
    last = r" (\d+\.\d) s (?:waiting for one of 1 th|of waiting for a th)"
    for outcome, pattern, least_s in (
        (outcomes[1], rf"turn 0 was cut after .* for the reward {waited}$", 0.5),
        (outcomes[2], rf"generating turn 0 for .* {waited}$", 0.5),
        (outcomes[3], last, 1.9),
    ):
        found = re.search(pattern, outcome.message)
        assert found is not None, outcome.message
        assert float(found[1]) >= least_s


@pytest.mark.parametrize(
    ("fields", "num_threads"),
    [
        ({}, 3 * 2 * 4),
        ({"data": DataConfig(val_files="v")}, 3 * 2 * 4 + 5 * 2 * 4),
        (
            {
                "data": DataConfig(val_files="v"),
                "validation": ValidationConfig(mode="dedicated", dedicated_replicas=3, n=5),
            },
            3 * 2 * 4 + 5 * 3 * 4,
        ),
        # What the slots admit at once: ppo_mini_batch_size = 4, half as many again stale.
        ({"actor": ActorConfig(ppo_mini_batch_size=4)}, 3 * 6),
        ({"rollout": RolloutConfig(n=1000, replicas=2)}, 1024),
    ],
)
async def test_threads_for_all_that_may_run_at_once_in_one_worker(fields, num_threads):
    config = Config(
        **{
            "rollout": RolloutConfig(n=3, replicas=2, num_workers=4),
            "async_training": AsyncTrainingConfig(concurrent_samples_per_replica=4),
            "validation": ValidationConfig(n=5),
            **fields,
        }
    )
    assert max_environment_threads(config) == num_threads


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("environment", ["TwoTurns", "SyncTwoTurns"])
async def test_no_member_waits_for_the_turn_of_another(bench, environment, held):
    last = {"TwoTurns": 2, "SyncTwoTurns": 1}[environment]
    async with bench(environment=environment) as at:
        slow = asyncio.Event()

        async def answer(request):
            if request.request_id == f"r7/s1/{held}":
                await slow.wait()
            return request.request_id

        engine = at.engine(answer)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(at.worker.run_group(group_request(3), engine))
            # The others come to their last turns while this one is held.
            for other in ("s0", "s2"):
                wanted = f"r7/{other}/{last}"
                await until(lambda wanted=wanted: wanted in _asked(engine))
            slow.set()
        assert failures(task.result()[0]) == [None] * 3


async def test_a_slow_member_takes_no_time_from_the_others(bench):
    async with bench(environment="TwoTurns") as at:

        async def answer(request):
            if request.request_id != "r7/s1/0":
                return request.request_id
            await asyncio.sleep(2.7)  # what is kept for rewards begins then
            return generation(request, at.encode("abc"), finish_reason="timeout")

        engine = at.engine(answer)
        outcomes, _ = await at.worker.run_group(group_request(3, timeout_s=3.0), engine)
        assert failures(outcomes) == [None, FailureClass.TIMEOUT, None]
        assert min(engine.timeouts) > 1.0


def _asked(engine):
    return [request.request_id for call in engine.calls for request in call]


async def test_async_rewards_get_prompt_extra_and_kwargs(bench):
    kwargs = {"bonus": 0.5}
    async with bench(reward=f"{HERE}:async_reward", reward_kwargs=kwargs) as at:
        (outcome,), _ = await at.worker.run_group(group_request(1), at.engine(lambda r: "ok"))
        assert (outcome.reward, outcome.answer) == (1.5, "OK")
        assert user.SEEN == [("2+2", {"n": 9}, "user-code-0")]


async def test_a_reward_that_hides_that_it_is_async(bench):
    async with bench(reward=f"{HERE}:wrapped_reward") as at:
        (outcome,), _ = await at.worker.run_group(group_request(1), at.engine(lambda r: "ok"))
        assert outcome.reward == 1.0


async def test_many_groups_leave_nothing_behind(bench):
    async with bench(environment="TwoTurns") as at:
        engine = at.engine(lambda request: "4")
        for _ in range(30):
            outcomes, _ = await at.worker.run_group(group_request(4), engine)
            assert failures(outcomes) == [None] * 4
        assert at.worker.num_leaked == 0
        assert len(asyncio.all_tasks()) == 1
