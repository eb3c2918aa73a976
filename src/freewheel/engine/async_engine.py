"""The engine behind asyncio: one named thread computes, the event loop is never blocked.

Commands go to the thread through a queue that never blocks its writers; answers come back by
`call_soon_threadsafe`. Between two commands the thread steps the engine while it has work. If it
dies, of whatever cause, every call that waits and every later one raises `ReplicaLostError`.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from freewheel.config.sections import Config
from freewheel.engine.loading import load_model
from freewheel.engine.request import FinishReason
from freewheel.engine.torch_engine import NO_WEIGHTS, TorchEngine
from freewheel.errors import (
    FailureClass,
    FreewheelError,
    ReplicaLostError,
    RolloutError,
    StartupError,
)
from freewheel.types import Generation, GenerationRequest, ReplicaStats
from freewheel.weights import WeightBundle


@dataclass(slots=True, eq=False, kw_only=True)
class _Generate:
    """A call in flight. After it is posted only the engine's thread touches `results`."""

    requests: Sequence[GenerationRequest]
    future: "asyncio.Future[Any]"
    results: dict[str, Generation] = field(default_factory=dict[str, Generation])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abort:
    request_ids: Sequence[str]
    reason: FinishReason
    future: "asyncio.Future[Any] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    version: int
    bundle: WeightBundle
    future: "asyncio.Future[Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    future: "asyncio.Future[Any] | None" = None


_Command: TypeAlias = _Generate | _Abort | _Update | _Stop


