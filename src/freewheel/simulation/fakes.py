"""Fake replicas, rollout workers and trainer on the virtual clock.

They keep the promises of `freewheel.protocols`: tokens carry the version that was active when they
were sampled, a dead process raises the matching error, cancelling a call ends it. The fake
trainer's "weights" are a digest of everything it was trained on, in order.
"""

import asyncio
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freewheel.config.sections import Config
from freewheel.control.rollouter import derive_seed
from freewheel.errors import (
    CheckpointError,
    FailureClass,
    InvariantError,
    ReplicaLostError,
    RolloutError,
    RolloutWorkerLostError,
)
from freewheel.protocols import Replica, RolloutWorker, Trainer
from freewheel.simulation.settings import SimSettings
from freewheel.types import (
    DatasetInfo,
    GroupRequest,
    GroupResult,
    Member,
    PromptInfo,
    Purpose,
    Ref,
    ReplicaStats,
    RolloutOutcome,
    Split,
    TrainerInfo,
    TrainRequest,
    TrainResult,
    VersionSpans,
    Weights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTrajectory:
    """What a finished fake rollout leaves for the trainer."""

    sample_id: str
    group_id: int
    prompt_index: int
    reward: float
    version_spans: VersionSpans


@dataclass(slots=True, kw_only=True)
class FakeDisk:
    """What survives a run: trainer states and trajectories by folder."""

    states: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


class FakeBackend:
    """Backend over fakes. Holds all of them, so that tests can look and injure."""

    def __init__(self, config: Config, settings: SimSettings, disk: FakeDisk) -> None:
        self.config = config
        self.settings = settings
        self.disk = disk
        self.lengths = settings.lengths.sampler()
        self.replicas: dict[int, FakeReplica] = {}
        self.workers: dict[int, FakeRolloutWorker] = {}
        self.fake_trainer: FakeTrainer | None = None
        self._incarnations = 0

    async def start(self) -> None:
        """Nothing to connect to."""
        await asyncio.sleep(0)

    def replica(self, replica_id: int) -> Replica:
        """A new fake replica."""
        self._incarnations += 1
        self.replicas[replica_id] = FakeReplica(self, replica_id, self._incarnations)
        return self.replicas[replica_id]

    def rollout_worker(self, worker_id: int) -> RolloutWorker:
        """A new fake rollout worker."""
        self._incarnations += 1
        self.workers[worker_id] = FakeRolloutWorker(self, worker_id, self._incarnations)
        return self.workers[worker_id]

    def trainer(self) -> Trainer:
        """A new fake trainer."""
        self.fake_trainer = FakeTrainer(self)
        return self.fake_trainer

    async def aclose(self) -> None:
        """Nothing to close."""

    def rng(self, *parts: int | str) -> random.Random:
        """A generator of random numbers of its own for each use, so that order does not matter."""
        return random.Random(derive_seed(self.settings.seed, *parts))

    def jittered(self, seconds: float, *parts: int | str) -> float:
        """A duration with the settings' relative jitter."""
        spread = self.settings.jitter
        return seconds * self.rng("jitter", *parts).uniform(1 - spread, 1 + spread)


class _Mortal:
    """Something that can die: its calls then raise."""

    waiting_for = ""

    def __init__(self) -> None:
        self._died = asyncio.Event()
        self._lives_until_s: float | None = None

    def _doom(self, rng: random.Random, deaths_per_s: float) -> None:
        if deaths_per_s > 0:
            now_s = asyncio.get_running_loop().time()
            self._lives_until_s = now_s + rng.expovariate(deaths_per_s)

    async def _live(self, seconds: float) -> bool:
        """Spend time; False if death came first."""
        now_s = asyncio.get_running_loop().time()
        if self._lives_until_s is not None and now_s + seconds >= self._lives_until_s:
            seconds = max(0.0, self._lives_until_s - now_s)
            await self._sleep_or_die(seconds)
            self._died.set()
        else:
            await self._sleep_or_die(seconds)
        return not self._died.is_set()

    async def _sleep_or_die(self, seconds: float) -> None:
        if self._died.is_set():
            return
        try:
            async with asyncio.timeout(seconds):
                await self._died.wait()
        except TimeoutError:
            pass

    @property
    def is_dead(self) -> bool:
        """True once it died."""
        return self._died.is_set()

    def kill(self) -> None:
        """Die now. Idempotent."""
        self._died.set()


class FakeReplica(_Mortal):
    """An engine that samples at a fixed rate a request, under whatever version is active."""

    def __init__(self, backend: FakeBackend, replica_id: int, incarnation: int) -> None:
        super().__init__()
        self._backend = backend
        self._replica_id = replica_id
        self._incarnation = incarnation
        self._history: list[tuple[float, int]] = []
        self._num_tokens = 0
        self._num_running = 0
        self._began_s: list[float] = []
        self.num_updates = 0

    @property
    def replica_id(self) -> int:
        """Number of the replica."""
        return self._replica_id

    @property
    def version(self) -> int:
        """Active version, -1 before the first."""
        return self._history[-1][1] if self._history else -1

    async def start(self) -> None:
        """Take the start-up time."""
        settings = self._backend.settings
        rng = self._backend.rng("replica", self._incarnation)
        self._doom(rng, settings.faults.replica_deaths_per_s)
        seconds = self._backend.jittered(settings.startup_s, "replica", self._incarnation)
        if not await self._live(seconds):
            raise ReplicaLostError(f"replica {self._replica_id} died at start")

    async def update_weights(self, weights: Weights) -> None:
        """Take the loading time, then activate."""
        settings = self._backend.settings
        key = ("update", self._incarnation, self.num_updates)
        self.num_updates += 1
        if self._backend.rng(*key).random() < settings.faults.update_death:
            self._died.set()
        if not await self._live(self._backend.jittered(settings.update_s, *key)):
            raise ReplicaLostError(
                f"replica {self._replica_id} died while it loaded version {weights.version}"
            )
        self._activate(weights.version)

    def _activate(self, version: int) -> None:
        """Note the moment; forget versions that ended before anything that still runs began."""
        now_s = asyncio.get_running_loop().time()
        self._history.append((now_s, version))
        oldest_s = min(self._began_s, default=now_s)
        while len(self._history) > 1 and self._history[1][0] <= oldest_s:
            del self._history[0]

    async def generate(self, num_tokens: int) -> VersionSpans:
        """Sample so many tokens; their versions, by the moments of activation."""
        if not self._history:
            raise InvariantError(f"replica {self._replica_id} has no weights to serve")
        rate = self._backend.settings.tokens_per_s
        began_s = asyncio.get_running_loop().time()
        self._num_running += 1
        self._began_s.append(began_s)
        try:
            alive = await self._live(num_tokens / rate)
        finally:
            self._num_running -= 1
            self._began_s.remove(began_s)
        if not alive:
            raise ReplicaLostError(f"replica {self._replica_id} died")
        self._num_tokens += num_tokens
        return self._spans(began_s, num_tokens, rate)

    def _spans(self, began_s: float, num_tokens: int, rate: float) -> VersionSpans:
        spans: list[tuple[int, int]] = []
        num_before = 0
        for index, (_, version) in enumerate(self._history):
            is_last = index + 1 == len(self._history)
            ends_s = float("inf") if is_last else self._history[index + 1][0]
            if ends_s <= began_s:
                continue
            until = num_tokens if is_last else min(num_tokens, int((ends_s - began_s) * rate))
            if until > num_before:
                spans.append((version, until - num_before))
                num_before = until
        return tuple(spans)

    async def stats(self) -> ReplicaStats:
        """Counters."""
        return ReplicaStats(
            version=self.version,
            num_running=self._num_running,
            num_waiting=0,
            num_generated_tokens=self._num_tokens,
        )


class FakeRolloutWorker(_Mortal):
    """Runs fake rollouts: draws a length, generates, rewards."""

    def __init__(self, backend: FakeBackend, worker_id: int, incarnation: int) -> None:
        super().__init__()
        self._backend = backend
        self._worker_id = worker_id
        self._incarnation = incarnation

    @property
    def worker_id(self) -> int:
        """Number of the worker."""
        return self._worker_id

    async def start(self) -> dict[Split, DatasetInfo]:
        """Take the start-up time."""
        settings = self._backend.settings
        rng = self._backend.rng("worker", self._incarnation)
        self._doom(rng, settings.faults.worker_deaths_per_s)
        seconds = self._backend.jittered(settings.startup_s, "worker", self._incarnation)
        if not await self._live(seconds):
            raise RolloutWorkerLostError(f"rollout worker {self._worker_id} died at start")
        return {
            Split.TRAIN: DatasetInfo(num_prompts=settings.num_prompts, fingerprint="train"),
            Split.VALIDATION: DatasetInfo(num_prompts=settings.num_val_prompts, fingerprint="val"),
        }

    async def prepare(self, split: Split, indices: Sequence[int]) -> list[PromptInfo]:
        """Prompts of 10 tokens each, some over-long."""
        if not await self._live(self._backend.settings.prepare_s):
            raise RolloutWorkerLostError(f"rollout worker {self._worker_id} died")
        return [self._prompt(split, index) for index in indices]

    def _prompt(self, split: Split, index: int) -> PromptInfo:
        chance = self._backend.settings.faults.over_long_prompt
        over_long = self._backend.rng("prompt", split, index).random() < chance
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
        async with asyncio.TaskGroup() as members:
            tasks = [
                members.create_task(self._run_member(request, member, replica))
                for member in request.members
            ]
        if self._died.is_set():
            raise RolloutWorkerLostError(f"rollout worker {self._worker_id} died")
        outcomes = tuple(task.result() for task in tasks)
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

    async def _run_member(
        self, request: GroupRequest, member: Member, replica: FakeReplica
    ) -> RolloutOutcome:
        began_s = asyncio.get_running_loop().time()
        rng = self._backend.rng(member.sample_id, member.attempt)
        spans: VersionSpans = ()
        try:
            async with asyncio.timeout(request.timeout_s):
                spans = await self._run_environment(request, replica, rng)
        except TimeoutError:
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
        settings, faults = self._backend.settings, self._backend.settings.faults
        num_tokens = self._backend.lengths.draw(rng, request.sampling.max_tokens)
        fate = rng.random()
        spans = await replica.generate(num_tokens)
        if fate < faults.hang:
            await asyncio.Event().wait()
        if fate < faults.hang + faults.environment:
            raise RolloutError(FailureClass.ENVIRONMENT, "the environment raised ValueError")
        await self._live(settings.reward_s)
        return spans

    @staticmethod
    def _outcome(member: Member, failure: FailureClass, message: str) -> RolloutOutcome:
        return RolloutOutcome(
            sample_id=member.sample_id, attempt=member.attempt, failure=failure, message=message
        )


class FakeTrainer(_Mortal):
    """Digests what it is trained on; remembers every trained trajectory."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__()
        self.trained: list[tuple[int, int, FakeTrajectory]] = []
        self.digest = "initial"
        self._backend = backend
        self._step = 0
        self._copies: dict[int, dict[str, Any]] = {}
        self._restored: Weights | None = None

    async def start(self, checkpoint: Path | None) -> TrainerInfo:
        """Take the start-up time; load a state of the disk."""
        await asyncio.sleep(self._backend.jittered(self._backend.settings.startup_s, "trainer"))
        if checkpoint is not None:
            state = self._state(checkpoint)
            self.digest, self._step = state["digest"], state["step"]
            self._restored = state["published"]
        return TrainerInfo(step=self._step, num_parameters=1, device="virtual")

    async def train_step(self, request: TrainRequest) -> TrainResult:
        """Take the step's time; digest the trajectories."""
        settings = self._backend.settings
        seconds = self._backend.jittered(settings.train_step_s, "step", request.step)
        await asyncio.sleep(seconds)
        for payload in request.payloads:
            for trajectory in payload:
                self.trained.append((request.step, request.policy_version, trajectory))
                text = f"{self.digest}{trajectory}".encode()
                self.digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        self._step = request.step
        return TrainResult(step=request.step, metrics={"actor/pg_loss": 0.0}, wall_s=seconds)

    async def publish(self, version: int) -> Weights:
        """Take the copying time."""
        seconds = self._backend.jittered(self._backend.settings.publish_s, "publish", version)
        await asyncio.sleep(seconds)
        return Weights(version=version, num_bytes=1, ref=self.digest)

    async def publish_restored(self, version: int) -> Weights:
        """The version that came with the checkpoint."""
        await asyncio.sleep(0)
        if self._restored is None or self._restored.version != version:
            raise CheckpointError(f"the checkpoint carries {self._restored}, not version {version}")
        return self._restored

    async def copy_state(self, step: int) -> None:
        """Take the copying time."""
        await asyncio.sleep(self._backend.settings.copy_s)
        self._copies[step] = {"digest": self.digest, "step": self._step}

    async def write_state(
        self, step: int, folder: Path, trajectories: Sequence[Ref], published: Weights | None
    ) -> None:
        """Take the writing time; the state is there only when it is over."""
        copy = self._copies.pop(step)
        await asyncio.sleep(self._backend.jittered(self._backend.settings.write_s, "write", step))
        rows = [trajectory for payload in trajectories for trajectory in payload]
        self._backend.disk.states[str(folder)] = {
            **copy,
            "trajectories": rows,
            "published": published,
        }

    def load_trajectories(self, folder: Path, group_ids: Sequence[int]) -> list[Ref]:
        """Trajectories of these groups from the disk."""
        rows = self._state(folder)["trajectories"]
        return [[row for row in rows if row.group_id == group_id] for group_id in group_ids]

    def _state(self, folder: Path) -> dict[str, Any]:
        return self._backend.disk.states[str(folder)]
