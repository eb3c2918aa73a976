"""The contract of an engine's core, which the embedded engine and vLLM pass.

A test module imports all of this and defines the fixtures `core` (one for all tests, at version 0
whenever a test begins) and `new_core` (makes a fresh one that has started, without weights).
"""

import asyncio

import numpy as np
import pytest

from freewheel.errors import (
    ConfigError,
    FailureClass,
    InvariantError,
    ReplicaLostError,
    RolloutError,
)
from freewheel.types import SamplingParams
from freewheel.weights import pack_weights
from tests.contract.subjects import (
    MAX_PROMPT,
    MAX_RESPONSE,
    bundle,
    in_flight,
    make_model,
    more_tokens,
    request,
    text,
    until,
)
from tests.unit.engine_models import model_logprobs

SAMPLINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0},
    {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.3},
    {"top_k": 5},
    {"top_k": -1},
    {"top_k": 1000},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.05},
]


async def _one(core, item, timeout_s=60):
    (result,) = await core.generate([item], timeout_s=timeout_s)
    return result


async def test_token_ids_in_and_out_in_order(core):
    items = [request(str(i), [5 + i, 6], max_tokens=1 + (7 * i) % 11) for i in range(20)]
    results = await core.generate(items, timeout_s=60)
    assert [result.request_id for result in results] == [item.request_id for item in items]
    for item, result in zip(items, results, strict=True):
        count = item.sampling.max_tokens
        assert result.finish_reason == "length"
        assert len(result.token_ids) == len(result.logprobs) == len(result.versions) == count
        assert result.token_ids.dtype == result.versions.dtype == np.int32
        assert result.logprobs.dtype == np.float32
        assert result.token_ids.min() >= 0
        assert result.versions.tolist() == [0] * count
    assert await core.generate([], timeout_s=1) == []


async def test_logprobs_are_those_of_the_distribution_sampled_from(core):
    model = make_model(0)
    prompt = [7, 30, 12, 12, 45]
    items = [request(str(i), prompt, max_tokens=40, **kind) for i, kind in enumerate(SAMPLINGS)]
    for item, result in zip(items, await core.generate(items, timeout_s=60), strict=True):
        expected = model_logprobs(model, prompt, result.token_ids, item.sampling)
        np.testing.assert_allclose(result.logprobs, expected, atol=2e-4, err_msg=str(item.sampling))


async def test_greedy_takes_the_likeliest_token(core):
    result = await _one(core, request("a", [9, 8], max_tokens=30, temperature=0))
    again = await _one(core, request("b", [9, 8], max_tokens=30, temperature=0))
    assert result.token_ids.tolist() == again.token_ids.tolist()
    model = make_model(0)
    for place in range(5):
        prefix = [9, 8, *result.token_ids[:place].tolist()]
        every = [
            model_logprobs(model, prefix, [t], SamplingParams(max_tokens=1)) for t in range(61)
        ]
        assert np.argmax(np.concatenate(every)) == result.token_ids[place]


async def test_requests_of_one_prompt_draw_on_their_own(core):
    items = [request(str(i), [5, 6, 7], max_tokens=20, seed=i) for i in range(8)]
    results = await core.generate(items, timeout_s=60)
    assert len({tuple(result.token_ids.tolist()) for result in results}) == 8


async def test_a_prompt_may_be_as_long_as_allowed(core):
    prompt = [5 + i % 40 for i in range(MAX_PROMPT)]
    result = await _one(core, request("a", prompt, max_tokens=20))
    expected = model_logprobs(make_model(0), prompt, result.token_ids, SamplingParams(max_tokens=1))
    np.testing.assert_allclose(result.logprobs, expected, atol=2e-4)


async def test_stop_tokens_end_a_response_and_stay_in_it(core):
    free = await _one(core, request("a", [9, 8], max_tokens=40, temperature=0))
    tokens = free.token_ids.tolist()
    stop = tokens[10]
    result = await _one(
        core, request("b", [9, 8], max_tokens=40, temperature=0, stop_token_ids=(stop,))
    )
    assert result.finish_reason == "stop"
    assert result.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
    assert len(result.logprobs) == len(result.versions) == len(result.token_ids)


