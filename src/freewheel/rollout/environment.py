"""What a user's environment sees: one episode, its turns and its reward.

An environment is a class whose constructor takes no arguments; each rollout gets an instance. Its
`run` plays one episode and returns the reward. An async `run` is on an event loop for user code, a
sync one in a thread: neither can hold up other rollouts, and past its deadline neither is waited
for. A `run` looks like this::

    async def run(self, episode: Episode) -> float | RewardResult:
        turn = await episode.generate()
        while call := find_tool_call(turn.text):
            result = await episode.call_tool(use_tool, call)
            turn = await episode.generate([{"role": "tool", "content": result}])
        return await episode.reward(turn.text)
"""

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, TypeVarTuple, overload

from freewheel.data.records import Message, PromptRecord, nearest
from freewheel.errors import ConfigError, FailureClass, RolloutError
from freewheel.rollout.rewards import RewardResult
from freewheel.rollout.tools import ToolCall, ToolResult
from freewheel.rollout.usercode import import_object, is_async
from freewheel.types import Purpose

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy said in one turn.

    `text` is without special tokens. `finish_reason` is `stop`, or `length` when the response's
    limit is reached; past it further turns are empty.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


class EpisodeHost(Protocol):
    """The serving side of an episode. Its coroutines run on `loop` only."""

    loop: asyncio.AbstractEventLoop
    record: PromptRecord
    purpose: Purpose
    sample_id: str

    async def generate(self, added: str | list[Message] | None, overrides: dict[str, Any]) -> Turn:
        """Add to the record and sample a turn."""
        ...

    async def reward(self, text: str) -> RewardResult:
        """Call the reward function."""
        ...

    async def add_text(self, text: str) -> bool:
        """Add text to the record."""
        ...

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """Call a tool off the environment's loop or thread."""
        ...

    def submit(self, make: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Run one of these on `loop`, from any thread."""
        ...


class _EpisodeFacts:
    def __init__(self, host: EpisodeHost) -> None:
        self._host = host

    @property
    def prompt(self) -> PromptRecord:
        """The row of the data."""
        return self._host.record

    @property
    def ground_truth(self) -> Any:  # whatever the data holds
        """What the reward compares with."""
        return self._host.record.ground_truth

    @property
    def extra(self) -> dict[str, Any]:
        """The row's other columns."""
        return self._host.record.extra

    @property
    def purpose(self) -> Purpose:
        """Training or validation."""
        return self._host.purpose

    @property
    def sample_id(self) -> str:
        """Id of the rollout."""
        return self._host.sample_id


class Episode(_EpisodeFacts):
    """One rollout as an async environment sees it. Its methods may be awaited on any event loop."""

    async def generate(
        self,
        messages: str | list[Message] | None = None,
        **sampling: Any,  # fields of SamplingParams
    ) -> Turn:
        """Let the policy speak.

        Args:
            messages: in the first turn, the prompt in place of the data's. Later, what the
                environment adds before the policy speaks again: chat messages, or a text (one user
                message under a chat template, plain text without). None: nothing.
            **sampling: fields of `SamplingParams` in place of the configuration's, for this turn. A
                turn with another temperature, top_p, top_k or min_p is not trained on, as the
                trainer's logprobs are under the configuration's.

        Raises:
            RolloutError: the prompt or an argument cannot be used, the engine failed, or the
                episode is over.
            ReplicaLostError: the replica's process is gone.
        """
        return await self._call(lambda: self._host.generate(messages, sampling))

    async def add_text(self, text: str) -> bool:
        """Append text as it stands to the response, such as a tool's result within a turn.

        Returns:
            False when it does not fit any more; nothing is appended then.
        """
        return await self._call(lambda: self._host.add_text(text))

    async def reward(self, text: str) -> RewardResult:
        """What the configured reward function says of a response.

        Raises:
            RolloutError: the function raised, returned no finite number (class `reward`), or took
                too long (`timeout`).
        """
        return await self._call(lambda: self._host.reward(text))

    @overload
    async def call_tool(
        self,
        function: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> T: ...

    @overload
    async def call_tool(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> T: ...

    async def call_tool(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Call a tool, in time, where it cannot hold up this environment or others.

        Args:
            function: a sync function, which runs in a thread, or an async one, which runs on a
                loop for tools. Either may use the episode's methods of its kind.
            *args: its arguments; `functools.partial` passes keyword arguments.
            name: of the tool in messages; None: the function's.
            timeout_s: limit in seconds; None: `rollout.tool_timeout_s`.

        Returns:
            What the function returns.

        Raises:
            ToolTimeoutError: it did not return in time. Uncaught, the rollout fails with class
                `timeout`.
            Exception: what the function raised, as it is. Uncaught, the rollout fails with class
                `environment`, and the message names the tool.
        """
        call = ToolCall.of(function, args, name, timeout_s)
        return (await self._call(lambda: self._host.call_tool(call))).unpack()

    async def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if asyncio.get_running_loop() is self._host.loop:
            return await make()
        return await asyncio.wrap_future(self._host.submit(make))


class SyncEpisode(_EpisodeFacts):
    """One rollout as an environment with a sync `run` sees it: as `Episode`, without `await`."""

    def generate(
        self,
        messages: str | list[Message] | None = None,
        **sampling: Any,  # fields of SamplingParams
    ) -> Turn:
        """See `Episode.generate`."""
        return self._call(lambda: self._host.generate(messages, sampling))

    def add_text(self, text: str) -> bool:
        """See `Episode.add_text`."""
        return self._call(lambda: self._host.add_text(text))

    def reward(self, text: str) -> RewardResult:
        """See `Episode.reward`."""
        return self._call(lambda: self._host.reward(text))

    @overload
    def call_tool(
        self,
        function: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> T: ...

    @overload
    def call_tool(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> T: ...

    def call_tool(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """See `Episode.call_tool`. Blocks this environment's thread until the tool returns."""
        call = ToolCall.of(function, args, name, timeout_s)
        return self._call(lambda: self._host.call_tool(call)).unpack()

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        # Blocks a thread of the pool, which is what it is for; never one that runs a loop.
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise RolloutError(
                FailureClass.ENVIRONMENT, "a sync `run` must not use the episode on an event loop"
            )
        try:
            return self._host.submit(make).result()
        except concurrent.futures.CancelledError as error:
            raise RolloutError(FailureClass.TIMEOUT, "the episode is over") from error


class Environment(Protocol):
    """An environment. `run` may be sync as well; it gets a `SyncEpisode` then."""

    async def run(self, episode: Episode) -> float | RewardResult:
        """Play one episode; returns its reward."""
        ...


class SingleTurn:
    """The built-in environment: one response to the prompt, and its reward."""

    async def run(self, episode: Episode) -> RewardResult:
        """Play one episode."""
        turn = await episode.generate()
        return await episode.reward(turn.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentType:
    """An environment class, checked. `make` builds an instance; user code, unless it is ours."""

    name: str
    make: Callable[[], Any]
    is_async: bool
    is_ours: bool


def load_environment(spec: str) -> EnvironmentType:
    """The environment that `rollout.environment` names.

    Raises:
        ConfigError: no such name, module or class, or it has no `run`.
    """
    if spec == "single_turn":
        return EnvironmentType(name=spec, make=SingleTurn, is_async=True, is_ours=True)
    key = "rollout.environment"
    if ":" not in spec:
        raise ConfigError(
            f"{key}={spec!r}: single_turn or module:Class wanted{nearest(spec, ['single_turn'])}"
        )
    found = import_object(spec, key)
    run = getattr(found, "run", None)
    if not isinstance(found, type) or not callable(run):
        raise ConfigError(
            f"{key}={spec!r}: a class with a method `run(self, episode)` wanted, found "
            f"{type(found).__name__} {getattr(found, '__name__', found)!r}"
            f"{'' if callable(run) else ' without `run`'}"
        )
    return EnvironmentType(name=spec, make=found, is_async=is_async(run), is_ours=False)
