"""The core of the engine, without threads: numbers, batching, memory, weight updates."""

import dataclasses

import numpy as np
import pytest
import torch

from freewheel.engine.facts import WeightNames
from freewheel.engine.generic import GenericDecoder
from freewheel.engine.llama import LlamaDecoder
from freewheel.engine.loading import load_model
from freewheel.engine.torch_engine import TorchEngine
from freewheel.errors import ConfigError, FailureClass, InvariantError, RolloutError
from freewheel.types import SamplingParams
from freewheel.weights import pack_weights
from tests.unit.bundles import kept
from tests.unit.engine_models import (
    CONFIGS,
    EOS,
    FAST,
    VOCAB,
    bundle,
    config,
    make_engine,
    make_model,
    model_logprobs,
    prompts,
    request,
    run,
    save,
    tokenizer,
)

COMPILED, PLAIN, GENERIC = {}, {"enforce_eager": True}, {"fast": False}
PATHS = [
    *[(name, COMPILED) for name in FAST],
    *[(name, PLAIN) for name in FAST],
    *[(name, GENERIC) for name in CONFIGS if name not in FAST],
    ("llama_tied", GENERIC),
    ("qwen3", GENERIC),
]
ALL = [("llama_tied", COMPILED), ("llama_tied", PLAIN), ("gpt2", GENERIC)]
FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def _assert_logprobs(model, prompt, generation, sampling):
    expected = model_logprobs(model, prompt, generation.token_ids, sampling)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_logprobs_are_those_of_a_forward_pass(name, path, tmp_path):
    engine, model = make_engine(name, tmp_path, **path), make_model(name)
    texts = prompts(6)
    requests = [request(str(i), prompt, seed=i, **FILTERS[i]) for i, prompt in enumerate(texts)]
    results = run(engine, requests)
    for item, prompt in zip(requests, texts, strict=True):
        generation = results[item.request_id]
        assert len(generation.token_ids) == item.sampling.max_tokens
        assert generation.finish_reason == "length"
        _assert_logprobs(model, prompt, generation, item.sampling)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_fast_path_is_taken_where_it_is_right(name, tmp_path):
    decoder = load_model(config(), save(name, tmp_path)).decoder
    assert isinstance(decoder, LlamaDecoder if name in FAST else GenericDecoder)


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_greedy_equals_generate(name, path, tmp_path):
    engine, model = make_engine(name, tmp_path, **path), make_model(name)
    texts = prompts(5, seed=3)
    results = run(
        engine, [request(str(i), p, temperature=0, max_tokens=20) for i, p in enumerate(texts)]
    )
    for i, prompt in enumerate(texts):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None
        )
        assert results[str(i)].token_ids.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("name", "path"), ALL)
def test_a_seed_gives_the_same_tokens_in_any_batch(name, path, tmp_path):
    prompt, others = prompts(1)[0], prompts(9, seed=5)
    engine = make_engine(name, tmp_path, **path)
    alone = run(engine, [request("a", prompt, seed=3, max_tokens=30)])["a"]
    crowd = [request(f"o{i}", p, seed=i, top_p=0.9) for i, p in enumerate(others)]
    together = run(engine, [*crowd[:4], request("a", prompt, seed=3, max_tokens=30), *crowd[4:]])
    other_seed = run(engine, [request("a", prompt, seed=4, max_tokens=30)])["a"]
    assert alone.token_ids.tolist() == together["a"].token_ids.tolist()
    assert alone.token_ids.tolist() != other_seed.token_ids.tolist()


def test_a_group_shares_its_prefill(tmp_path):
    engine, model = make_engine("llama_tied", tmp_path), make_model("llama_tied")
    prompt = list(range(3, 33))
    results = run(engine, [request(str(i), prompt, seed=i) for i in range(8)])
    assert engine.stats().num_prompt_tokens == len(prompt)
    assert len({tuple(result.token_ids.tolist()) for result in results.values()}) == 8
    for result in results.values():
        _assert_logprobs(model, prompt, result, SamplingParams(max_tokens=12))


