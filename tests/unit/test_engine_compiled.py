"""The compiled kernels against torch's own operations, on shapes that fit no vector."""

import os
import platform
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.engine.compiled import build
from freewheel.engine.compiled.build import CompileError, library
from freewheel.engine.compiled.kernels import Kernels
from freewheel.engine.loading import load_model
from tests.unit.engine_models import (
    CONFIGS,
    config,
    make_engine,
    make_model,
    model_logprobs,
    request,
    run,
    save,
)

SIZES = st.integers(1, 70)


@pytest.fixture(scope="module", params=["native", "x86-64-v3", "x86-64"])
def kernels(request, tmp_path_factory) -> Kernels:
    """Of this processor, and with the shorter vectors of older ones."""
    if request.param == "native":
        return Kernels(num_threads=2)
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("not a processor that has these vectors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FREEWHEEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(build._NATIVE, "x86_64", f"-march={request.param}")
        return Kernels(num_threads=2)


def test_vectors_are_as_long_as_the_processor_s(kernels, request):
    width = kernels.pack(torch.ones(1, 1)).num_weights
    assert (
        width
        in {"native": {8, 16, 32}, "x86-64-v3": {16}, "x86-64": {8}}[
            request.node.callspec.params["kernels"]
        ]
    )


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(rows=SIZES, inputs=SIZES, outputs=SIZES, with_bias=st.booleans(), with_base=st.booleans())
def test_a_product_is_torch_s(kernels, rows, inputs, outputs, with_bias, with_base):
    x, weight = _random(rows, inputs), _random(outputs, inputs, seed=1)
    bias = _random(outputs, seed=2) if with_bias else None
    base = _random(rows, outputs, seed=3) if with_base else None
    y = kernels.apply(kernels.pack(weight, bias), x, base)
    expected = F.linear(x, weight, bias) + (0 if base is None else base)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(rows=SIZES, inputs=SIZES, outputs=SIZES, with_bias=st.booleans())
def test_a_gated_product_is_torch_s(kernels, rows, inputs, outputs, with_bias):
    x, gate, up = _random(rows, inputs), _random(outputs, inputs, seed=1), _random(outputs, inputs)
    biases = [_random(outputs, seed=3), _random(outputs, seed=4)] if with_bias else []
    y = kernels.apply(kernels.pack_gated(gate, up, biases), x)
    first, second = biases or (None, None)
    expected = F.silu(F.linear(x, gate, first)) * F.linear(x, up, second)
    torch.testing.assert_close(y, expected, atol=1e-3, rtol=1e-4)


def test_the_gate_s_function_holds_for_all_numbers(kernels):
    one = torch.ones(1, 1)
    x = torch.cat([torch.linspace(-120, 120, 4801), torch.tensor([0.0, 1e-30, -1e-30, 3e38])])
    y = kernels.apply(kernels.pack_gated(one, one), x.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(y[:-1], (F.silu(x) * x)[:-1], atol=1e-30, rtol=1e-6)
    assert torch.isinf(y[-1])
    bad = torch.tensor([[float("nan")]])
    assert torch.isnan(kernels.apply(kernels.pack_gated(one, one), bad)).all()


def test_a_row_s_result_does_not_depend_on_the_others(kernels):
    panels, x = kernels.pack(_random(40, 33)), _random(29, 33, seed=1)
    whole = kernels.apply(panels, x)
    for count in (1, 2, 7, 13):
        assert torch.equal(kernels.apply(panels, x[:count]), whole[:count])


@pytest.mark.parametrize("apart_below", [0, 1 << 30])
@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
def test_threads_share_a_step_by_rows_or_by_outputs(name, apart_below, tmp_path, monkeypatch):
    monkeypatch.setattr("freewheel.engine.compiled.kernels._MIN_OPERATIONS", 0)
    monkeypatch.setattr("freewheel.engine.compiled.step._APART_MAX_WEIGHTS", apart_below)
    engine, model = make_engine(name, tmp_path, num_threads=3), make_model(name)
    generator = np.random.default_rng(0)
    items = [
        request(str(i), generator.integers(3, 60, size=size).tolist(), seed=i, max_tokens=5 + i)
        for i, size in enumerate([1, 20, 40, 3, 60, 7, 8, 9, 10, 11, 12, 13, 14, 15])
    ]
    results = run(engine, items)
    for item in items:
        generation = results[item.request_id]
        expected = model_logprobs(
            model, item.prompt_token_ids.tolist(), generation.token_ids, item.sampling
        )
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


def test_wide_heads_use_whole_vectors_and_what_is_left(tmp_path, monkeypatch):
    for dim in (4, 16, 20, 64, 72):
        monkeypatch.setitem(CONFIGS, "wide", _with_head_dim(dim))
        engine, model = make_engine("wide", tmp_path / str(dim)), make_model("wide")
        item = request("a", list(range(3, 30)), max_tokens=20)
        generation = run(engine, [item])["a"]
        expected = model_logprobs(model, list(range(3, 30)), generation.token_ids, item.sampling)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


def _with_head_dim(dim):
    """Seven query heads of this size for one of keys; a hidden size that fits no vector."""
    shape = {"head_dim": dim, "hidden_size": 42, "num_attention_heads": 7, "num_key_value_heads": 1}
    return type(CONFIGS["llama_tied"])(**(CONFIGS["llama_tied"].to_dict() | shape))


def test_the_library_is_made_once_and_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("FREEWHEEL_CACHE", str(tmp_path))
    made = library()
    written = made.stat().st_mtime_ns
    assert library() == made
    assert made.stat().st_mtime_ns == written
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1"))
    assert library() != made


def test_without_a_compiler_the_engine_is_slower_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FREEWHEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        library()
    assert load_model(config(), save("llama_tied", tmp_path)).decoder.kernels is None
    assert "without compiled kernels" in caplog.text
    assert "no-such-compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path, monkeypatch):
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no OpenMP" >&2\nexit 1\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("FREEWHEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", os.fspath(compiler))
    with pytest.raises(CompileError, match="no OpenMP"):
        library()
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_a_library_that_cannot_be_loaded_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FREEWHEEL_CACHE", str(tmp_path / "cache"))
    made = library()
    made.write_bytes(b"")
    assert load_model(config(), save("llama_tied", tmp_path)).decoder.kernels is None
    assert f"{made} cannot be loaded" in caplog.text


def test_without_any_place_to_keep_them_there_are_none(tmp_path, monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "cache_folder", homeless)
    assert load_model(config(), save("llama_tied", tmp_path)).decoder.kernels is None
    assert "FREEWHEEL_CACHE" in caplog.text


def test_kernels_are_left_out_on_request(tmp_path):
    decoder = load_model(config(enforce_eager=True), save("llama_tied", tmp_path)).decoder
    assert decoder.kernels is None
    assert load_model(config(), tmp_path).decoder.kernels is not None