async def test_stop_strings_end_a_response_and_stay_in_it(core):
    free = await _one(core, request("a", [9, 8], max_tokens=40, temperature=0))
    stop = text(free.token_ids)[10:12]
    result = await _one(
        core, request("b", [9, 8], max_tokens=40, temperature=0, stop=("~never~", stop))
    )
    assert result.finish_reason == "stop"
    ends = text(free.token_ids).index(stop) + 2
    assert result.token_ids.tolist() == free.token_ids.tolist()[:ends]
    assert len(result.logprobs) == len(result.versions) == ends


async def test_a_stop_with_the_last_token_counts_as_stop(core):
    free = await _one(core, request("a", [9, 8], max_tokens=40, temperature=0))
    tokens = free.token_ids.tolist()
    place = next(i for i in range(1, 40) if tokens[i] not in tokens[:i])
    result = await _one(
        core,
        request("b", [9, 8], max_tokens=place + 1, temperature=0, stop_token_ids=(tokens[place],)),
    )
    assert (result.finish_reason, len(result.token_ids)) == ("stop", place + 1)


async def test_what_cannot_run_is_refused_by_class_and_the_rest_goes_on(core):
    with pytest.raises(RolloutError) as caught:
        await core.generate(
            [request("a", [5]), request("b", [5] * (MAX_PROMPT + MAX_RESPONSE))], timeout_s=60
        )
    assert caught.value.failure is FailureClass.OVER_LONG_PROMPT
    for prompt in ([], [61], [-1]):
        with pytest.raises(RolloutError) as caught:
            await core.generate([request("a", prompt)], timeout_s=60)
        assert caught.value.failure is FailureClass.BAD_PROMPT
    with pytest.raises(ConfigError, match="sampling"):
        await core.generate([request("a", [5], top_p=0)], timeout_s=60)
    with pytest.raises(InvariantError, match="in the engine already"):
        await core.generate([request("a", [5]), request("a", [6])], timeout_s=60)
    assert core.stats().num_running + core.stats().num_waiting == 0
    assert len((await _one(core, request("a", [5]))).token_ids) == 12


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(core):
    async with in_flight(core, request("a", [5], max_tokens=100)) as call:
        with pytest.raises(InvariantError, match="in the engine already"):
            await core.generate([request("a", [6])], timeout_s=60)
    assert len(call.result()[0].token_ids) == 100


async def test_at_the_deadline_what_there_is_comes_back(core):
    items = [request("short", [5], max_tokens=2), request("long", [6], max_tokens=MAX_RESPONSE)]
    for timeout_s in (0.3, 1.0, 4.0):  # a busy machine may need longer for its first token
        short, long = await core.generate(items, timeout_s=timeout_s)
        if short.finish_reason == "length":
            break
    assert (short.finish_reason, len(short.token_ids)) == ("length", 2)
    assert long.finish_reason == "timeout"
    assert 0 < len(long.token_ids) < MAX_RESPONSE
    assert len(long.logprobs) == len(long.versions) == len(long.token_ids)
    await until(lambda: core.stats().num_running == 0)


async def test_abort_ends_a_request_with_its_tokens(core):
    keep = request("keep", [7], max_tokens=60)
    async with in_flight(core, request("a", [5], max_tokens=MAX_RESPONSE), keep) as call:
        await core.abort(["a", "unknown"])
    aborted, kept = call.result()
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < MAX_RESPONSE
    assert len(aborted.logprobs) == len(aborted.versions) == len(aborted.token_ids)
    assert (kept.finish_reason, len(kept.token_ids)) == ("length", 60)


async def test_cancelling_a_call_aborts_its_requests(core):
    items = [request(str(i), [5], max_tokens=MAX_RESPONSE) for i in range(3)]
    call = asyncio.tasks.Task(core.generate(items, timeout_s=60))
    await more_tokens(core, 4)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: core.stats().num_running + core.stats().num_waiting == 0)
    assert len((await _one(core, request("0", [5]))).token_ids) == 12


