"""vLLM's arguments and environment, from ours. Plain decisions: nothing of vLLM is imported."""

import secrets
from pathlib import Path
from typing import Any

from freewheel.config.sections import Config, RolloutConfig
from freewheel.models import cache_folder

BACKEND = "freewheel"
"""Name of the weight transfer backend, which vLLM finds because it imports the extension."""
EXTENSION = "freewheel.backends.vllm.worker.WorkerExtension"
INSTALL = "type: pip install 'freewheel[vllm]', or on a machine without GPU do as docs/vllm.md says"

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The replica's process has threads, which a fork would leave behind in a broken state.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Its processes speak to each other on this machine only.
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
_CPU_ENVIRONMENT = {
    # The engine's process computes itself, instead of in one more process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # By itself it would bind its threads to one core, the same one in every replica.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that wait give their core to another process after a millisecond.
    "KMP_BLOCKTIME": "1",
}


def environment(rollout: RolloutConfig, *, is_cpu: bool) -> dict[str, str]:
    """Environment variables of the replica's process and those below it, set before vLLM loads."""
    variables = _ENVIRONMENT | {"VLLM_CACHE_ROOT": str(cache_folder() / "vllm")}
    if is_cpu:
        variables |= _CPU_ENVIRONMENT
        if _enforce_eager(rollout, is_cpu=True):
            # Some helpers are compiled even so, at their first use: half a minute without a token.
            variables["TORCH_COMPILE_DISABLE"] = "1"
    return variables


def engine_arguments(config: Config, model_path: Path, *, is_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "trust_remote_code": config.model.trust_remote_code,
        # The weights come with the first update; those that stand here until then serve nobody.
        "load_format": "dummy",
        "dtype": _dtype(rollout, is_cpu=is_cpu),
        "max_model_len": rollout.max_prompt_length + rollout.max_response_length,
        "max_num_seqs": rollout.max_num_seqs,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        # In a Ray actor it would place its workers by Ray, perhaps on other nodes.
        "distributed_executor_backend": "mp" if rollout.tensor_parallel_size > 1 else "uni",
        "enforce_eager": _enforce_eager(rollout, is_cpu=is_cpu),
        # Of the distribution that a token was drawn from: after temperature and filters.
        "logprobs_mode": "processed_logprobs",
        # The model's own defaults for sampling are not ours.
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        # Replicas must not draw the same numbers.
        "seed": secrets.randbits(31),
    }
    return arguments | _memory(rollout, is_cpu=is_cpu)


def _memory(rollout: RolloutConfig, *, is_cpu: bool) -> dict[str, Any]:
    if is_cpu:
        return {"kv_cache_memory_bytes": rollout.kv_cache_bytes}
    return {"gpu_memory_utilization": rollout.gpu_memory_utilization}


def _enforce_eager(rollout: RolloutConfig, *, is_cpu: bool) -> bool:
    return is_cpu if rollout.enforce_eager is None else rollout.enforce_eager


def _dtype(rollout: RolloutConfig, *, is_cpu: bool) -> str:
    if rollout.dtype != "auto":
        return rollout.dtype
    return "float32" if is_cpu else "bfloat16"