def test_groups_that_mix_in_line_share_their_prefills(tmp_path):
    engine = make_engine("llama_tied", tmp_path, max_num_seqs=12)
    model, texts = make_model("llama_tied"), {"a": [*range(3, 33)], "b": [*range(4, 24)]}
    items = [request(f"{name}{i}", texts[name], seed=i) for i in range(5) for name in texts]
    results = run(engine, items)
    assert engine.stats().num_prompt_tokens == len(texts["a"]) + len(texts["b"])
    for name, result in results.items():
        _assert_logprobs(model, texts[name[0]], result, SamplingParams(max_tokens=12))


def test_those_who_find_no_room_beside_their_prompt_keep_their_place(tmp_path):
    engine = make_engine("llama_tied", tmp_path, max_num_seqs=3)
    texts = {"a": [5, 6, 7], "b": [8, 9]}
    order = ["a0", "b0", "a1", "a2", "a3", "b1"]
    for name in order:
        engine.add(request(name, texts[name[0]], max_tokens=4))
    engine.step()
    assert [r.request_id for r in engine._scheduler.waiting] == ["b0", "a3", "b1"]
    results = run(engine)
    assert set(results) == set(order)
    assert engine.stats().num_prompt_tokens == 3 + 2 + 3


@pytest.mark.parametrize(("name", "path"), ALL)
def test_requests_join_and_leave_at_every_token(name, path, tmp_path):
    engine, model = make_engine(name, tmp_path, **path, max_num_seqs=4), make_model(name)
    texts = prompts(24, seed=8)
    lengths = np.random.default_rng(1).integers(1, 40, size=len(texts)).tolist()
    todo = [
        request(str(i), prompt, seed=i, max_tokens=length)
        for i, (prompt, length) in enumerate(zip(texts, lengths, strict=True))
    ]
    results, most = {}, 0
    for item in todo:
        engine.add(item)
        for generation in engine.step():
            results[generation.request_id] = generation
        most = max(most, engine.stats().num_running)
    results |= run(engine)
    assert most == 4
    for i, (prompt, length) in enumerate(zip(texts, lengths, strict=True)):
        assert len(results[str(i)].token_ids) == length
        _assert_logprobs(model, prompt, results[str(i)], todo[i].sampling)


@pytest.mark.parametrize(("name", "path"), ALL)
def test_long_prompts_are_prefilled_in_pieces_while_others_decode(name, path, tmp_path):
    engine = make_engine(name, tmp_path, **path, max_prefill_tokens=5)
    model, long = make_model(name), prompts(1)[0] + list(range(3, 43))
    engine.add(request("short", [5, 6], max_tokens=40))
    engine.step()
    engine.add(request("long", long, max_tokens=10))
    before = engine.stats()
    engine.step()
    after = engine.stats()
    assert after.num_prompt_tokens - before.num_prompt_tokens == 5
    assert after.num_generated_tokens - before.num_generated_tokens == 1
    results = run(engine)
    _assert_logprobs(model, long, results["long"], SamplingParams(max_tokens=10))
    _assert_logprobs(model, [5, 6], results["short"], SamplingParams(max_tokens=40))


@pytest.mark.parametrize(("name", "path"), ALL)
def test_a_full_cache_makes_requests_wait_and_none_fail(name, path, tmp_path):
    roomy = make_engine(name, tmp_path, **path)
    cells = 2 * 160 + 20
    cell = roomy._scheduler.limits
    per_cell = (1 << 24) // cell.max_cells
    engine = make_engine(name, tmp_path, **path, kv_cache_bytes=cells * per_cell + per_cell)
    model, texts = make_model(name), prompts(16, seed=2)
    requests = [request(str(i), p, seed=i, max_tokens=90) for i, p in enumerate(texts)]
    for item in requests:
        engine.add(item)
    results, waited = {}, 0
    while engine.can_step:
        results |= {generation.request_id: generation for generation in engine.step()}
        stats = engine.stats()
        waited = max(waited, stats.num_waiting)
        prefills = sum(len(p.token_ids) for p in engine._scheduler.prefilling)
        assert stats.extra["kv_cells"] + prefills <= engine._scheduler.limits.max_cells
    assert waited > 0
    assert engine.stats().extra["num_preempted"] > 0
    expected = run(roomy, requests)
    for i, prompt in enumerate(texts):
        assert results[str(i)].finish_reason == "length"
        assert results[str(i)].token_ids.tolist() == expected[str(i)].token_ids.tolist()
        _assert_logprobs(model, prompt, results[str(i)], requests[i].sampling)


