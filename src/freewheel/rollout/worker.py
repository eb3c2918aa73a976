"""What a rollout worker process does: opens the data, prepares prompts, runs groups.

The backend wraps one of these in a process. All methods are on the process's serving loop, which
nothing here may block: data and tokenizer have a thread each, user code has threads and loops of
its own, and every deadline is kept on the serving loop.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from pathlib import Path

from freewheel.config.sections import Config
from freewheel.data.dataset import PromptDataset, file_names, open_dataset
from freewheel.data.records import PromptRecord
from freewheel.errors import FailureClass, RolloutError
from freewheel.protocols import Generator
from freewheel.rollout.batching import BatchingGenerator
from freewheel.rollout.environment import load_environment
from freewheel.rollout.host import RolloutHost
from freewheel.rollout.loops import LoopLimits
from freewheel.rollout.render import Renderer, read_record
from freewheel.rollout.rewards import load_reward
from freewheel.rollout.services import GroupPrompt, Services
from freewheel.rollout.usercode import UserCode
from freewheel.types import (
    DatasetInfo,
    GroupRequest,
    LoopReport,
    PromptInfo,
    Purpose,
    RolloutOutcome,
    Split,
    Trajectory,
)

_REWARD_SHARE = 0.1
"""Most of a rollout's time that is kept for the reward of what was generated until then."""
_MAX_REWARD_THREADS = 16
_MAX_ENVIRONMENT_THREADS = 1024


class RolloutWorkerCore:
    """A rollout worker without its process.

    Args:
        config: the configuration.
        model_path: folder with the model's tokenizer.
        worker_id: number of the worker.
        on_loop_report: is told of blocked loops of user code, from any thread; returns at once.
    """

    def __init__(
        self,
        config: Config,
        model_path: Path,
        worker_id: int,
        *,
        on_loop_report: Callable[[LoopReport], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._worker_id = worker_id
        self._on_loop_report = on_loop_report
        self._datasets: dict[Split, PromptDataset] = {}
        self._services: Services | None = None
        self._data_thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="data")
        self._renderer_thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="tokenizer"
        )

    @property
    def num_leaked(self) -> int:
        """Calls of user code that are past their deadline and have not ended."""
        return self._services.user_code.num_leaked if self._services is not None else 0

    async def start(self) -> dict[Split, DatasetInfo]:
        """Open the data that there is, load the tokenizer, import the user's code.

        Raises:
            DataError: the data cannot be read.
            ConfigError: a file, the tokenizer or the user's code is not what the configuration
                says.
        """
        loop = asyncio.get_running_loop()
        self._datasets = await loop.run_in_executor(self._data_thread, self._open_data)
        self._services = await loop.run_in_executor(self._renderer_thread, self._load_services)
        return {
            split: DatasetInfo(num_prompts=len(dataset), fingerprint=dataset.fingerprint)
            for split, dataset in self._datasets.items()
        }

    async def prepare(self, split: Split, indices: Sequence[int]) -> list[PromptInfo]:
        """Read, render and tokenize prompts; says which cannot be used, and why."""
        # One hop to each thread, not two a prompt: on a busy machine a hop costs more than work.
        services, dataset = self._started(), self._datasets[split]
        loop = asyncio.get_running_loop()
        records = await loop.run_in_executor(self._data_thread, _read_records, dataset, indices)
        return await services.render(_describe_prompts, services.renderer, dataset, records)

    async def run_group(
        self, request: GroupRequest, generator: Generator
    ) -> tuple[tuple[RolloutOutcome, ...], list[Trajectory]]:
        """Run the members of a request at once, each until its deadline.

        Cancelling it aborts the group's requests in the engine.

        Returns:
            An outcome for each member, in order; and the trajectories of the finished ones, in
            order (none for validation).
        """
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        try:
            prompt = await self._group_prompt(request, deadline)
        except RolloutError as error:
            return _fail_all(request, error), []
        hosts, outcomes = await self._run_members(request, generator, prompt, deadline)
        if request.purpose is Purpose.VALIDATION:
            return outcomes, []
        return outcomes, [
            host.trajectory(outcome)
            for host, outcome in zip(hosts, outcomes, strict=True)
            if outcome.failure is None
        ]

    async def close(self) -> None:
        """End threads and loops; user code that does not end is left to the process's end."""
        services, self._services = self._services, None
        if services is not None:
            await services.user_code.aclose()
        for thread in (self._data_thread, self._renderer_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _group_prompt(self, request: GroupRequest, deadline: float) -> GroupPrompt:
        services = self._started()
        dataset = self._datasets[request.split]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline):
                record = await loop.run_in_executor(
                    self._data_thread, read_record, dataset, request.prompt_index
                )
                token_ids = await services.render(services.renderer.prompt, record.prompt)
        except TimeoutError as error:
            raise RolloutError(
                FailureClass.TIMEOUT,
                f"group {request.group_id} is past its {request.timeout_s:g} s: reading prompt "
                f"{dataset.where(request.prompt_index)}",
            ) from error
        return GroupPrompt(record=record, token_ids=token_ids)

    async def _run_members(
        self, request: GroupRequest, generator: Generator, prompt: GroupPrompt, deadline: float
    ) -> tuple[list[RolloutHost], tuple[RolloutOutcome, ...]]:
        kept_s = min(self._config.rollout.reward_timeout_s, _REWARD_SHARE * request.timeout_s)
        services = self._started()
        async with asyncio.TaskGroup() as engine_calls:
            batching = BatchingGenerator(
                generator,
                engine_calls,
                generate_until=deadline - kept_s,
                single_turn=services.environment.is_ours,
            )
            hosts = [
                RolloutHost(
                    request,
                    member,
                    prompt=prompt,
                    services=services,
                    generator=batching,
                    deadline=deadline,
                )
                for member in request.members
            ]
            async with asyncio.TaskGroup() as members:
                tasks = [
                    members.create_task(host.run(), name=f"rollout {host.sample_id}")
                    for host in hosts
                ]
            batching.close()
        return hosts, tuple(task.result() for task in tasks)

    def _open_data(self) -> dict[Split, PromptDataset]:
        return {
            split: open_dataset(self._config, split)
            for split in Split
            if file_names(self._config, split)
        }

    def _load_services(self) -> Services:
        rollout = self._config.rollout
        return Services(
            renderer=Renderer(self._config, self._model_path),
            renderer_thread=self._renderer_thread,
            environment=load_environment(rollout.environment),
            reward=load_reward(self._config),
            reward_timeout_s=rollout.reward_timeout_s,
            tool_timeout_s=rollout.tool_timeout_s,
            user_code=UserCode(
                max_environment_threads=max_environment_threads(self._config),
                max_reward_threads=_MAX_REWARD_THREADS,
                limits=LoopLimits(
                    blocked_s=self._config.health.loop_blocked_s,
                    end_s=self._config.health.loop_blocked_end_s,
                    report=self._on_loop_report,
                ),
            ),
        )

    def _started(self) -> Services:
        if self._services is None:
            raise RuntimeError(f"rollout worker {self._worker_id} is not started, or closed")
        return self._services


