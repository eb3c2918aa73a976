"""The compiled kernels against torch's own operations, on shapes that fit no vector."""

import dataclasses
import platform
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.engine.compiled import build
from freewheel.engine.compiled.build import CompileError, load
from freewheel.engine.compiled.kernels import Kernels
from freewheel.engine.compiled.step import CompiledStep
from freewheel.engine.loading import load_model
from freewheel.errors import InvariantError
from tests.unit.engine_models import (
    CONFIGS,
    FAST,
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
def kernels(request, tmp_path_factory):
    """Of this processor, and with the shorter vectors of older ones."""
    with pytest.MonkeyPatch.context() as patch:
        # Small products, too, are shared by the threads.
        patch.setattr("freewheel.engine.compiled.kernels._MIN_OPERATIONS", 0)
        yield _kernels(request.param, tmp_path_factory)


def _kernels(kind, tmp_path_factory):
    if kind == "native":
        return Kernels(num_threads=3)
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("not a processor that has these vectors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FREEWHEEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(build._NATIVE, "x86_64", f"-march={kind}")
        return Kernels(num_threads=3)


def test_vectors_are_as_long_as_the_processor_s(kernels, request):
    kind = request.node.callspec.params["kernels"]
    flags = Path("/proc/cpuinfo").read_text()
    native = 32 if "avx512f" in flags else 16 if "avx" in flags else 8
    expected = {"native": native, "x86-64-v3": 16, "x86-64": 8}[kind]
    assert kernels.pack(torch.ones(1, 1)).num_weights == expected


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


def test_a_matrix_that_lies_otherwise_is_packed_right(kernels):
    x, weight = _random(3, 5), _random(5, 9, seed=1)
    torch.testing.assert_close(kernels.apply(kernels.pack(weight.T), x), x @ weight)
    gated = kernels.apply(kernels.pack_gated(weight.T, weight.T), x)
    torch.testing.assert_close(gated, F.silu(x @ weight) * (x @ weight))


def test_no_product_on_the_way_is_too_large(kernels):
    one, x = torch.ones(1, 1), torch.tensor([[-80.0]])
    up = -1.25e35 * one
    y = kernels.apply(kernels.pack_gated(one, up), x)
    torch.testing.assert_close(y, F.silu(x) * (x @ up.T), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", FAST)
def test_a_settled_model_s_steps_are_the_kernels_own(name, tmp_path):
    engine = make_engine(name, tmp_path)
    run(engine, [request("a", [5, 6])])
    assert isinstance(engine._decoder._step, CompiledStep)


def test_a_step_of_other_shapes_is_refused(tmp_path):
    engine = make_engine("llama_tied", tmp_path)
    run(engine, [request("a", [5, 6])])
    decoder = engine._decoder
    weights = decoder._model_weights()
    for changes in (
        {"num_heads": weights.num_heads + 1},
        {"norm": torch.ones(3)},
        {"head": weights.layers[0].down},
        {"embed": weights.embed[:, 1:]},
    ):
        with pytest.raises(InvariantError, match="do not belong together"):
            CompiledStep(decoder.kernels, dataclasses.replace(weights, **changes))


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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FREEWHEEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/kernels"


def _compiler(path, script):
    """A program that says which it is, and then does this."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo {path.name}\n{script}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_library_is_made_once_and_whole(cache, monkeypatch):
    load()
    (made,) = cache.iterdir()
    written = made.stat().st_mtime_ns
    load()
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [written]
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-O1"))
    load()
    assert len(list(cache.iterdir())) == 2


LOAD = "from freewheel.engine.compiled.build import load; load()"
"""For another process: what one has loaded it keeps, whatever becomes of the file."""


def test_processes_that_compile_at_once_do_not_disturb_each_other(cache):
    processes = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


def test_without_a_compiler_the_engine_is_slower_and_says_so(cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        load()
    assert load_model(config(), save("llama_tied", tmp_path)).decoder.kernels is None
    assert "without compiled kernels" in caplog.text
    assert "no-such-compiler" in caplog.text


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(cache, tmp_path, monkeypatch):
    # Its words are in no character set.
    broken = _compiler(tmp_path / "broken", "printf 'no OpenMP \\303' >&2; exit 1")
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CompileError, match="no OpenMP"):
        load()
    assert not list(cache.iterdir())


def test_the_next_compiler_is_tried(cache, tmp_path, monkeypatch):
    broken = _compiler(tmp_path / "broken", "exit 1")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_COMPILERS", (str(broken), *build._COMPILERS))
    assert load().fw_panel_width() > 0


def test_a_compiler_may_be_named_with_its_options(cache, tmp_path, monkeypatch):
    wrapper = _compiler(tmp_path / "wrapper", 'shift; exec c++ "$@"')
    monkeypatch.setenv("CXX", f"'{wrapper}' --wrapped")
    assert load().fw_panel_width() > 0


def test_a_damaged_library_is_made_anew(cache, tmp_path, caplog):
    subprocess.run([sys.executable, "-c", LOAD], check=True, timeout=120)
    (made,) = cache.iterdir()
    made.write_bytes(b"")
    assert load_model(config(), save("llama_tied", tmp_path)).decoder.kernels is not None
    assert made.stat().st_size > 1000
    assert not caplog.text


def test_what_cannot_be_loaded_is_named(cache, tmp_path, monkeypatch, caplog):
    empty = _compiler(tmp_path / "empty", 'while [ "$1" != -o ]; do shift; done; : > "$2"')
    monkeypatch.setenv("CXX", str(empty))
    assert load_model(config(), save("llama_tied", tmp_path)).decoder.kernels is None
    assert "cannot be loaded" in caplog.text


def test_a_cache_that_may_not_be_looked_at_is_done_without(cache, tmp_path, monkeypatch, caplog):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(CompileError, match="Permission denied"):
        load()


def test_no_code_is_taken_from_where_others_could_put_it(cache):
    load()
    cache.chmod(0o777)
    with pytest.raises(CompileError, match="another user could put code there"):
        load()


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