def test_a_cache_too_small_for_one_request_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_bytes: 4096 cannot hold one request"):
        make_engine("llama_tied", tmp_path, kv_cache_bytes=4096)


def test_lengths_beyond_the_positions_of_the_model_are_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="512 positions"):
        make_engine("gpt2", tmp_path, max_response_length=1000)


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "running"])
def test_abort_returns_the_tokens_so_far(stage, tmp_path):
    engine, model = (
        make_engine("llama_tied", tmp_path, max_prefill_tokens=8),
        make_model("llama_tied"),
    )
    engine.add(request("a", [4, 5, 6], max_tokens=30))
    engine.add(request("b", list(range(3, 33)), max_tokens=30))
    engine.add(request("c", [7, 8], max_tokens=30))
    for _ in range({"waiting": 0, "prefilling": 2, "running": 8}[stage]):
        assert engine.step() == []
    (aborted,) = engine.abort(["b", "unknown"])
    assert aborted.request_id == "b"
    assert aborted.finish_reason == "abort"
    assert (len(aborted.token_ids) > 0) == (stage == "running")
    results = run(engine)
    assert sorted(results) == ["a", "c"]
    _assert_logprobs(model, [4, 5, 6], results["a"], SamplingParams(max_tokens=30))
    _assert_logprobs(model, [7, 8], results["c"], SamplingParams(max_tokens=30))


def test_end_tokens_end_a_request_and_are_kept(tmp_path):
    engine = make_engine("llama_tied", tmp_path, eos=True)
    results = run(
        engine, [request(str(i), [5, 9], seed=i, max_tokens=96, temperature=3.0) for i in range(8)]
    )
    stopped = [result for result in results.values() if result.finish_reason == "stop"]
    assert len(stopped) > 1
    for result in stopped:
        assert result.token_ids[-1] == EOS
        assert EOS not in result.token_ids[:-1]


def test_stop_ids_and_stop_strings_end_a_request_and_are_kept(tmp_path):
    engine = make_engine("llama_tied", tmp_path)
    free = run(engine, [request("free", [5, 9], max_tokens=60, temperature=2.0)])["free"]
    tokens = free.token_ids.tolist()
    text = tokenizer().decode(tokens[20:23])
    first = next(i for i in range(3, 61) if tokenizer().decode(tokens[i - 3 : i]) == text)
    results = run(
        engine,
        [
            request("id", [5, 9], max_tokens=60, temperature=2.0, stop_token_ids=(tokens[20],)),
            request("text", [5, 9], max_tokens=60, temperature=2.0, stop=("no such", text)),
        ],
    )
    assert results["id"].token_ids.tolist() == tokens[: tokens.index(tokens[20]) + 1]
    assert results["text"].token_ids.tolist() == tokens[:first]
    assert {result.finish_reason for result in results.values()} == {"stop"}


@pytest.mark.parametrize(("name", "path"), ALL)
def test_weights_change_between_two_tokens(name, path, tmp_path):
    engine = make_engine(name, tmp_path, **path, version=4)
    old, new = make_model(name), make_model(name, seed=1)
    texts = prompts(5, seed=6)
    for i, prompt in enumerate(texts):
        engine.add(request(str(i), prompt, seed=i, max_tokens=30))
    for _ in range(9):
        engine.step()
    engine.update_weights(5, bundle(new))
    results = run(engine, [request("late", texts[0], seed=0, max_tokens=30)])
    assert results["late"].versions.tolist() == [5] * 30
    for i, prompt in enumerate(texts):
        result = results[str(i)]
        assert result.versions.tolist() == [4] * 9 + [5] * 21
        sampling = SamplingParams(max_tokens=30)
        before = model_logprobs(old, prompt, result.token_ids, sampling)
        after = model_logprobs(new, prompt, result.token_ids, sampling)
        np.testing.assert_allclose(result.logprobs[:9], before[:9], atol=1e-4)
        np.testing.assert_allclose(result.logprobs[9:], after[9:], atol=1e-4)
        assert np.abs(before[9:] - after[9:]).max() > 0.1


