"""A replica's core that runs vLLM: what `AsyncEngine` is for the embedded engine.

vLLM's engine computes in a process below this one; here are only its client, the requests in
flight and the weights on their way. Invariants: nothing is sampled before the first weights are in;
an update either is complete or ends the replica, so that no token is ever sampled under mixed
weights. The class is imported where torch is, vLLM itself only by `start`.
"""

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from freewheel.backends.vllm.segment import (
    Chunk,
    WeightSegment,
    describe_tensors,
    plan_chunks,
)
from freewheel.backends.vllm.settings import INSTALL, engine_arguments, environment
from freewheel.backends.vllm.translate import generation, sampling_arguments
from freewheel.config.sections import Config
from freewheel.engine.admission import check_request
from freewheel.engine.facts import ModelFacts
from freewheel.engine.loading import read_facts
from freewheel.errors import (
    ConfigError,
    FailureClass,
    FreewheelError,
    InvariantError,
    ReplicaLostError,
    RolloutError,
    StartupError,
)
from freewheel.remote_weights import RemoteWeights, network_environment
from freewheel.types import Generation, GenerationRequest, ReplicaStats
from freewheel.weights import WeightBundle

R = TypeVar("R")

NO_WEIGHTS = -1
"""Version before the first update."""


class VllmEngine:
    """See the module. All methods but `close` are for the loop on which `start` ran.

    Args:
        config: `rollout` gives lengths, limits, device and number format.
        model_path: folder of a Hugging Face causal LM; its weights are not read.
        stop_timeout_s: how long a call past its deadline waits for its partial results, and
            `close` for vLLM's process.
    """

    def __init__(self, config: Config, model_path: Path, *, stop_timeout_s: float = 30.0) -> None:
        self._config = config
        self._model_path = model_path
        self._stop_timeout_s = stop_timeout_s
        self._llm: Any = None
        self._counters: Any = None
        self._vllm: Any = None
        self._dead_error: type[Exception] = Exception
        self._facts: ModelFacts | None = None
        self._segment: WeightSegment | None = None
        self._in_flight: set[str] = set()
        self._late: set[str] = set()
        self._version = NO_WEIGHTS
        self._watched: list[int] = []
        self._updating = asyncio.Lock()
        self._ended = asyncio.Event()
        self._why_ended = "vLLM: not started"

    async def start(self) -> None:
        """Bring vLLM up, paused: it serves when the first weights are in.

        Raises:
            ConfigError: vLLM is not installed, is built for another device, or cannot run the
                model with these settings.
            StartupError: anything else that went wrong.
        """
        try:
            await asyncio.to_thread(self._build)
            self._why_ended = ""
            self._watch()
            # Asked once now, so that taking a request in never waits for the engine.
            await self._call(self._llm.get_supported_tasks())
            await self._call(self._llm.pause_generation(mode="keep"))
        except FreewheelError:
            raise
        except Exception as error:
            raise StartupError(f"vLLM did not come up: {type(error).__name__}: {error}") from error

    async def generate(
        self, requests: Sequence[GenerationRequest], *, timeout_s: float
    ) -> list[Generation]:
        """Sample a response for each request, in order.

        At `timeout_s` what is unfinished comes back with reason `timeout` and its tokens so far.
        Cancelling the call aborts its requests.

        Raises:
            RolloutError: a request was refused (`over_long_prompt`, `bad_prompt`), or vLLM failed
                it (`engine`).
            ConfigError: sampling parameters that cannot be used.
            ReplicaLostError: vLLM's process has ended.
        """
        self._check_alive()
        for request in requests:
            self._check(request)
        ids = [request.request_id for request in requests]
        self._claim(ids)
        try:
            async with asyncio.TaskGroup() as group:
                ended = group.create_task(self._ended.wait(), name="vllm-ended")
                work = group.create_task(self._sample_all(requests), name=f"generate {ids[:1]}")
                await self._finished(work, ended, ids, timeout_s)
                ended.cancel()
            return work.result()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self._in_flight.difference_update(ids)
            self._late.difference_update(ids)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their calls get what there is. Unknown ids are ignored."""
        self._check_alive()
        await self._llm.abort(list(request_ids))

    async def update_weights(self, version: int, bundle: WeightBundle | RemoteWeights) -> None:
        """Activate weights between two tokens; returns when every later token is under them.

        Requests in flight wait meanwhile and go on with their tokens. With
        `rollout.reset_prefix_cache` their keys and values are computed anew.

        Raises:
            InvariantError: the bundle does not fit the model; the old weights stay.
            ReplicaLostError: the update failed half way, and the engine was ended; or it had ended.
        """
        async with self._updating:
            self._check_alive()
            assert self._facts is not None
            self._facts.weight_names.check({s.name: s.shape for s in bundle.specs})
            try:
                await self._call(self._load(version, bundle))
            except BaseException as error:
                self._end(f"vLLM: version {version} was not loaded: {error!r}")
                await asyncio.shield(asyncio.to_thread(self._kill))
                if isinstance(error, Exception):
                    raise ReplicaLostError(self._why_ended) from error
                raise
            self._version = version

    def stats(self) -> ReplicaStats:
        """Counters as of vLLM's last step.

        Raises:
            ReplicaLostError: vLLM's process has ended.
        """
        self._check_alive()
        counters = self._counters
        num_running = min(counters.num_running, len(self._in_flight))
        return ReplicaStats(
            version=self._version,
            num_running=num_running,
            num_waiting=len(self._in_flight) - num_running,
            num_generated_tokens=counters.num_generated_tokens,
            num_prompt_tokens=counters.num_prompt_tokens,
            extra={
                "num_preempted": float(counters.num_preempted),
                "kv_cache_usage": float(counters.kv_cache_usage),
            },
        )

    def close(self) -> None:
        """End vLLM's process, waiting for it. Idempotent. Not for an event loop: use `aclose`."""
        self._why_ended = self._why_ended or "vLLM: closed"
        if self._llm is not None:
            self._llm.shutdown(timeout=self._stop_timeout_s)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    async def aclose(self) -> None:
        """End vLLM's process; calls in flight raise `ReplicaLostError`. Idempotent."""
        self._end("vLLM: closed")
        await asyncio.to_thread(self.close)

    def _build(self) -> None:
        """Import vLLM and start its process; takes 20 s and more, in a thread."""
        self._facts = read_facts(self._config, self._model_path)
        rollout, device = self._config.rollout, self._config.rollout.device
        os.environ.update(network_environment(self._config))
        os.environ.update(environment(rollout, is_cpu=device == "cpu"))
        try:
            self._vllm = importlib.import_module("vllm")
            platforms: Any = importlib.import_module("vllm.platforms")
        except ImportError as error:
            raise ConfigError(f"rollout.engine=vllm: {error}; {INSTALL}") from error
        is_cpu: bool = platforms.current_platform.is_cpu()
        if device != "auto" and is_cpu != (device == "cpu"):
            raise ConfigError(
                f"rollout.device={device}: this vLLM computes on "
                f"{'CPUs' if is_cpu else 'GPUs'}; {INSTALL}"
            )
        os.environ.update(environment(rollout, is_cpu=is_cpu))
        counters: Any = importlib.import_module("freewheel.backends.vllm.counters")
        llm: Any = importlib.import_module("vllm.v1.engine.async_llm")
        errors: Any = importlib.import_module("vllm.v1.engine.exceptions")
        arguments = engine_arguments(self._config, self._model_path, is_cpu=is_cpu)
        self._dead_error = errors.EngineDeadError
        self._counters = counters.Counters()
        try:
            settings = self._vllm.AsyncEngineArgs(**arguments)
        except ValueError as error:
            raise ConfigError(f"rollout.engine=vllm: {error}") from error
        self._llm = llm.AsyncLLM.from_engine_args(settings, stat_loggers=[self._counters])

    def _check(self, request: GenerationRequest) -> None:
        assert self._facts is not None
        check_request(
            request,
            self._config.rollout,
            vocab_size=self._facts.vocab_size,
            can_detect_strings=self._facts.has_tokenizer,
        )

    def _check_alive(self) -> None:
        if not self._why_ended and self._llm.errored:
            self._end("vLLM: its process ended")
        if self._why_ended:
            raise ReplicaLostError(self._why_ended)

    def _claim(self, ids: Sequence[str]) -> None:
        """Take ids in, all or none."""
        known = [name for name in ids if name in self._in_flight]
        if known or len(set(ids)) < len(ids):
            raise InvariantError(f"request {(known or ids)[0]} is in the engine already")
        self._in_flight.update(ids)

    def _end(self, why: str) -> None:
        """Serve no more: whatever this engine holds, no one may sample from it."""
        self._why_ended = self._why_ended or why
        self._ended.set()
        loop = asyncio.get_running_loop()
        for descriptor in self._watched:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._watched.clear()

    def _watch(self) -> None:
        """Hear of the end of vLLM's process at once."""
        loop = asyncio.get_running_loop()
        for process in self._llm.engine_core.resources.engine_manager.processes:
            descriptor = os.pidfd_open(process.pid)
            self._watched.append(descriptor)
            loop.add_reader(descriptor, self._end, f"vLLM: its process {process.pid} ended")

    async def _call(self, call: Coroutine[Any, Any, R]) -> R:
        """Await vLLM's answer, but not past the end of its process: vLLM itself would, for ever."""
        first = asyncio.FIRST_COMPLETED
        try:
            async with asyncio.TaskGroup() as group:
                ended = group.create_task(self._ended.wait(), name="vllm-ended")
                work = group.create_task(call, name="vllm-call")
                await asyncio.wait({work, ended}, return_when=first)
                ended.cancel()
                work.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        if work.cancelled():
            raise ReplicaLostError(self._why_ended)
        return work.result()

    def _kill(self) -> None:
        """End vLLM's process without letting its current call finish."""
        self._llm.engine_core.shutdown(timeout=0)

    async def _sample_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._sample(request), name=f"sample {request.request_id}")
                for request in requests
            ]
        return [task.result() for task in tasks]

    async def _sample(self, request: GenerationRequest) -> Generation:
        """One request, from vLLM's first to its last word on it."""
        assert self._facts is not None
        arguments = sampling_arguments(request.sampling, self._facts.eos_token_ids)
        sampling = self._vllm.SamplingParams(
            **arguments, output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        )
        prompt = self._vllm.inputs.engine.tokens_input(request.prompt_token_ids.tolist())
        try:
            answer = await _last(self._llm.generate(prompt, sampling, request.request_id))
        except self._dead_error as error:
            raise ReplicaLostError(f"vLLM: its process ended: {error}") from error
        except self._vllm.exceptions.VLLMClientError as error:
            name = f"request {request.request_id}"
            raise RolloutError(FailureClass.BAD_PROMPT, f"{name}: {error}") from error
        except self._vllm.exceptions.VLLMError as error:
            cause = error.__cause__ or error
            message = f"request {request.request_id}: {type(cause).__name__}: {cause}"
            raise RolloutError(FailureClass.ENGINE, message) from error
        return generation(request, answer.outputs[0], self._late)

    async def _finished(
        self,
        work: "asyncio.Task[list[Generation]]",
        ended: "asyncio.Task[Any]",
        ids: Sequence[str],
        timeout_s: float,
    ) -> None:
        """Wait for a call's requests; past the deadline, end what is unfinished."""
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait({work, ended}, timeout=timeout_s, return_when=first)
        if not done:
            self._late.update(ids)
            await self._llm.abort(list(ids))
            limit_s = self._stop_timeout_s
            done, _ = await asyncio.wait({work, ended}, timeout=limit_s, return_when=first)
        if not done:
            raise RolloutError(
                FailureClass.ENGINE,
                f"vLLM: no answer {self._stop_timeout_s} s past the deadline of {timeout_s} s "
                f"(request {ids[0]} and {len(ids) - 1} more)",
            )
        if work not in done:
            raise ReplicaLostError(self._why_ended)

    async def _load(self, version: int, weights: WeightBundle | RemoteWeights) -> None:
        """Pause, load all chunks, and go on. The first chunk is copied before the pause."""
        chunks = plan_chunks(weights.specs)
        first = await asyncio.to_thread(self._prepare, weights, chunks, chunks[0])
        await self._llm.pause_generation(
            mode="keep", clear_cache=self._config.rollout.reset_prefix_cache
        )
        await self._llm.start_weight_update()
        await self._send(first)
        for chunk in chunks[1:]:
            await self._send(await asyncio.to_thread(self._prepare, weights, chunks, chunk))
        await self._llm.finish_weight_update(str(version))
        await self._llm.resume_generation()

    def _prepare(
        self, weights: WeightBundle | RemoteWeights, chunks: Sequence[Chunk], chunk: Chunk
    ) -> dict[str, Any]:
        """Bring a chunk to where vLLM's workers read it; returns what they must know of it."""
        about = {
            "num_bytes": chunk.num_bytes,
            "tensors": describe_tensors(weights.specs, chunk),
        }
        if isinstance(weights, RemoteWeights):
            return about | {"place": weights.place(chunk.start, chunk.stop)}
        segment = self._segment_for(chunks)
        segment.write(weights, chunk)
        return about | {"path": segment.path}

    async def _send(self, update_info: dict[str, Any]) -> None:
        base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
        update = base.WeightTransferUpdateRequest(update_info=update_info)
        await self._llm.update_weights(update)

    def _segment_for(self, chunks: Sequence[Chunk]) -> WeightSegment:
        """The segment of the last update if it is large enough, else a new one."""
        needed = max(chunk.num_bytes for chunk in chunks)
        if self._segment is not None and self._segment.num_bytes >= needed:
            return self._segment
        if self._segment is not None:
            self._segment.close()
        self._segment = WeightSegment(needed)
        return self._segment


async def _last(answers: AsyncIterator[Any]) -> Any:
    """What a stream ends with."""
    last: Any = None
    async for answer in answers:
        last = answer
    return last


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group that is not a mere cancellation."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