def max_environment_threads(config: Config) -> int:
    """Threads for the most rollouts and trials at once, all in one worker, within a bound.

    A worker has them all when the others are being replaced. Threads are started when needed.
    """
    per_replica = config.async_training.concurrent_samples_per_replica
    num_groups = min(config.rollout.replicas * per_replica, config.max_slots)
    num_rollouts = config.rollout.n * num_groups
    if config.data.val_files:
        alone = config.validation_mode == "dedicated"
        replicas = config.validation.dedicated_replicas if alone else config.rollout.replicas
        num_rollouts += config.validation.n * replicas * per_replica
    return min(num_rollouts, _MAX_ENVIRONMENT_THREADS)


def _read_records(
    dataset: PromptDataset, indices: Sequence[int]
) -> list[tuple[int, PromptRecord | RolloutError]]:
    """(index, record, or why there is none) of each prompt."""
    records: list[tuple[int, PromptRecord | RolloutError]] = []
    for index in indices:
        try:
            records.append((index, read_record(dataset, index)))
        except RolloutError as error:
            records.append((index, error))
    return records


def _describe_prompts(
    renderer: Renderer,
    dataset: PromptDataset,
    records: list[tuple[int, PromptRecord | RolloutError]],
) -> list[PromptInfo]:
    return [
        renderer.info(dataset, index, record)
        if isinstance(record, PromptRecord)
        else PromptInfo(
            prompt_index=index,
            num_prompt_tokens=0,
            failure=record.failure,
            message=str(record),
        )
        for index, record in records
    ]


def _fail_all(request: GroupRequest, error: RolloutError) -> tuple[RolloutOutcome, ...]:
    return tuple(
        RolloutOutcome(
            sample_id=member.sample_id,
            attempt=member.attempt,
            failure=error.failure,
            message=str(error),
        )
        for member in request.members
    )