class AsyncEngine:
    """See the module. All methods but `close` are for the loop on which `start` ran.

    Args:
        config: as for `TorchEngine`.
        model_path: folder of a Hugging Face causal LM; its weights are not read.
        stop_timeout_s: how long `close` waits for the thread, and a call past its deadline for its
            partial results: at most one step is computed meanwhile.
    """

    def __init__(self, config: Config, model_path: Path, *, stop_timeout_s: float = 30.0) -> None:
        self._config = config
        self._model_path = model_path
        self._stop_timeout_s = stop_timeout_s
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._calls: dict[str, _Generate] = {}
        self._engine: TorchEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: ReplicaLostError | None = None
        self._stats = ReplicaStats(
            version=NO_WEIGHTS, num_running=0, num_waiting=0, num_generated_tokens=0
        )
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Build the model's structure in the engine's thread.

        Raises:
            ConfigError: the model or the limits cannot be used.
            StartupError: anything else that went wrong.
        """
        self._loop = asyncio.get_running_loop()
        ready = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._main, args=(ready,), name="freewheel-engine", daemon=True
        )
        self._thread.start()
        await ready

    async def generate(
        self, requests: Sequence[GenerationRequest], *, timeout_s: float
    ) -> list[Generation]:
        """Sample a response for each request, in order.

        At `timeout_s` what is unfinished comes back with reason `timeout` and its tokens so far.
        Cancelling the call aborts its requests.

        Raises:
            RolloutError: a request was refused (`over_long_prompt`, `bad_prompt`), or the model
                gave logits that are not finite (`engine`).
            ConfigError: sampling parameters that cannot be used, or a tokenizer, needed for stop
                strings, that cannot be loaded.
            ReplicaLostError: the engine's thread has ended.
        """
        engine = self._alive()
        for request in requests:
            engine.check(request)
        if not requests:
            return []
        if engine.lacks_tokenizer(requests):
            await asyncio.to_thread(engine.load_tokenizer)  # others decode meanwhile
        call = _Generate(requests=requests, future=self._future())
        self._post(call)
        try:
            return await self._finished(call, timeout_s)
        except asyncio.CancelledError:
            call.future.cancel()
            self._post_abort(call, "abort")
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their calls get what there is. Unknown ids are ignored."""
        self._alive()
        ended = self._future()
        self._post(_Abort(request_ids=request_ids, reason="abort", future=ended))
        await ended

    async def update_weights(self, version: int, bundle: WeightBundle) -> None:
        """Activate weights between two tokens; returns when every later token is under them.

        Raises:
            InvariantError: the bundle does not fit the model; the old weights stay.
            ReplicaLostError: the engine's thread has ended.
        """
        self._alive()
        command = _Update(version=version, bundle=bundle, future=self._future())
        self._post(command)
        await command.future

    def stats(self) -> ReplicaStats:
        """Counters as of the last step.

        Raises:
            ReplicaLostError: the engine's thread has ended.
        """
        self._alive()
        return self._stats

    def close(self) -> None:
        """End the thread after its current step, waiting for it. Idempotent.

        Not for an event loop, which it would block: there, use `aclose`.
        """
        if self._thread is None:
            return
        self._commands.put(_Stop())
        if self._thread is not threading.current_thread():
            self._thread.join(self._stop_timeout_s)

    async def aclose(self) -> None:
        """End the thread after its current step, without blocking the loop. Idempotent.

        Raises:
            ReplicaLostError: the thread is still in a step after `stop_timeout_s`.
        """
        if self._thread is None or self._error is not None:
            return
        command = _Stop(future=self._future())
        self._post(command)
        assert command.future is not None
        done, _ = await asyncio.wait([command.future], timeout=self._stop_timeout_s)
        if not done:
            raise ReplicaLostError(f"engine: still in a step {self._stop_timeout_s} s after close")

    async def _finished(self, call: _Generate, timeout_s: float) -> list[Generation]:
        """Wait for a call; past its deadline, take back what is unfinished."""
        done, _ = await asyncio.wait([call.future], timeout=timeout_s)
        if not done:
            self._post_abort(call, "timeout")
            done, _ = await asyncio.wait([call.future], timeout=self._stop_timeout_s)
        if not done:
            call.future.cancel()
            raise RolloutError(
                FailureClass.ENGINE,
                f"engine: no answer {self._stop_timeout_s} s past the deadline of {timeout_s} s "
                f"(request {call.requests[0].request_id} and {len(call.requests) - 1} more)",
            )
        return call.future.result()

    def _post_abort(self, call: _Generate, reason: FinishReason) -> None:
        ids = [request.request_id for request in call.requests]
        self._commands.put(_Abort(request_ids=ids, reason=reason))

    def _post(self, command: _Command) -> None:
        """Hand a command to the thread, which either runs it or fails it on its way out."""
        self._commands.put(command)
        if self._error is not None:
            self._fail_commands(self._error)

    def _alive(self) -> TorchEngine:
        if self._error is not None:
            raise ReplicaLostError(str(self._error)) from self._error
        if self._engine is None:
            raise ReplicaLostError("engine: not started")
        return self._engine

    def _future(self) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().create_future()

    # What follows runs in the engine's thread.

    def _main(self, ready: "asyncio.Future[Any]") -> None:
        try:
            model = load_model(self._config, self._model_path)
            torch.set_num_threads(model.num_useful_threads(self._config.rollout.num_threads))
            engine = TorchEngine(self._config, model)
        except BaseException as error:  # noqa: BLE001  # whatever it is, `start` must not hang
            self._error = _lost(error)
            self._reject(ready, error if isinstance(error, FreewheelError) else _not_up(error))
            return
        self._engine = engine
        self._resolve(ready, None)
        stop = _Stop()
        try:
            stop = self._serve(engine)
            self._error = ReplicaLostError("engine: closed")
        except BaseException as error:  # noqa: BLE001  # whatever it is, no caller may hang
            self._error = _lost(error)
        for call in self._calls.values():
            self._reject(call.future, self._error)
        self._fail_commands(self._error)
        self._resolve(stop.future, None)

    def _serve(self, engine: TorchEngine) -> _Stop:
        """Take commands and step until told to stop.

        Consumes: commands. Produces: results. Waits for: a command, when there is no work.
        Unblocked by: any call, or `close`.
        """
        while True:
            try:
                command = self._commands.get(block=engine.is_settled and not engine.can_step)
            except queue.Empty:
                if not engine.can_step:
                    engine.settle()
                    continue
                ended = engine.step()
                # First the counters, then the results: whoever has the results sees them counted.
                self._stats = engine.stats()
                self._deliver(ended)
                continue
            if isinstance(command, _Stop):
                return command
            self._run(engine, command)
            del command  # the weights that it brought, too: the wait for the next may be long

    def _run(self, engine: TorchEngine, command: _Generate | _Abort | _Update) -> None:
        """Run one command; an error of ours is its caller's, any other one ends the thread."""
        try:
            match command:
                case _Generate():
                    self._take(engine, command)
                    return
                case _Abort():
                    ended = engine.abort(command.request_ids, command.reason)
                    self._stats = engine.stats()
                    self._deliver(ended)
                case _Update():
                    engine.update_weights(command.version, command.bundle)
                    self._stats = engine.stats()
        except FreewheelError as error:
            self._reject(command.future, error)
        except BaseException as error:
            self._reject(command.future, _lost(error))
            raise
        else:
            self._resolve(command.future, None)

    def _take(self, engine: TorchEngine, call: _Generate) -> None:
        """Add the requests of a call, all or none."""
        added: list[str] = []
        try:
            for request in call.requests:
                engine.add(request)
                added.append(request.request_id)
        except FreewheelError:
            engine.abort(added)
            raise
        self._calls.update(dict.fromkeys(added, call))
        self._stats = engine.stats()

    def _deliver(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            call = self._calls.pop(generation.request_id)
            call.results[generation.request_id] = generation
            if len(call.results) == len(call.requests):
                self._complete(call)

    def _complete(self, call: _Generate) -> None:
        results = [call.results[request.request_id] for request in call.requests]
        broken = [result.request_id for result in results if result.finish_reason == "error"]
        if broken:
            message = f"engine: logits are not finite (request {broken[0]}, {len(broken)} in all)"
            self._reject(call.future, RolloutError(FailureClass.ENGINE, message))
        else:
            self._resolve(call.future, results)

    def _fail_commands(self, error: ReplicaLostError) -> None:
        """Refuse every command that is still in the queue."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, _Stop):
                    self._resolve(command.future, None)
                else:
                    self._reject(command.future, error)

    def _resolve(self, future: "asyncio.Future[Any] | None", value: object) -> None:
        self._on_loop(_set_result, future, value)

    def _reject(self, future: "asyncio.Future[Any] | None", error: BaseException) -> None:
        self._on_loop(_set_error, future, error)

    def _on_loop(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        # A closed loop has no one left who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


def _set_result(future: "asyncio.Future[Any] | None", value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _set_error(future: "asyncio.Future[Any] | None", error: BaseException) -> None:
    if future is not None and not future.done():
        future.set_exception(error)


def _lost(error: BaseException) -> ReplicaLostError:
    lost = ReplicaLostError(f"engine: its thread ended: {type(error).__name__}: {error}")
    lost.__cause__ = error
    return lost


def _not_up(error: BaseException) -> StartupError:
    failed = StartupError(f"engine: did not come up: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
