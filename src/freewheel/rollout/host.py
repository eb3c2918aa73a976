"""The serving side of one rollout: its token record, its deadline, its outcome.

Everything here runs on the serving loop, and nothing here waits for user code past the deadline.
`RolloutHost.run` turns every failure of a rollout into its outcome; only cancellation passes.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from freewheel.data.records import Message
from freewheel.errors import FailureClass, ReplicaLostError, RolloutError
from freewheel.rollout.batching import BatchingGenerator
from freewheel.rollout.calls import UserCodeError, after_waiting, notes
from freewheel.rollout.environment import Episode, SyncEpisode, Turn
from freewheel.rollout.loops import LoopBlockedError
from freewheel.rollout.rewards import RewardResult, check_reward
from freewheel.rollout.services import GroupPrompt, Services
from freewheel.rollout.tools import ToolCall, ToolResult, run_tool
from freewheel.rollout.transcript import Transcript
from freewheel.rollout.turn_sampling import same_distribution, turn_sampling
from freewheel.types import (
    Generation,
    GenerationRequest,
    GroupRequest,
    Member,
    Purpose,
    RolloutOutcome,
    Trajectory,
)

T = TypeVar("T")

_TIMER_S = 1e-3
"""How early a timer may fire."""
_ENGINE_FAULTS = (FailureClass.ENGINE, FailureClass.TIMEOUT)


class RolloutHost:
    """One member of a group under way.

    Args:
        request: of the group.
        member: this one.
        prompt: of the group.
        services: the worker's.
        generator: the engine.
        deadline: loop time at which the rollout fails with class `timeout`.
    """

    def __init__(
        self,
        request: GroupRequest,
        member: Member,
        *,
        prompt: GroupPrompt,
        services: Services,
        generator: BatchingGenerator,
        deadline: float,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.record = prompt.record
        self.purpose = request.purpose
        self.sample_id = member.sample_id
        self._request = request
        self._member = member
        self._prompt = prompt
        self._services = services
        self._generator = generator
        self._deadline = deadline
        self._transcript = Transcript(max_response_tokens=request.sampling.max_tokens)
        self._num_turns = 0
        self._began_s = self.loop.time()
        self._thread_wait_s = 0.0
        self._gen_s = 0.0
        self._reward_s = 0.0
        self._stages: list[tuple[str, float]] = []
        self._generating = False
        self._over = False
        self._fault: RolloutError | ReplicaLostError | None = None
        self._tool_errors: list[tuple[Exception, str]] = []
        self._operations: set[asyncio.Task[Any]] = set()

    async def run(self) -> RolloutOutcome:
        """Play the episode; every failure is an outcome."""
        try:
            with self._stage(f"in environment {self._services.environment.name}"):
                result = await self._play()
        except RolloutError as error:
            return self._failed(error.failure, str(error))
        except ReplicaLostError as error:
            return self._failed(FailureClass.LOST_REPLICA, str(error))
        finally:
            await self._end()
        return self._outcome(reward=result.reward, answer=result.answer)

    def trajectory(self, outcome: RolloutOutcome) -> Trajectory:
        """Token record of the finished rollout."""
        if outcome.reward is None:
            raise ValueError(f"rollout {self.sample_id} did not finish")
        return self._transcript.trajectory(
            sample_id=self.sample_id, group_id=self._request.group_id, reward=outcome.reward
        )

    async def generate(self, added: str | list[Message] | None, overrides: dict[str, Any]) -> Turn:
        """See `Episode.generate`."""
        self._check_open()
        if self._generating:
            raise RolloutError(
                FailureClass.ENVIRONMENT, "generate was called while it ran: turns are in order"
            )
        self._generating = True
        try:
            with self._stage(f"generating turn {self._num_turns}"):
                return await self._take_turn(added, overrides)
        except (RolloutError, ReplicaLostError) as error:
            if isinstance(error, ReplicaLostError) or error.failure in _ENGINE_FAULTS:
                # Environments tend to catch everything and return 0, which would train on it.
                self._fault = self._fault or error
            raise
        finally:
            self._generating = False

    async def add_text(self, text: str) -> bool:
        """See `Episode.add_text`."""
        self._check_open()
        self._open_prompt()
        token_ids = await self._services.render(self._services.renderer.text, text)
        return self._transcript.add_environment(token_ids)

    async def reward(self, text: str) -> RewardResult:
        """See `Episode.reward`."""
        self._check_open()
        reward, limit_s = self._services.reward, self._services.reward_timeout_s
        user_code, started = self._services.user_code, self.loop.time()
        try:
            with self._stage(f"in reward {reward.name}"), self._noting_blocks():
                async with asyncio.timeout(limit_s):
                    return await reward.score(
                        text, self.record, user_code, sample_id=self.sample_id
                    )
        except TimeoutError as error:
            raise RolloutError(
                FailureClass.TIMEOUT,
                f"reward {reward.name} did not return within rollout.reward_timeout_s="
                f"{limit_s:g}{notes(error)}",
            ) from error
        finally:
            self._reward_s += self.loop.time() - started

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """See `Episode.call_tool`."""
        self._check_open()
        services = self._services
        with self._stage(f"in tool {call.name}"), self._noting_blocks():
            result = await run_tool(
                call,
                services.user_code,
                default_timeout_s=services.tool_timeout_s,
                sample_id=self.sample_id,
            )
        if result.error is not None:
            self._tool_errors.append((result.error, call.name))
        return result

    @contextlib.contextmanager
    def _noting_blocks(self) -> Generator[None]:
        """A loop that was given up fails the rollout, whatever the environment makes of it."""
        try:
            yield
        except LoopBlockedError as error:
            self._fault = self._fault or error
            raise

    def submit(self, make: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Run one of the above from another thread. The episode's end cancels it.

        Raises:
            RolloutError: the worker is closed.
        """
        operation = self._operate(make)
        try:
            return asyncio.run_coroutine_threadsafe(operation, self.loop)
        except RuntimeError as error:
            operation.close()
            raise RolloutError(FailureClass.TIMEOUT, "the worker is closed") from error

    async def _operate(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check_open()
        task = asyncio.current_task()
        assert task is not None
        self._operations.add(task)
        try:
            return await make()
        finally:
            self._operations.discard(task)

    async def _play(self) -> RewardResult:
        try:
            async with asyncio.timeout_at(self._deadline):
                value = await self._run_environment()
        except TimeoutError as error:
            raise RolloutError(FailureClass.TIMEOUT, self._where(error)) from error
        except UserCodeError as error:
            if isinstance(error.error, RolloutError | ReplicaLostError):
                raise error.error from None
            raise RolloutError(
                FailureClass.ENVIRONMENT,
                f"environment {self._services.environment.name} raised {error}"
                f"{self._of_tool(error.error)}",
            ) from error.error
        if self._fault is not None:
            raise self._fault
        if not self._transcript.num_response_tokens:
            raise RolloutError(
                FailureClass.ENVIRONMENT,
                f"environment {self._services.environment.name} returned before the policy spoke",
            )
        if self.purpose is Purpose.TRAINING and not self._transcript.has_trained_tokens:
            raise RolloutError(
                FailureClass.ENVIRONMENT,
                f"environment {self._services.environment.name} sampled every turn with another "
                "temperature, top_p, top_k or min_p than rollout.* has: there is nothing to train "
                "on; set them there",
            )
        return check_reward(value, f"environment {self._services.environment.name}")

    def _of_tool(self, error: BaseException) -> str:
        names = [name for raised, name in self._tool_errors if raised is error]
        return f", in tool {names[0]}" if names else ""

    async def _run_environment(self) -> object:
        environment, user_code = self._services.environment, self._services.user_code
        if environment.is_ours:
            return await environment.make().run(Episode(self))
        name, sample_id = f"environment {environment.name}", self.sample_id
        if environment.is_async:
            return await user_code.run_async(
                name, lambda: environment.make().run(Episode(self)), sample_id=sample_id
            )
        asked_s = self.loop.time()

        def run() -> object:
            self._thread_wait_s = self.loop.time() - asked_s
            return environment.make().run(SyncEpisode(self))

        value = await user_code.run_sync("environment", name, run)
        if inspect.isawaitable(value):
            return await user_code.run_async(name, lambda: value, sample_id=sample_id)
        return value

    async def _take_turn(
        self, added: str | list[Message] | None, overrides: dict[str, Any]
    ) -> Turn:
        if not await self._open_turn(added):
            return Turn(text="", token_ids=(), finish_reason="length")
        sampling = turn_sampling(
            self._request.sampling,
            overrides,
            seed=self._member.seed + self._num_turns,
            num_tokens_left=self._transcript.num_tokens_left,
        )
        request = GenerationRequest(
            request_id=f"{self._request.request_id}/{self.sample_id}/{self._num_turns}",
            prompt_token_ids=self._transcript.token_ids(),
            sampling=sampling,
        )
        self._num_turns += 1
        started = self.loop.time()
        try:
            generation = await self._generator.generate(request)
        finally:
            self._gen_s += self.loop.time() - started
        self._accept(generation, is_trained=same_distribution(sampling, self._request.sampling))
        text = await self._services.render(self._services.renderer.decode, generation.token_ids)
        return Turn(
            text=text,
            token_ids=tuple(generation.token_ids.tolist()),
            finish_reason=generation.finish_reason,
        )

    async def _open_turn(self, added: str | list[Message] | None) -> bool:
        """Put what comes before the turn into the record. False: there is no room left."""
        renderer = self._services.renderer
        if added is None:
            self._open_prompt()
        elif not self._transcript.has_prompt:
            self._transcript.set_prompt(await self._services.render(renderer.prompt, added))
        else:
            last = self._transcript.last_token_id
            token_ids = await self._services.render(
                renderer.continuation, added, last_token_id=last
            )
            if not self._transcript.add_environment(token_ids):
                return False
        return self._transcript.num_tokens_left > 0

    def _open_prompt(self) -> None:
        if not self._transcript.has_prompt:
            self._transcript.set_prompt(self._prompt.token_ids)

    def _accept(self, generation: Generation, *, is_trained: bool) -> None:
        """Take a turn into the record, unless it was cut short."""
        if generation.finish_reason == "timeout":
            raise RolloutError(
                FailureClass.TIMEOUT,
                f"rollout {self.sample_id}: {self._stages[-1][0]} was cut after "
                f"{self._gen_s:.1f} s and {len(generation.token_ids)} tokens, the rest of its "
                f"{self._request.timeout_s:g} s being for the reward"
                f"{after_waiting(self._thread_wait_s)}",
            )
        if generation.finish_reason == "abort":
            raise RolloutError(
                FailureClass.ENGINE, f"request {generation.request_id} was aborted in the engine"
            )
        self._transcript.add_sampled(generation, is_trained=is_trained)

    @contextlib.contextmanager
    def _stage(self, name: str) -> Generator[None]:
        """What the rollout does, for the message when its time is over."""
        stage = (name, self.loop.time())
        self._stages.append(stage)
        try:
            yield
        finally:
            # When the time is over it stays: the message wants the stage that was cut.
            if self.loop.time() < self._deadline - _TIMER_S:
                self._stages.remove(stage)

    def _where(self, error: TimeoutError) -> str:
        name, since = self._stages[-1]
        spent_s = self.loop.time() - since
        return (
            f"rollout {self.sample_id} is past its {self._request.timeout_s:g} s: "
            f"{name} for {spent_s:.1f} s{notes(error)}"
        )

    def _check_open(self) -> None:
        if self._over:
            raise RolloutError(
                FailureClass.TIMEOUT, f"the episode of rollout {self.sample_id} is over"
            )

    async def _end(self) -> None:
        """Refuse what user code still asks for, and cancel what it left behind."""
        self._over = True
        operations = list(self._operations)
        for operation in operations:
            operation.cancel()
        if operations:
            # They are ours and end at once: nothing of user code runs in them.
            await asyncio.wait(operations)

    def _failed(self, failure: FailureClass, message: str) -> RolloutOutcome:
        return self._outcome(failure=failure, message=message)

    def _outcome(
        self,
        *,
        failure: FailureClass | None = None,
        message: str = "",
        reward: float | None = None,
        answer: str | None = None,
    ) -> RolloutOutcome:
        return RolloutOutcome(
            sample_id=self.sample_id,
            attempt=self._member.attempt,
            failure=failure,
            message=message,
            reward=reward,
            answer=answer,
            num_prompt_tokens=self._transcript.num_prompt_tokens,
            num_response_tokens=self._transcript.num_response_tokens,
            version_spans=self._transcript.version_spans(),
            finish_reason=self._transcript.finish_reason,
            gen_s=self._gen_s,
            reward_s=self._reward_s,
            wall_s=self.loop.time() - self._began_s,
        )
