"""Admission and rollouts: prompts become groups within the staleness bound, groups become ready.

`try_admit` decides (a plain method), the loop waits and starts one task a group; each task leases a
replica, runs the members, tries again what may be tried again, and closes or readies its group.
"""

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from freewheel.config.sections import Config
from freewheel.control.feed import Feed
from freewheel.control.group_runner import GroupRunner
from freewheel.control.ledger import Group, Ledger
from freewheel.control.pool import Lease, Pool
from freewheel.control.staleness import StalenessBound
from freewheel.control.waits import Signal, WaitTable
from freewheel.errors import DataError, FailureClass, InvariantError, StalledError
from freewheel.types import RolloutOutcome, SamplingParams, Split

_LOST_WORKERS_TOGETHER = 2
"""A group that has lost its worker so often runs apart from others that have."""


class Admission:
    """Whether one more group may start, and on which replica."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger,
        pool: Pool,
        staleness: StalenessBound,
        changed: Signal,
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._staleness = staleness
        self._changed = changed
        steps = config.trainer.total_training_steps
        self._total_groups = None if steps is None else steps * config.groups_per_step
        self._holders: dict[str, bool] = {}
        self._returning: dict[int, int] = {}

    def hold(self, holder: str, *, open_groups_too: bool = False) -> None:
        """Admit nothing until this holder releases: an exclusive validation, a stop.

        Args:
            holder: its name.
            open_groups_too: nor give an open group another replica to go on with.
        """
        self._holders[holder] = open_groups_too

    def release(self, holder: str) -> None:
        """End one hold; admit again when it was the last."""
        if holder not in self._holders:
            raise InvariantError(
                f"{holder} releases admission, which is held by {[*self._holders]}"
            )
        del self._holders[holder]
        self._changed.notify()

    @property
    def held(self) -> bool:
        """True while something keeps rollouts from starting."""
        return bool(self._holders)

    def required_version(self) -> int | None:
        """Version under which the next group may start; None while the bound is reached."""
        num_trained, num_open = self._ledger.num_trained_groups, len(self._ledger.open)
        return self._staleness.required_version(num_trained=num_trained, num_open=num_open)

    def try_admit(self, holder: str) -> Lease | None:
        """A lease for one more group, if it may start now."""
        if self.held or self._is_enough():
            return None
        required = self.required_version()
        if required is None:
            return None
        return self._pool.try_lease_training(holder, min_version=required)

    def try_return(self, holder: str, group: Group) -> Lease | None:
        """A lease for an open group to go on with, if it may now."""
        if self._holders_of_open_groups():
            return None
        return self._pool.try_lease_training(holder, min_version=group.start_version)

    def _holders_of_open_groups(self) -> list[str]:
        return [holder for holder, open_groups_too in self._holders.items() if open_groups_too]

    @contextmanager
    def returning(self, group: Group) -> Iterator[None]:
        """For the length of the block an open group waits for a replica to go on with."""
        self._returning[group.group_id] = group.start_version
        try:
            yield
        finally:
            del self._returning[group.group_id]

    def is_blocked_by_pins(self) -> bool:
        """True if a group could start or go on, but for replicas that a validation keeps back."""
        if self._returning and self._holders_of_open_groups():
            return True
        if any(map(self._pool.pins_keep_back, self._returning.values())):
            return True
        required = None if self._is_enough() else self.required_version()
        return required is not None and (self.held or self._pool.pins_keep_back(required))

    def _is_enough(self) -> bool:
        started = self._ledger.num_trained_groups + len(self._ledger.open)
        return self._total_groups is not None and started >= self._total_groups

    def blocked_by(self) -> list[str]:
        """Who can make room for another group."""
        if self.held:
            return list(self._holders)
        if self._is_enough() or self.required_version() is None:
            return ["train"]
        return self._pool.busy_with()

    def return_blocked_by(self) -> list[str]:
        """Who can let an open group go on."""
        return self._holders_of_open_groups() or self._pool.busy_with()

    def describe(self) -> str:
        """What keeps the next group from starting."""
        if self.held:
            return f"held by {', '.join(self._holders)}"
        if self._is_enough():
            return "nothing more to start: all groups of the run are under way"
        required = self.required_version()
        if required is None:
            return f"training: {len(self._ledger.open)} groups open, the staleness bound"
        return (
            f"a replica with version {required} or newer and a free slot; {self._pool.describe()}"
        )


class Rollouter:
    """Loop `rollouter`. See the module's docstring."""

    def __init__(
        self,
        config: Config,
        *,
        feed: Feed,
        admission: Admission,
        ledger: Ledger,
        pool: Pool,
        runner: GroupRunner,
        waits: WaitTable,
    ) -> None:
        self._running: set[int] = set()
        self._again: deque[Group] = deque()
        self._prompts_ended = False
        self._apart = asyncio.Lock()
        self._runs_apart = "rollouter"
        self.num_finished_samples = 0
        self.num_finished_tokens = 0
        self._config = config
        self._feed = feed
        self._admission = admission
        self._ledger = ledger
        self._pool = pool
        self._runner = runner
        self._waits = waits
        rollout = config.rollout
        self._sampling = SamplingParams(
            max_tokens=rollout.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
        )

    async def run(self) -> None:
        """Start groups as the bound and the replicas allow.

        Consumes: prompts from feed; groups that were running when a checkpoint was taken.
        Produces: ready groups in the ledger.
        Waits for: a prompt; a slot within the staleness bound; a replica; running groups.
        Unblocked by: feed, train (groups trained), replicas (versions activated), validate.
        """
        self.run_again([g for g in self._ledger.open.values() if not g.ready])
        async with asyncio.TaskGroup() as groups:
            groups.create_task(self._run_lost_groups(groups), name="lost-groups")
            async for queued in self._feed.prompts:
                prompt = queued.prompt
                if prompt.failure is not None or self._ledger.is_set_aside(prompt.prompt_index):
                    self._ledger.drop(epoch=queued.epoch, prompt=prompt)
                    self._check_dropped()
                    continue
                lease = await self._admit()
                group = self._ledger.issue(
                    epoch=queued.epoch,
                    prompt=prompt,
                    start_version=lease.version,
                    max_staleness=self._config.async_training.staleness_bound,
                )
                groups.create_task(self._run_group(group, lease), name=f"group-{group.group_id}")
            self._prompts_ended = True
            self._ledger.changed.notify()

    def run_again(self, groups: Sequence[Group]) -> None:
        """Run groups of the ledger that have lost what they had."""
        self._again.extend(groups)
        self._ledger.changed.notify()

    async def _run_lost_groups(self, tasks: asyncio.TaskGroup) -> None:
        """Start the groups given to `run_again`, until no group can be lost any more."""
        while True:
            await self._ledger.changed.until(
                lambda: (
                    True if self._again or (self._prompts_ended and not self._ledger.open) else None
                )
            )
            if not self._again:
                return
            group = self._again.popleft()
            tasks.create_task(self._rerun_group(group), name=f"group-{group.group_id}")

    @property
    def ended(self) -> bool:
        """True while no group runs and none will come: the ready ones are all there are."""
        return self._prompts_ended and self._ledger.num_ready == len(self._ledger.open)

    @property
    def num_running(self) -> int:
        """Groups that are under way."""
        return len(self._running)

    def running_names(self) -> list[str]:
        """Names of the groups under way; the rollouter itself if there is none."""
        return [f"group-{group_id}" for group_id in sorted(self._running)] or ["rollouter"]

    async def _admit(self) -> Lease:
        holder = f"group-{self._ledger.next_group_id}"
        lease = self._admission.try_admit(holder)
        if lease is not None:
            return lease
        with self._waits.waiting(
            "rollouter",
            "a slot",
            held_by=self._admission.blocked_by,
            note=self._admission.describe,
        ):
            return await self._pool.changed.until(lambda: self._admission.try_admit(holder))

    async def _rerun_group(self, group: Group) -> None:
        await self._run_group(group, await self._lease_again(group))

    async def _lease_again(self, group: Group) -> Lease:
        name = f"group-{group.group_id}"
        with (
            self._admission.returning(group),
            self._waits.waiting(
                name,
                "a replica",
                held_by=self._admission.return_blocked_by,
                note=self._pool.describe,
            ),
        ):
            return await self._pool.changed.until(lambda: self._admission.try_return(name, group))

    async def _run_group(self, group: Group, lease: Lease) -> None:
        failures: Counter[tuple[int, FailureClass]] = Counter()
        pending = group.unfinished()
        self._running.add(group.group_id)
        try:
            await self._run_members(group, lease, pending)
            while pending := self._to_retry(group, pending, failures):
                if _lost_workers(failures) >= _LOST_WORKERS_TOGETHER:
                    await self._run_apart(group, pending)
                else:
                    await self._run_members(group, await self._lease_again(group), pending)
        finally:
            self._running.discard(group.group_id)
        self._settle(group)

    async def _run_apart(self, group: Group, pending: list[int]) -> None:
        """Another attempt, while no other group has one of this kind.

        One of several groups may take the worker down each time. Together again, all of them
        would spend all their retries for it.
        """
        name = f"group-{group.group_id}"
        async with AsyncExitStack() as turn:
            with self._waits.waiting(name, "its turn to run apart", held_by=self._apart_names):
                await turn.enter_async_context(self._apart)
            self._runs_apart = name
            await self._run_members(group, await self._lease_again(group), pending)

    def _apart_names(self) -> list[str]:
        return [self._runs_apart]

    async def _run_members(self, group: Group, lease: Lease, indices: Sequence[int]) -> None:
        members = self._ledger.begin_attempt(group, indices, self._seed)
        try:
            result = await self._runner.run(
                lease,
                group_id=group.group_id,
                split=Split.TRAIN,
                prompt_index=group.prompt_index,
                members=members,
                sampling=self._sampling,
                timeout_s=self._config.rollout.timeout_s,
            )
        finally:
            self._pool.release(lease)
        self._ledger.absorb(group, result.outcomes, result.payload)
        finished = [outcome for outcome in result.outcomes if outcome.failure is None]
        self.num_finished_samples += len(finished)
        self.num_finished_tokens += sum(outcome.num_response_tokens for outcome in finished)

    def _to_retry(
        self, group: Group, indices: Sequence[int], failures: Counter[tuple[int, FailureClass]]
    ) -> list[int]:
        """The members of the last attempt that failed by a class that may be tried again."""
        again: list[int] = []
        for index in indices:
            failure = group.outcomes[index].failure
            if failure is None:
                continue
            failures[index, failure] += 1
            if failures[index, failure] <= self._config.rollout.retries.get(failure, 0):
                again.append(index)
        return again

    def _settle(self, group: Group) -> None:
        finished = group.finished
        if len(finished) < self._config.min_group_size:
            self._ledger.fail(group)
            self._check_failed(group)
        elif self._config.algorithm.filter_groups and _all_equal(finished):
            self._ledger.filter(group)
            self._check_filtered()
        else:
            self._ledger.make_ready(group)

    def _check_failed(self, group: Group) -> None:
        limit = self._config.health.max_failed_groups_in_a_row
        if self._ledger.failed_in_a_row >= limit:
            last = next((o for o in group.outcomes.values() if o.failure is not None), None)
            raise StalledError(
                f"{limit} groups in a row failed (health.max_failed_groups_in_a_row); failures by "
                f"class: {self._ledger.failures()}; the last one: {last and last.message}"
            )

    def _check_filtered(self) -> None:
        limit = max(self._feed.num_prompts, self._config.health.max_failed_groups_in_a_row)
        if self._ledger.filtered_in_a_row >= limit:
            raise DataError(
                f"{limit} groups in a row were filtered: all rollouts of a prompt get the same "
                "reward, there is nothing to learn from (algorithm.filter_groups)"
            )

    def _check_dropped(self) -> None:
        if self._ledger.dropped_in_a_row < max(self._feed.num_prompts, 1):
            return
        failures = self._ledger.failures()
        text = ", ".join(f"{number} samples {failure}" for failure, number in failures.items())
        if FailureClass.OVER_LONG_PROMPT in failures or FailureClass.BAD_PROMPT in failures:
            raise DataError(
                f"none of the {self._feed.num_prompts} prompts can be used: {text}; an over-long "
                "prompt has more than "
                f"rollout.max_prompt_length={self._config.rollout.max_prompt_length} tokens"
            )
        first = "; ".join(self._ledger.first_failures.values())
        raise StalledError(
            f"all {self._feed.num_prompts} prompts are set aside, as their groups failed "
            f"{self._config.health.max_prompt_failures} times each (health.max_prompt_failures): "
            f"{text}; the first of each class: {first}"
        )

    def _seed(self, sample_id: str, attempt: int) -> int:
        return derive_seed(self._config.trainer.seed, sample_id, attempt)


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from the run's seed and ids; the same in every process and version."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _lost_workers(failures: Counter[tuple[int, FailureClass]]) -> int:
    """How often a member lost its worker, the most of all members."""
    lost = [n for (_, failure), n in failures.items() if failure is FailureClass.LOST_WORKER]
    return max(lost, default=0)


def _all_equal(outcomes: Sequence[RolloutOutcome]) -> bool:
    return len({outcome.reward for outcome in outcomes}) == 1