async def test_an_update_in_flight_is_right_to_the_token(core):
    items = [request(str(i), [5 + i, 6], max_tokens=MAX_RESPONSE) for i in range(3)]
    async with in_flight(core, *items) as call:
        for version in (1, 2):
            await core.update_weights(version, bundle(version))
            assert core.stats().version == version
            await more_tokens(core, 40)
        await core.abort([item.request_id for item in items])
    for item, result in zip(items, call.result(), strict=True):
        assert set(result.versions.tolist()) == {0, 1, 2}
        for version in (0, 1, 2):
            part = result.versions == version
            expected = model_logprobs(
                make_model(version), item.prompt_token_ids, result.token_ids, item.sampling
            )
            np.testing.assert_allclose(result.logprobs[part], expected[part], atol=5e-4)


async def test_each_of_several_updates_is_whole(core):
    for version in range(1, 6):
        await core.update_weights(version, bundle(version))
        result = await _one(core, request("a", [5, 6, 7], max_tokens=30))
        assert result.versions.tolist() == [version] * 30
        expected = model_logprobs(
            make_model(version), [5, 6, 7], result.token_ids, SamplingParams(max_tokens=1)
        )
        np.testing.assert_allclose(result.logprobs, expected, atol=2e-4)


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(core):
    named = list(make_model(1).named_parameters())
    with pytest.raises(InvariantError, match=r"missing model\.norm\.weight"):
        await core.update_weights(1, pack_weights(named[:-1]))
    with pytest.raises(InvariantError, match="unknown extra"):
        await core.update_weights(1, pack_weights([*named, ("extra", named[0][1].clone())]))
    result = await _one(core, request("a", [5, 6], max_tokens=30))
    assert result.versions.tolist() == [0] * 30
    expected = model_logprobs(make_model(0), [5, 6], result.token_ids, SamplingParams(max_tokens=1))
    np.testing.assert_allclose(result.logprobs, expected, atol=2e-4)


async def test_logits_that_are_not_finite_are_an_engine_failure(core):
    model = make_model(1)
    model.model.norm.weight.data[0] = float("nan")
    await core.update_weights(1, pack_weights(model.named_parameters()))
    with pytest.raises(RolloutError, match="not finite") as caught:
        await core.generate([request("a", [5])], timeout_s=60)
    assert caught.value.failure is FailureClass.ENGINE
    await core.update_weights(2, bundle(2))
    assert (await _one(core, request("a", [5]))).versions.tolist() == [2] * 12


async def test_nothing_is_sampled_before_the_first_weights(new_core):
    core = await new_core()
    early = await _one(core, request("a", [5]), timeout_s=0.3)
    assert (early.finish_reason, len(early.token_ids)) == ("timeout", 0)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(core.generate([request("b", [5])], timeout_s=60))
        await until(lambda: core.stats().num_running + core.stats().num_waiting == 1)
        assert core.stats().num_generated_tokens == 0
        await core.update_weights(3, bundle(3))
    assert waiting.result()[0].versions.tolist() == [3] * 12


async def test_the_models_own_end_token_ends_a_response(new_core):
    core = await new_core(eos=1)
    await core.update_weights(0, bundle(0))
    items = [request(str(i), [5, 6], max_tokens=400) for i in range(8)]
    results = await core.generate(items, timeout_s=60)
    assert "stop" in {result.finish_reason for result in results}
    for result in results:
        ends = np.flatnonzero(result.token_ids == 1).tolist()
        assert ends == ([len(result.token_ids) - 1] if result.finish_reason == "stop" else [])


async def test_a_graceful_stop_fails_what_is_in_flight(new_core):
    core = await new_core()
    await core.update_weights(0, bundle(0))
    call = asyncio.tasks.Task(
        core.generate([request("a", [5], max_tokens=MAX_RESPONSE)], timeout_s=60)
    )
    await more_tokens(core, 4)
    await core.aclose()
    with pytest.raises(ReplicaLostError, match="closed"):
        await call
    with pytest.raises(ReplicaLostError):
        core.stats()
    await core.aclose()