@pytest.mark.parametrize(("name", "path"), ALL)
def test_weights_that_do_not_fit_leave_the_old_ones(name, path, tmp_path):
    engine, model = make_engine(name, tmp_path, **path), make_model(name)
    named = list(make_model(name, seed=1).named_parameters())
    first, tensor = named[0]
    bad = {
        "unknown other": [*named, ("other", torch.zeros(3))],
        f"missing {named[-1][0]}": named[:-1],
        f"{first} is": [(first, tensor[:-1].clone()), *named[1:]],
    }
    engine.add(request("a", [5, 6, 7]))
    engine.step()
    for message, tensors in bad.items():
        with pytest.raises(InvariantError, match=message):
            engine.update_weights(1, pack_weights(tensors))
    result = run(engine)["a"]
    assert result.versions.tolist() == [0] * 12
    _assert_logprobs(model, [5, 6, 7], result, SamplingParams(max_tokens=12))


def test_tied_weights_may_come_under_either_name(tmp_path):
    model, texts = make_model("llama_tied", seed=1), prompts(1)
    names = dict(model.named_parameters())
    names["lm_head.weight"] = names.pop("model.embed_tokens.weight")
    for name, path in (("a", COMPILED), ("b", GENERIC)):
        engine = make_engine("llama_tied", tmp_path / name, **path)

        engine.update_weights(1, pack_weights(names.items()))
        result = run(engine, [request("a", texts[0])])["a"]
        _assert_logprobs(model, texts[0], result, SamplingParams(max_tokens=12))


def test_nothing_is_computed_before_the_first_weights(tmp_path):
    engine = make_engine("llama_tied", tmp_path, version=None)
    engine.add(request("a", [5]))
    assert not engine.can_step
    assert engine.step() == []
    assert engine.version == -1
    engine.update_weights(0, bundle(make_model("llama_tied")))
    assert run(engine)["a"].versions.tolist() == [0] * 12


@pytest.mark.parametrize(
    ("bad", "failure"),
    [
        (request("r", [5] * 161, max_tokens=1), FailureClass.OVER_LONG_PROMPT),
        (request("r", [5] * 60, max_tokens=101), FailureClass.OVER_LONG_PROMPT),
        (request("r", []), FailureClass.BAD_PROMPT),
        (request("r", [VOCAB]), FailureClass.BAD_PROMPT),
        (request("r", [-1]), FailureClass.BAD_PROMPT),
    ],
)
def test_requests_that_cannot_run_are_refused(bad, failure, tmp_path):
    engine = make_engine("llama_tied", tmp_path)
    with pytest.raises(RolloutError, match="request r: ") as caught:
        engine.check(bad)
    assert caught.value.failure is failure


def test_a_later_turn_may_have_the_turns_before_it_in_its_prompt(tmp_path):
    """`rollout.max_prompt_length` is 64 here, and 96 tokens may follow."""
    engine, model = make_engine("llama_tied", tmp_path), make_model("llama_tied")
    prompt = [3 + i % 50 for i in range(64 + 90)]
    turn = request("r", prompt, max_tokens=6)
    _assert_logprobs(model, prompt, run(engine, [turn])["r"], turn.sampling)


@pytest.mark.parametrize(
    "sampling", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}]
)
def test_sampling_parameters_that_make_no_sense_are_refused(sampling, tmp_path):
    with pytest.raises(ConfigError, match="sampling parameters"):
        make_engine("llama_tied", tmp_path).check(request("r", [5], **sampling))


