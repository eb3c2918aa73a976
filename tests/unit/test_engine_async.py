"""The engine behind asyncio: deadlines, cancellation, a thread that dies, weights in flight."""

import asyncio
import contextlib
import threading
import weakref

import numpy as np
import pytest

from freewheel import tokenizer
from freewheel.engine import AsyncEngine
from freewheel.engine.torch_engine import TorchEngine
from freewheel.errors import (
    ConfigError,
    FailureClass,
    InvariantError,
    ReplicaLostError,
    RolloutError,
)
from freewheel.types import SamplingParams
from freewheel.weights import pack_weights
from tests.unit.engine_models import bundle, config, make_model, model_logprobs, request, save

pytestmark = pytest.mark.asyncio


def _settings(**rollout):
    return config(max_response_length=440, **rollout)


@contextlib.asynccontextmanager
async def _engine(tmp_path, *, weights=True, **rollout):
    engine = AsyncEngine(_settings(**rollout), save("llama_untied", tmp_path), stop_timeout_s=20)
    await engine.start()
    try:
        if weights:
            await engine.update_weights(0, bundle(make_model("llama_untied")))
        yield engine
    finally:
        await engine.aclose()
        engine.close()


@pytest.fixture
def slow_steps(monkeypatch):
    """Each step waits for a permit, so that tests decide how far the engine gets."""
    permits = threading.Semaphore(0)
    step = TorchEngine.step

    def limited(self):
        if not permits.acquire(timeout=0.02):
            return []
        return step(self)

    monkeypatch.setattr(TorchEngine, "step", limited)
    return permits


async def _until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # the state is the engine thread's: no event
            await asyncio.sleep(0.005)


async def test_results_come_back_in_order(tmp_path):
    async with _engine(tmp_path, max_num_seqs=3) as engine:
        requests = [request(str(i), [5 + i], max_tokens=1 + (7 * i) % 11) for i in range(10)]
        results = await engine.generate(requests, timeout_s=30)
        assert [result.request_id for result in results] == [str(i) for i in range(10)]
        assert [len(r.token_ids) for r in results] == [r.sampling.max_tokens for r in requests]
        assert engine.stats().num_generated_tokens == sum(len(r.token_ids) for r in results)
        assert await engine.generate([], timeout_s=1) == []


async def test_new_weights_are_packed_without_a_request_too(tmp_path, monkeypatch):
    monkeypatch.setattr("freewheel.engine.linear._PACK_MIN_ELEMENTS", 1)
    monkeypatch.setattr("freewheel.engine.torch_engine._SETTLED_PER_STEP", 1)
    async with _engine(tmp_path) as engine:
        await _until(lambda: engine._engine.is_settled)
        await engine.update_weights(1, bundle(make_model("llama_untied", seed=1)))
        await _until(lambda: engine._engine.is_settled)
        (result,) = await engine.generate([request("a", [5])], timeout_s=30)
        assert set(result.versions.tolist()) == {1}


async def test_an_idle_engine_holds_no_bundle(tmp_path):
    async with _engine(tmp_path) as engine:
        weights = bundle(make_model("llama_untied", seed=1))
        gone = weakref.ref(weights)
        await engine.update_weights(1, weights)
        del weights
        await _until(lambda: engine._engine.is_settled)
        await _until(lambda: gone() is None)


async def test_at_the_deadline_what_there_is_comes_back(tmp_path, slow_steps):
    async with _engine(tmp_path) as engine:
        slow_steps.release(4)
        results = await engine.generate(
            [request("short", [5], max_tokens=2), request("long", [6], max_tokens=400)],
            timeout_s=0.5,
        )
        assert [r.finish_reason for r in results] == ["length", "timeout"]
        assert [len(r.token_ids) for r in results] == [2, 4]
        assert engine.stats().num_running == 0


async def test_generate_waits_for_the_first_weights(tmp_path):
    async with _engine(tmp_path, weights=False) as engine:
        (early,) = await engine.generate([request("a", [5])], timeout_s=0.05)
        assert early.finish_reason == "timeout"
        assert len(early.token_ids) == 0
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(engine.generate([request("b", [5])], timeout_s=30))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            await engine.update_weights(3, bundle(make_model("llama_untied")))
        assert waiting.result()[0].versions.tolist() == [3] * 12


