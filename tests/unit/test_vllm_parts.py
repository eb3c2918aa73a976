"""What goes to vLLM and comes from it, without vLLM: chunks, shared memory, settings, answers."""

import importlib.util
import itertools
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from freewheel.backends.ray.cores import Cores
from freewheel.backends.vllm.segment import WeightSegment, describe_tensors, plan_chunks
from freewheel.backends.vllm.settings import engine_arguments, environment
from freewheel.backends.vllm.translate import generation, sampling_arguments
from freewheel.config.sections import Config, RolloutConfig
from freewheel.errors import FailureClass, RolloutError
from freewheel.preflight import look
from freewheel.types import GenerationRequest, SamplingParams
from freewheel.weights import pack_weights, unpack_weights
from tests.unit.test_preflight_user_code import config as shipped_config


def _bundle(sizes=(10, 200, 3, 3, 500, 7)):
    generator = torch.Generator().manual_seed(0)
    return pack_weights(
        (f"t{i}", torch.randn(size, generator=generator)) for i, size in enumerate(sizes)
    )


@pytest.mark.parametrize("max_bytes", [1, 64, 1000, 2048, 1 << 20])
def test_chunks_have_each_tensor_once_in_order(max_bytes):
    bundle = _bundle()
    chunks = plan_chunks(bundle.specs, max_bytes=max_bytes)
    assert [i for chunk in chunks for i in range(chunk.start, chunk.stop)] == [*range(6)]
    for chunk in chunks:
        assert chunk.num_bytes <= max_bytes or chunk.stop - chunk.start == 1
    # No two neighbours would have fitted into one.
    for left, right in itertools.pairwise(chunks):
        assert left.num_bytes + bundle.specs[right.start].num_bytes + 64 > max_bytes


def test_the_segment_carries_what_was_written(monkeypatch):
    bundle = _bundle()
    chunks = plan_chunks(bundle.specs, max_bytes=1000)
    segment = WeightSegment(max(chunk.num_bytes for chunk in chunks))
    found = {}
    for chunk in chunks:
        segment.write(bundle, chunk)
        path = segment.path
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), chunk.num_bytes, access=mmap.ACCESS_READ)
        for name, dtype, shape, offset, num_bytes in describe_tensors(bundle.specs, chunk):
            assert dtype == "float32"
            array = np.frombuffer(memory, np.float32, num_bytes // 4, offset).reshape(shape)
            found[name] = array.copy()
            del array
        memory.close()
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="No such file"):
        open(path, "rb").close()
    for name, tensor in unpack_weights(bundle).items():
        np.testing.assert_array_equal(found[name], tensor.numpy())


def test_the_engine_is_told_what_the_configuration_says(tmp_path):
    rollout = RolloutConfig(
        engine="vllm",
        max_prompt_length=100,
        max_response_length=50,
        max_num_seqs=7,
        kv_cache_bytes=1 << 20,
        gpu_memory_utilization=0.4,
        tensor_parallel_size=2,
    )
    on_cpu = engine_arguments(Config(rollout=rollout), tmp_path, is_cpu=True)
    on_gpu = engine_arguments(Config(rollout=rollout), tmp_path, is_cpu=False)
    for arguments in (on_cpu, on_gpu):
        assert arguments["max_model_len"] == 150
        assert arguments["max_num_seqs"] == 7
        assert arguments["tensor_parallel_size"] == 2
        assert arguments["distributed_executor_backend"] == "mp"
        assert arguments["load_format"] == "dummy"
        assert arguments["logprobs_mode"] == "processed_logprobs"
    assert (on_cpu["dtype"], on_cpu["enforce_eager"]) == ("float32", True)
    assert (on_gpu["dtype"], on_gpu["enforce_eager"]) == ("bfloat16", False)
    assert on_cpu["kv_cache_memory_bytes"] == 1 << 20
    assert "gpu_memory_utilization" not in on_cpu
    assert on_gpu["gpu_memory_utilization"] == 0.4
    assert "kv_cache_memory_bytes" not in on_gpu
    assert on_cpu["seed"] != on_gpu["seed"]