def test_an_id_that_is_in_the_engine_is_refused(tmp_path):
    engine = make_engine("llama_tied", tmp_path)
    engine.add(request("r", [5]))
    with pytest.raises(InvariantError, match="request r is in the engine already"):
        engine.add(request("r", [6]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_a_request_as_an_error(temperature, tmp_path):
    engine = make_engine("llama_tied", tmp_path)
    model = make_model("llama_tied")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    engine.update_weights(1, bundle(model))
    result = run(engine, [request("r", [5], temperature=temperature)])["r"]
    assert result.finish_reason == "error"
    assert len(result.token_ids) == 0


def test_a_folder_without_a_model_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        TorchEngine.from_folder(config(), tmp_path)


@pytest.mark.parametrize("settled_per_step", [1, 1 << 24])
@pytest.mark.parametrize("path", [COMPILED, PLAIN])
@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3"])
def test_layers_agree_before_and_while_and_after_they_are_packed(
    name, path, settled_per_step, tmp_path, monkeypatch
):
    monkeypatch.setattr("freewheel.engine.linear._PACK_MIN_ELEMENTS", 1)
    # 1: one layer a step, so that requests run over layers of both kinds.
    monkeypatch.setattr("freewheel.engine.torch_engine._SETTLED_PER_STEP", settled_per_step)
    engine, model = make_engine(name, tmp_path, **path), make_model(name)
    run(engine, [request("x", [5, 6], max_tokens=3)])
    engine.update_weights(1, bundle(make_model(name, seed=1)))
    engine.update_weights(2, bundle(model))
    assert not engine.is_settled
    texts = prompts(5)
    results = run(engine, [request(str(i), p, seed=i) for i, p in enumerate(texts)])
    assert engine.is_settled
    for i, prompt in enumerate(texts):
        assert set(results[str(i)].versions.tolist()) == {2}
        _assert_logprobs(model, prompt, results[str(i)], SamplingParams(max_tokens=12))


def test_the_engine_keeps_no_view_of_a_bundle_once_it_is_settled(tmp_path, monkeypatch):
    for number, (name, path, packs_from) in enumerate(
        [
            ("llama_tied", COMPILED, 1),
            ("llama_tied", PLAIN, 1),
            ("llama_tied", PLAIN, 1 << 30),
            ("gpt2", GENERIC, 1),
        ]
    ):
        monkeypatch.setattr("freewheel.engine.linear._PACK_MIN_ELEMENTS", packs_from)
        folder = tmp_path / str(number)
        engine, model = make_engine(name, folder, **path), make_model(name)
        weights = kept(bundle(model))
        engine.update_weights(1, weights)
        while not engine.is_settled:
            engine.settle()
        for array in weights.arrays:
            array[:] = 0
        result = run(engine, [request("a", [5, 6])])["a"]
        _assert_logprobs(model, [5, 6], result, SamplingParams(max_tokens=12))


def test_bfloat16_runs_and_stays_close(tmp_path):
    engine = make_engine("llama_tied", tmp_path, dtype="bfloat16")
    result = run(engine, [request("a", [5, 6, 7], max_tokens=20)])["a"]
    expected = model_logprobs(
        make_model("llama_tied"), [5, 6, 7], result.token_ids, SamplingParams(max_tokens=20)
    )
    assert np.abs(result.logprobs - expected).mean() < 0.1


def test_global_state_of_torch_is_left_alone(tmp_path):
    torch.manual_seed(5)
    before = (torch.get_rng_state().clone(), torch.get_default_dtype(), torch.is_grad_enabled())
    for name in ("llama_tied", "gpt2"):
        run(make_engine(name, tmp_path / name), [request("a", [5], seed=None)])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.get_default_dtype(), torch.is_grad_enabled())
    assert not torch.is_inference_mode_enabled()


def test_requests_without_a_seed_differ(tmp_path):
    engine = make_engine("llama_tied", tmp_path)
    item = request("0", [5, 6], seed=None, max_tokens=40)
    results = run(engine, [dataclasses.replace(item, request_id=str(i)) for i in range(4)])
    assert len({tuple(result.token_ids.tolist()) for result in results.values()}) == 4


def test_small_models_keep_to_one_thread(tmp_path):
    loaded = load_model(config(), save(FAST[0], tmp_path))
    assert loaded.weight_names.num_parameters < 4_000_000
    assert loaded.num_useful_threads(8) == 1
    large = WeightNames(shapes={"a": (9_000_000,), "b": (9_000_000,)}, parameters=({"a", "b"},))
    assert large.num_parameters == 9_000_000
    assert dataclasses.replace(loaded, weight_names=large).num_useful_threads(8) == 2
    assert dataclasses.replace(loaded, weight_names=large).num_useful_threads(1) == 1