async def test_weights_change_with_requests_in_flight(tmp_path, slow_steps):
    old, new = make_model("llama_untied"), make_model("llama_untied", seed=1)
    async with _engine(tmp_path) as engine:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(
                engine.generate([request("a", [5, 6], max_tokens=20)], timeout_s=30)
            )
            slow_steps.release(8)
            await _until(lambda: engine.stats().num_generated_tokens == 8)
            await engine.update_weights(1, bundle(new))
            assert engine.stats().version == 1
            slow_steps.release(30)
        (result,) = call.result()
        assert result.versions.tolist() == [0] * 8 + [1] * 12
        for model, part in ((old, slice(8)), (new, slice(8, None))):
            expected = model_logprobs(model, [5, 6], result.token_ids, SamplingParams(max_tokens=1))
            np.testing.assert_allclose(result.logprobs[part], expected[part], atol=1e-4)


async def test_bad_weights_are_their_senders_error(tmp_path):
    async with _engine(tmp_path) as engine:
        named = list(make_model("llama_untied").named_parameters())[1:]
        with pytest.raises(InvariantError, match=r"missing model\.embed_tokens\.weight"):
            await engine.update_weights(1, pack_weights(named))
        (result,) = await engine.generate([request("a", [5])], timeout_s=30)
        assert result.versions.tolist() == [0] * 12


async def test_abort_ends_a_request_with_its_tokens(tmp_path, slow_steps):
    async with _engine(tmp_path) as engine, asyncio.TaskGroup() as group:
        call = group.create_task(engine.generate([request("a", [5], max_tokens=400)], timeout_s=30))
        slow_steps.release(3)
        await _until(lambda: engine.stats().num_generated_tokens == 3)
        await engine.abort(["a", "unknown"])
        (result,) = await call
        assert result.finish_reason == "abort"
        assert len(result.token_ids) == 3


