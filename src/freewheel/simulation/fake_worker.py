"""A fake rollout worker: prompts, lengths, rewards, and the deadline of each member."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from freewheel.errors import (
    FailureClass,
    ReplicaLostError,
    RolloutError,
    RolloutWorkerLostError,
)
from freewheel.protocols import Replica
from freewheel.simulation.fake_replica import FakeReplica
from freewheel.simulation.settings import Failure
from freewheel.simulation.world import FakeProcess, FakeTrajectory, FakeWorld
from freewheel.types import (
    DatasetInfo,
    GroupRequest,
    GroupResult,
    Member,
    PromptInfo,
    Purpose,
    RolloutOutcome,
    Split,
    VersionSpans,
)


class FakeRolloutWorker(FakeProcess):
    """Runs fake rollouts: draws a length, generates, rewards."""

    def __init__(self, world: FakeWorld, worker_id: int, incarnation: int) -> None:
        super().__init__(world, f"rollout-worker-{worker_id}", RolloutWorkerLostError)
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._user_loop = 0
        self._blocked_loop = -1

    @property
    def worker_id(self) -> int:
        """Number of the worker."""
        return self._worker_id

    async def start(self) -> dict[Split, DatasetInfo]:
        """Take the start-up time."""
        settings = self._world.settings
        rng = self._world.rng("worker", self._incarnation)
        self._doom(rng, settings.faults.worker_deaths_per_s)
        seconds = self._world.jittered(settings.startup_s, "worker", self._incarnation)
        if not await self._come_up(seconds):
            raise RolloutWorkerLostError(f"rollout worker {self._worker_id} died at start")
        data = self._world.config.data
        return {
            split: DatasetInfo(num_prompts=num_prompts, fingerprint=split.value)
            for split, files, num_prompts in (
                (Split.TRAIN, data.train_files, settings.num_prompts),
                (Split.VALIDATION, data.val_files, settings.num_val_prompts),
            )
            if files
        }

    async def prepare(self, split: Split, indices: Sequence[int]) -> list[PromptInfo]:
        """Prompts of 10 tokens each, some over-long."""
        if not await self._live(self._world.settings.prepare_s):
            raise RolloutWorkerLostError(f"rollout worker {self._worker_id} died")
        return [self._prompt(split, index) for index in indices]

    def _prompt(self, split: Split, index: int) -> PromptInfo:
        chance = self._world.settings.faults.over_long_prompt
        over_long = chance > 0 and self._world.rng("prompt", split, index).random() < chance
        return PromptInfo(
            prompt_index=index,
            num_prompt_tokens=10_000 if over_long else 10,
            failure=FailureClass.OVER_LONG_PROMPT if over_long else None,
            message="10000 tokens" if over_long else "",
        )

    async def run_group(self, request: GroupRequest, replica: Replica) -> GroupResult:
        """All members at once; each ends as an outcome."""
        if not isinstance(replica, FakeReplica):
            raise TypeError(f"a fake worker runs on fake replicas, not on {replica!r}")
        if replica.is_dead:
            raise ReplicaLostError(f"replica {replica.replica_id} was dead before the request")
        outcomes = await self._run_members(request, replica)
        payload = [
            FakeTrajectory(
                sample_id=outcome.sample_id,
                group_id=request.group_id,
                prompt_index=request.prompt_index,
                reward=outcome.reward or 0.0,
                version_spans=outcome.version_spans,
            )
            for outcome in outcomes
            if outcome.failure is None
        ]
        wanted = payload if request.purpose is Purpose.TRAINING else None
        return GroupResult(request_id=request.request_id, outcomes=outcomes, payload=wanted)

    async def _run_members(
        self, request: GroupRequest, replica: FakeReplica
    ) -> tuple[RolloutOutcome, ...]:
        tasks: list[asyncio.Task[RolloutOutcome]] = []

        def end() -> None:
            for task in tasks:
                task.cancel()

        self._when_dead[end] = None
        try:
            async with asyncio.TaskGroup() as members:
                for member in request.members:
                    run = self._run_member(request, member, replica)
                    tasks.append(members.create_task(run, name=f"rollout {member.sample_id}"))
            if not await self._answer():
                raise RolloutWorkerLostError(f"rollout worker {self._worker_id} died")
        finally:
            del self._when_dead[end]
        return tuple(task.result() for task in tasks)

    async def _run_member(
        self, request: GroupRequest, member: Member, replica: FakeReplica
    ) -> RolloutOutcome:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        outcome = await self._play_member(request, member, replica)
        return replace(outcome, wall_s=loop.time() - began_s)

    async def _play_member(
        self, request: GroupRequest, member: Member, replica: FakeReplica
    ) -> RolloutOutcome:
        began_s = asyncio.get_running_loop().time()
        rng = self._world.rng(member.sample_id, member.attempt)
        spans: VersionSpans = ()
        try:
            async with asyncio.timeout(request.timeout_s):
                spans = await self._run_environment(request, replica, rng)
        except TimeoutError:
            self._user_loop = self._blocked_loop + 1
            return self._outcome(member, FailureClass.TIMEOUT, f"{request.timeout_s:g} s are over")
        except ReplicaLostError as error:
            return self._outcome(member, FailureClass.LOST_REPLICA, str(error))
        except RolloutError as error:
            return self._outcome(member, error.failure, str(error))
        return RolloutOutcome(
            sample_id=member.sample_id,
            attempt=member.attempt,
            reward=float(rng.random() < 0.5),
            answer=str(rng.randrange(3)),
            num_prompt_tokens=10,
            num_response_tokens=sum(tokens for _, tokens in spans),
            version_spans=spans,
            finish_reason="stop",
            gen_s=asyncio.get_running_loop().time() - began_s,
        )

    async def _run_environment(
        self, request: GroupRequest, replica: FakeReplica, rng: random.Random
    ) -> VersionSpans:
        settings, faults = self._world.settings, self._world.settings.faults
        num_tokens = self._world.lengths.draw(rng, request.sampling.max_tokens)
        fate, loop_number = rng.random(), self._user_loop
        await self._user_code(loop_number, "environment_begins")
        spans = await self._generate(request, replica, num_tokens)
        await self._user_code(loop_number, "environment_ends", "tool")
        if request.purpose is Purpose.VALIDATION:
            await self._user_code(loop_number, "trial")
        if fate < faults.hang:
            await asyncio.Event().wait()
        if fate < faults.hang + faults.environment:
            raise RolloutError(FailureClass.ENVIRONMENT, "the environment raised ValueError")
        await self._user_code(loop_number, "reward")
        await self._live(settings.reward_s)
        return spans

    async def _generate(
        self, request: GroupRequest, replica: FakeReplica, num_tokens: int
    ) -> VersionSpans:
        """Sample; the replica does not hear of this process's death, and goes on."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            return await replica.generate(num_tokens)
        except asyncio.CancelledError:
            num_sampled = int((loop.time() - began_s) * self._world.settings.tokens_per_s)
            if self.is_dead and not replica.is_dead and num_sampled < num_tokens:
                replica.leave(request.request_id, num_tokens - num_sampled)
            raise

    async def _user_code(self, loop_number: int, *points: str) -> None:
        """Stand still if the injected failure strikes here, or has blocked this loop."""
        struck = [point for point in points if self._world.injector.strikes(point)]
        if struck and self._world.injector.is_due(Failure.ENVIRONMENT_BLOCKS_LOOP):
            self._blocked_loop = loop_number
        if struck or loop_number == self._blocked_loop:
            await asyncio.Event().wait()

    @staticmethod
    def _outcome(member: Member, failure: FailureClass, message: str) -> RolloutOutcome:
        return RolloutOutcome(
            sample_id=member.sample_id, attempt=member.attempt, failure=failure, message=message
        )
