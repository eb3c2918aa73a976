"""Requests into vLLM's words, and its answers into ours."""

from collections.abc import Container
from typing import Any

import numpy as np

from freewheel.errors import FailureClass, RolloutError
from freewheel.types import Generation, GenerationRequest, SamplingParams

_FINISH_REASONS = ("stop", "length", "abort")


def sampling_arguments(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`.

    The seed is left out: vLLM's CPU runner dies when it has to take back a draw of a request that
    has a generator of its own, and on GPUs such requests leave the fast samplers.

    Args:
        sampling: ours.
        eos_token_ids: the model's end tokens, by our reading of its folder.
    """
    ends = sorted(eos_token_ids | frozenset(sampling.stop_token_ids))
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": ends or None,
        "ignore_eos": True,
        # The sampled token's alone, in one flat list.
        "logprobs": 0,
        "flat_logprobs": True,
        # Text is needed to see stop strings in, and for nothing else.
        "detokenize": bool(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }


def generation(request: GenerationRequest, output: Any, late: Container[str]) -> Generation:
    """Our record of a finished `CompletionOutput`.

    Args:
        request: what was asked.
        output: vLLM's answer.
        late: ids of the requests that were ended at their deadline.

    Raises:
        RolloutError: class `engine`; the logits were not finite, or vLLM failed the request.
    """
    logprobs = np.asarray(output.logprobs.logprobs if output.logprobs else (), dtype=np.float32)
    reason, name = output.finish_reason, f"request {request.request_id}"
    if reason not in _FINISH_REASONS:
        raise RolloutError(FailureClass.ENGINE, f"{name}: vLLM ended it: {reason}")
    if not np.isfinite(logprobs).all():
        raise RolloutError(FailureClass.ENGINE, f"{name}: logits are not finite")
    if reason == "abort" and request.request_id in late:
        reason = "timeout"
    versions = [
        int(span.version)
        for span in output.weight_versions or ()
        for _ in range(span.start, span.end)
    ]
    count = len(output.token_ids)
    if len(logprobs) != count or len(versions) != count:
        message = f"{count} tokens, {len(logprobs)} logprobs, {len(versions)} versions"
        raise RolloutError(FailureClass.ENGINE, f"{name}: vLLM gave {message}")
    return Generation(
        request_id=request.request_id,
        token_ids=np.asarray(output.token_ids, dtype=np.int32),
        logprobs=logprobs,
        versions=np.asarray(versions, dtype=np.int32),
        finish_reason=reason,
    )