async def test_cancelling_a_call_aborts_its_requests(tmp_path, slow_steps):
    async with _engine(tmp_path) as engine:
        call = asyncio.tasks.Task(
            engine.generate([request(str(i), [5], max_tokens=400) for i in range(3)], timeout_s=30)
        )
        slow_steps.release(3)
        await _until(lambda: engine.stats().num_running == 3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await _until(lambda: engine.stats().num_running == 0)
        slow_steps.release(100)
        (again,) = await engine.generate([request("0", [5], max_tokens=5)], timeout_s=30)
        assert again.finish_reason == "length"


async def test_requests_that_cannot_run_are_refused_and_others_go_on(tmp_path):
    async with _engine(tmp_path) as engine:
        with pytest.raises(RolloutError) as caught:
            await engine.generate([request("a", [5]), request("b", [5] * 600)], timeout_s=30)
        assert caught.value.failure is FailureClass.OVER_LONG_PROMPT
        with pytest.raises(InvariantError, match="in the engine already"):
            await engine.generate([request("a", [5]), request("a", [6])], timeout_s=30)
        assert engine.stats().num_running + engine.stats().num_waiting == 0
        assert len(await engine.generate([request("a", [5])], timeout_s=30)) == 1


async def test_logits_that_are_not_finite_are_an_engine_error(tmp_path):
    async with _engine(tmp_path) as engine:
        model = make_model("llama_untied")
        model.lm_head.weight.data[0, 0] = float("nan")
        await engine.update_weights(1, bundle(model))
        with pytest.raises(RolloutError, match="not finite") as caught:
            await engine.generate([request("a", [5])], timeout_s=30)
        assert caught.value.failure is FailureClass.ENGINE


async def test_a_thread_that_dies_fails_every_call(tmp_path, monkeypatch):
    async with _engine(tmp_path) as engine:
        entered, go = threading.Event(), threading.Event()

        def die(self):
            entered.set()
            go.wait(10)
            raise MemoryError("no more")

        monkeypatch.setattr(TorchEngine, "step", die)
        calls = [
            asyncio.tasks.Task(engine.generate([request(str(i), [5])], timeout_s=30))
            for i in range(3)
        ]
        await _until(entered.is_set)
        queued = asyncio.tasks.Task(engine.update_weights(1, bundle(make_model("llama_untied"))))
        await asyncio.sleep(0)
        go.set()
        for task in (*calls, queued):
            with pytest.raises(ReplicaLostError, match="MemoryError: no more"):
                await task
        with pytest.raises(ReplicaLostError):
            await engine.generate([request("later", [5])], timeout_s=30)
        with pytest.raises(ReplicaLostError):
            await engine.update_weights(1, bundle(make_model("llama_untied")))
        with pytest.raises(ReplicaLostError):
            await engine.abort(["0"])
        with pytest.raises(ReplicaLostError):
            engine.stats()


async def test_a_step_that_never_ends_does_not_hold_a_caller(tmp_path, monkeypatch):
    engine = AsyncEngine(_settings(), save("llama_untied", tmp_path), stop_timeout_s=0.1)
    await engine.start()
    await engine.update_weights(0, bundle(make_model("llama_untied")))
    go = threading.Event()
    monkeypatch.setattr(TorchEngine, "step", lambda _: [] * go.wait(10))
    with pytest.raises(RolloutError, match="no answer") as caught:
        await engine.generate([request("a", [5])], timeout_s=0.05)
    assert caught.value.failure is FailureClass.ENGINE
    with pytest.raises(ReplicaLostError, match="still in a step"):
        await engine.aclose()
    go.set()
    await engine.aclose()


async def test_calls_of_a_group_share_the_prefill_and_end_one_by_one(tmp_path, slow_steps):
    async with _engine(tmp_path) as engine, asyncio.TaskGroup() as group:
        prompt = list(range(3, 43))
        items = [request(str(i), prompt, max_tokens=2 + 3 * i, temperature=0) for i in range(4)]
        calls = [group.create_task(engine.generate([item], timeout_s=30)) for item in items]
        await _until(lambda: engine.stats().num_waiting == 4)
        for call, item in zip(calls, items, strict=True):
            slow_steps.release(2 if call is calls[0] else 3)
            (result,) = await call
            assert len(result.token_ids) == item.sampling.max_tokens
            assert [c.done() for c in calls] == [c in calls[: calls.index(call) + 1] for c in calls]
        assert engine.stats().num_prompt_tokens == len(prompt)


async def test_the_loop_turns_while_the_engine_computes(tmp_path, monkeypatch):
    async with _engine(tmp_path) as engine:
        go = threading.Event()
        step = TorchEngine.step
        monkeypatch.setattr(TorchEngine, "step", lambda self: step(self) if go.wait(10) else [])
        async with asyncio.TaskGroup() as group:
            call = group.create_task(engine.generate([request("a", [5])], timeout_s=30))
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not call.done()
            go.set()


async def test_closing_fails_what_is_in_flight_and_is_idempotent(tmp_path, slow_steps):
    async with _engine(tmp_path) as engine:
        call = asyncio.tasks.Task(
            engine.generate([request("a", [5], max_tokens=400)], timeout_s=30)
        )
        slow_steps.release(2)
        await _until(lambda: engine.stats().num_running == 1)
        await engine.aclose()
        with pytest.raises(ReplicaLostError, match="closed"):
            await call
        await engine.aclose()
        assert "freewheel-engine" not in [thread.name for thread in threading.enumerate()]


async def test_a_model_that_cannot_be_read_fails_the_start(tmp_path):
    engine = AsyncEngine(_settings(), tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path"):
        await engine.start()
    engine.close()


async def test_a_call_before_the_start_is_refused(tmp_path):
    engine = AsyncEngine(_settings(), tmp_path)
    with pytest.raises(ReplicaLostError, match="not started"):
        await engine.generate([request("a", [5])], timeout_s=1)
    engine.close()


async def test_a_tokenizer_that_cannot_be_loaded_costs_its_request_alone(tmp_path, monkeypatch):
    def broken(*args, **options):
        raise ImportError("no sentencepiece")

    async with _engine(tmp_path) as engine:
        monkeypatch.setattr("freewheel.tokenizer.load_tokenizer", broken)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"stop strings need the tokenizer.*piece"):
                await engine.generate([request("a", [5], stop=("x",))], timeout_s=60)
        (result,) = await engine.generate([request("b", [5], max_tokens=4)], timeout_s=60)
        assert len(result.token_ids) == 4


async def test_the_tokenizer_is_loaded_beside_the_engine_s_loop_and_thread(tmp_path, monkeypatch):
    load, threads = tokenizer.load_tokenizer, []

    def watched(*args, **options):
        threads.append(threading.current_thread().name)
        return load(*args, **options)

    async with _engine(tmp_path) as engine:
        monkeypatch.setattr("freewheel.tokenizer.load_tokenizer", watched)
        for name in ("a", "b"):
            await engine.generate([request(name, [5], stop=("x",))], timeout_s=60)
    (thread,) = threads
    assert thread not in ("MainThread", "freewheel-engine")


async def test_stop_strings_of_the_configuration_are_ready_at_the_start(tmp_path, monkeypatch):
    async with _engine(tmp_path, stop=("x",)) as engine:
        monkeypatch.delattr("freewheel.tokenizer.load_tokenizer")
        await engine.generate([request("a", [5], stop=("x",))], timeout_s=60)