def test_what_is_for_cpus_alone_stays_off_gpus():
    rollout = RolloutConfig(engine="vllm")
    on_cpu, on_gpu = (environment(rollout, is_cpu=is_cpu) for is_cpu in (True, False))
    assert on_gpu.items() <= on_cpu.items()
    assert set(on_cpu) - set(on_gpu) == {
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_CPU_OMP_THREADS_BIND",
        "KMP_BLOCKTIME",
        "TORCH_COMPILE_DISABLE",
    }
    compiled = environment(RolloutConfig(engine="vllm", enforce_eager=False), is_cpu=True)
    assert "TORCH_COMPILE_DISABLE" not in compiled


def test_sampling_parameters_keep_their_meaning():
    sampling = SamplingParams(
        max_tokens=9, temperature=0.5, top_k=-1, min_p=0.1, stop=("x",), stop_token_ids=(7, 3)
    )
    arguments = sampling_arguments(sampling, frozenset({3, 2}))
    assert arguments["stop_token_ids"] == [2, 3, 7]
    assert arguments["top_k"] == 0
    assert arguments["detokenize"]
    assert "seed" not in arguments
    plain = sampling_arguments(SamplingParams(max_tokens=9, seed=5), frozenset())
    assert (plain["stop"], plain["stop_token_ids"], plain["detokenize"]) == (None, None, False)


def _output(**changes):
    fields = {
        "token_ids": [5, 6, 7],
        "logprobs": SimpleNamespace(logprobs=[-1.0, -2.0, -0.5]),
        "finish_reason": "abort",
        "weight_versions": [
            SimpleNamespace(version="3", start=0, end=1),
            SimpleNamespace(version="12", start=1, end=3),
        ],
    }
    return SimpleNamespace(**(fields | changes))


REQUEST = GenerationRequest(
    request_id="a",
    prompt_token_ids=np.array([1], np.int32),
    sampling=SamplingParams(max_tokens=3),
)


def test_an_answer_keeps_tokens_logprobs_and_versions():
    result = generation(REQUEST, _output(), late=())
    assert result.token_ids.tolist() == [5, 6, 7]
    assert result.versions.tolist() == [3, 12, 12]
    assert result.logprobs.tolist() == [-1.0, -2.0, -0.5]
    assert result.finish_reason == "abort"
    assert generation(REQUEST, _output(), late={"a"}).finish_reason == "timeout"
    assert generation(REQUEST, _output(finish_reason="stop"), {"a"}).finish_reason == "stop"
    empty = _output(token_ids=[], logprobs=None, weight_versions=None)
    assert len(generation(REQUEST, empty, {"a"}).versions) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": SimpleNamespace(logprobs=[-1.0, float("nan"), 0.0])},
        {"finish_reason": "error"},
        {"weight_versions": [SimpleNamespace(version="3", start=0, end=2)]},
        {"logprobs": SimpleNamespace(logprobs=[-1.0])},
    ],
)
def test_an_answer_that_is_not_whole_is_an_engine_failure(changes):
    with pytest.raises(RolloutError, match="request a") as caught:
        generation(REQUEST, _output(**changes), ())
    assert caught.value.failure is FailureClass.ENGINE


def test_an_engine_that_is_not_installed_is_found_before_anything_starts(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name)
    )
    (missing,) = look(shipped_config(engine="vllm")).missing
    assert missing.startswith("rollout.engine=vllm: vLLM is not installed")
    assert look(shipped_config()).missing == ()


def test_the_engine_decides_what_runs_in_a_replica():
    assert Cores.of(RolloutConfig()) == Cores()
    assert "vllm" in Cores.of(RolloutConfig(engine="vllm")).replica
