"""One validation: pin, run every trial under one version, give each replica back as it falls idle.

A response that carries any other version than the pinned one is refused and its trial run again.
Whatever happens (deadline, stop), `row()` says what was done and what was not.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any, Literal

from freewheel.config.sections import Config
from freewheel.control.group_runner import GroupRunner
from freewheel.control.ledger import restore_outcome
from freewheel.control.pool import Lease, Pin, Pool, Role
from freewheel.control.rollouter import Admission, derive_seed
from freewheel.control.validation_score import score_trials
from freewheel.control.waits import WaitTable
from freewheel.errors import FailureClass
from freewheel.protocols import Recorder
from freewheel.types import DatasetInfo, Member, Purpose, RolloutOutcome, SamplingParams, Split

Status = Literal["complete", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a validation runs: its mode, and how many replicas it pins."""

    mode: Literal["parallel", "exclusive", "dedicated"]
    num_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt at one trial of one prompt."""

    prompt_index: int
    number: int
    attempt: int = 1


class ValidationRun:
    """See the module's docstring. Made by the validator, run once."""

    def __init__(
        self,
        config: Config,
        *,
        step: int,
        version: int,
        data: DatasetInfo,
        placement: Placement,
        pool: Pool,
        runner: GroupRunner,
        admission: Admission,
        waits: WaitTable,
        recorder: Recorder,
        now_s: Callable[[], float],
    ) -> None:
        self.step = step
        self.version = version
        self.num_total = data.num_prompts * config.validation.n
        self.replica_s = 0.0
        self.status: Status = "partial"
        self._reason = "the run ended"
        self._given_up = ""
        self._config = config
        self._data = data
        self._placement = placement
        self._pool = pool
        self._runner = runner
        self._admission = admission
        self._waits = waits
        self._recorder = recorder
        self._now_s = now_s
        self._name = f"validation-{step}"
        self._started_s = now_s()
        self._pin = Pin(
            name=self._name,
            version=version,
            num_pending=data.num_prompts,
            exclusive=placement.mode == "exclusive",
        )
        self._pending: deque[list[Trial]] = deque(
            [Trial(prompt_index=i, number=k) for k in range(config.validation.n)]
            for i in range(data.num_prompts)
        )
        self._running: set[int] = set()
        self.num_moves = 0
        self._done: dict[tuple[int, int], RolloutOutcome] = {}
        self._failed: dict[tuple[int, int], FailureClass] = {}
        self._failed_attempts: Counter[tuple[int, int, FailureClass]] = Counter()
        self._num_timed_out_at_end = 0
        self._pinned_since_s: dict[int, float] = {}
        self._elapsed_s = 0.0
        self._clock_began_s: float | None = None

    @property
    def num_done(self) -> int:
        """Trials that completed."""
        return len(self._done)

    @property
    def has_begun(self) -> bool:
        """True from when a replica takes its trials: its time is running."""
        return self._clock_began_s is not None

    async def run(self) -> None:
        """Run all trials, or as many as the deadline allows."""
        limit_s = self._config.validation.timeout_s
        try:
            # The drain of an exclusive validation is not in its limit: each rollout has its own.
            # Nor is the time until a replica can take its trials.
            async with self._pinned():
                await self._await_replica()
                self._clock_began_s = self._now_s()
                async with asyncio.timeout(limit_s - self._elapsed_s):
                    await self._run_trials()
        except TimeoutError:
            self._num_timed_out_at_end = self.num_total - self.num_done - len(self._failed)
            self._reason = f"not done within {limit_s:g} s (validation.timeout_s)"
            self._recorder.event("validation_timeout", step=self.step, waits=self._waits.describe())
            return
        if self._given_up and self.num_done < self.num_total:
            self._reason = self._given_up
            return
        self._set_status()

    def give_up(self, reason: str) -> None:
        """Start no further trial; the result is what is done when those under way have ended."""
        self._given_up = reason
        self._pending.clear()
        self._pin.num_pending = 0
        # They would ask for the version again and again.
        for replica_id in sorted(self._pin.replica_ids):
            if self._pool.slots[replica_id].version != self.version:
                self._unpin(replica_id)
        self._pool.changed.notify()

    def _set_status(self) -> None:
        missing = {str(failure): num for failure, num in sorted(self._num_failed().items())}
        self.status = "partial" if missing else "complete"
        self._reason = f"trials without a score: {missing}" if missing else ""

    # -- placement ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _pinned(self) -> AsyncIterator[None]:
        exclusive = self._placement.mode == "exclusive"
        if exclusive:
            self._admission.hold(self._name, open_groups_too=True)
        try:
            if exclusive:
                await self._drain_rollouts()
            self._pin_replicas(self._placement.num_replicas)
            yield
        finally:
            for replica_id in sorted(self._pin.replica_ids):
                self._unpin(replica_id)
            if exclusive:
                self._admission.release(self._name)

    async def _drain_rollouts(self) -> None:
        """Wait until no rollout runs; each has a deadline of its own."""
        with self._waits.waiting(
            self._name, "rollouts to drain", held_by=self._pool.busy_with, note=self._pool.describe
        ):
            await self._pool.changed.until(
                lambda: True if self._pool.num_leases(Purpose.TRAINING) == 0 else None
            )

    def _pin_replicas(self, count: int) -> None:
        if self._placement.mode == "dedicated":
            chosen = self._pool.ids(Role.DEDICATED)
        else:
            chosen = self._pool.choose_for_pin(count, self.version)
        self._pool.pin(self._pin, chosen)
        self._note_pinned(chosen)

    def _note_pinned(self, chosen: list[int]) -> None:
        now_s = self._now_s()
        self._pinned_since_s.update(dict.fromkeys(chosen, now_s))
        self._recorder.event("pinned", step=self.step, version=self.version, replicas=chosen)

    def _unpin(self, replica_id: int) -> None:
        self._pool.unpin(self._pin, replica_id)
        self.replica_s += self._now_s() - self._pinned_since_s.pop(replica_id)
        self._recorder.event("unpinned", step=self.step, replica=replica_id)

    def _return_idle_replicas(self) -> None:
        """In the tail, give back each replica on which nothing of this validation runs."""
        if self._placement.mode == "parallel" and not self._pending:
            for replica_id in self._pool.idle_pinned(self._pin):
                self._unpin(replica_id)

    async def _await_replica(self) -> None:
        """Until a replica has the version and takes trials, or should have long ago.

        Starting and loading have deadlines of their own, but a replica may be lost again and again.
        """
        health = self._config.health
        limit_s = health.startup_timeout_s + health.sync_timeout_s
        with (
            suppress(TimeoutError),
            self._waits.waiting(
                self._name,
                f"a replica at version {self.version}",
                held_by=self._pool.busy_with,
                note=self._pool.describe,
                timeout_s=limit_s,
            ),
        ):
            async with asyncio.timeout(limit_s):
                await self._pool.changed.until(self._is_placed)

    def _is_placed(self) -> Literal[True] | None:
        self._keep_pinned()
        return True if not self._pending or self._pool.is_placed(self._pin) else None

    # -- trials -------------------------------------------------------------------------------

    async def _run_trials(self) -> None:
        async with asyncio.TaskGroup() as trials:
            while True:
                with self._waits.waiting(
                    self._name,
                    f"slots at version {self.version}",
                    held_by=self._holders,
                    note=self._pool.describe,
                ):
                    lease = await self._pool.changed.until(self._next)
                if lease == "done":
                    return
                group = self._pending.popleft()
                self._pin.num_pending = len(self._pending)
                self._running.add(group[0].prompt_index)
                trials.create_task(self._run_group(lease, group), name=lease.holder)

    def _keep_pinned(self) -> None:
        """Pin another replica where none is left, or none that lives."""
        if not self._pin.replica_ids:
            self._pin_replicas(1)
        elif self._placement.mode == "parallel":
            dead = set(self._pin.replica_ids)
            if chosen := self._pool.replace_dead(self._pin):
                for replica_id in dead:
                    del self._pinned_since_s[replica_id]
                self._note_pinned(chosen)

    def _holders(self) -> list[str]:
        """Who keeps it from its next slot: its own trials, rollouts, replicas that load."""
        others = [name for name in self._pool.busy_with() if name != self._name]
        return [*(f"{self._name}-prompt-{index}" for index in sorted(self._running)), *others]

    def _next(self) -> Lease | Literal["done"] | None:
        """A lease for the next trials; `done` when none is pending or running; None: wait."""
        if not self._pending:
            self._return_idle_replicas()
            return None if self._running else "done"
        self._keep_pinned()
        holder = f"{self._name}-prompt-{self._pending[0][0].prompt_index}"
        return self._pool.try_lease_validation(holder, self._pin)

    async def _run_group(self, lease: Lease, group: list[Trial]) -> None:
        by_id = {self._sample_id(trial): trial for trial in group}
        members = tuple(
            Member(
                sample_id=sample_id,
                attempt=trial.attempt,
                seed=derive_seed(self._config.trainer.seed, "validation", sample_id, trial.attempt),
            )
            for sample_id, trial in by_id.items()
        )
        try:
            result = await self._runner.run(
                lease,
                group_id=group[0].prompt_index,
                split=Split.VALIDATION,
                prompt_index=group[0].prompt_index,
                members=members,
                sampling=self._sampling(),
                timeout_s=self._config.trial_timeout_s,
            )
        finally:
            self._running.discard(group[0].prompt_index)
            self._pool.release(lease)
        again = [
            replace(by_id[outcome.sample_id], attempt=outcome.attempt + 1)
            for outcome in result.outcomes
            if self._take(by_id[outcome.sample_id], outcome)
        ]
        if again and not self._given_up:
            self._pending.append(again)
            self._pin.num_pending = len(self._pending)
        self._pool.changed.notify()

    def _take(self, trial: Trial, outcome: RolloutOutcome) -> bool:
        """Count an outcome in; True: the trial is to be run again."""
        self.num_moves += 1
        failure = outcome.failure
        if failure is None and {version for version, _ in outcome.version_spans} != {self.version}:
            failure = FailureClass.WRONG_VERSION
            self._recorder.event(
                "validation_response_refused",
                step=self.step,
                version=self.version,
                sample_id=outcome.sample_id,
                version_spans=outcome.version_spans,
            )
        if failure is None:
            self._done[trial.prompt_index, trial.number] = outcome
            return False
        key = (trial.prompt_index, trial.number, failure)
        self._failed_attempts[key] += 1
        if self._failed_attempts[key] <= self._config.rollout.retries.get(failure, 0):
            return True
        self._failed[trial.prompt_index, trial.number] = failure
        return False

    def _sample_id(self, trial: Trial) -> str:
        return f"val{self.step}-{trial.prompt_index}-{trial.number}"

    def _sampling(self) -> SamplingParams:
        validation, rollout = self._config.validation, self._config.rollout
        return SamplingParams(
            max_tokens=rollout.max_response_length,
            temperature=validation.temperature,
            top_p=validation.top_p,
            top_k=validation.top_k,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
        )

    # -- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: trials that ended, attempts that failed, time that is used."""
        now_s = self._now_s()
        running_s = 0.0 if self._clock_began_s is None else now_s - self._clock_began_s
        return {
            "trials": self._identity(),
            "started_s": self._started_s,
            "elapsed_s": self._elapsed_s + running_s,
            "replica_s": self.replica_s + sum(now_s - t for t in self._pinned_since_s.values()),
            "done": [[*key, asdict(outcome)] for key, outcome in sorted(self._done.items())],
            "failed": [[*key, failure] for key, failure in sorted(self._failed.items())],
            "failed_attempts": [[*key, num] for key, num in sorted(self._failed_attempts.items())],
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Go on from `state()` with the trials that are missing. Before `run`.

        A trial that was under way runs again as the same attempt: its first run left no outcome.

        Returns:
            False, with nothing changed, if the trials are others now (data, number, sampling).
        """
        if state["trials"] != self._identity():
            return False
        self._started_s, self._elapsed_s = state["started_s"], state["elapsed_s"]
        self.replica_s = state["replica_s"]
        self._done = {(i, k): restore_outcome(row) for i, k, row in state["done"]}
        self._failed = {(i, k): FailureClass(failure) for i, k, failure in state["failed"]}
        self._failed_attempts = Counter(
            {(i, k, FailureClass(failure)): num for i, k, failure, num in state["failed_attempts"]}
        )
        self._pending = deque(filter(None, map(self._unfinished, self._pending)))
        self._pin.num_pending = len(self._pending)
        return True

    def _unfinished(self, group: list[Trial]) -> list[Trial]:
        """The trials of a prompt that have not ended, each as the attempt that is its turn."""
        attempts: Counter[tuple[int, int]] = Counter()
        for (index, number, _), num in self._failed_attempts.items():
            attempts[index, number] += num
        ended = self._done.keys() | self._failed.keys()
        return [
            replace(trial, attempt=1 + attempts[trial.prompt_index, trial.number])
            for trial in group
            if (trial.prompt_index, trial.number) not in ended
        ]

    def _identity(self) -> dict[str, Any]:
        """What must be the same for trials of two lives to be those of one validation."""
        return {
            "step": self.step,
            "version": self.version,
            "fingerprint": self._data.fingerprint,
            "num_prompts": self._data.num_prompts,
            "n": self._config.validation.n,
            "sampling": repr(self._sampling()),
            "seed": self._config.trainer.seed,
        }

    # -- result -------------------------------------------------------------------------------

    def _num_failed(self) -> Counter[FailureClass]:
        return Counter(self._failed.values())

    def row(self) -> dict[str, Any]:
        """The validation's line in `validations.jsonl`."""
        n = self._config.validation.n
        score = score_trials(self._by_prompt(), num_total=self.num_total, trials_per_prompt=n)
        num_failed = self._num_failed()
        num_timeout = num_failed[FailureClass.TIMEOUT] + self._num_timed_out_at_end
        failed = {
            failure.value: num
            for failure, num in sorted(num_failed.items())
            if failure is not FailureClass.TIMEOUT and num
        }
        num_rest = self.num_total - self.num_done - num_timeout - sum(failed.values())
        return {
            "step": self.step,
            "policy_version": self.version,
            "mode": self._placement.mode,
            "status": self.status,
            "reason": self._reason if self.status == "partial" else "",
            "n_total": self.num_total,
            "n_done": self.num_done,
            "n_failed": {**failed, **({"not_run": num_rest} if num_rest else {})},
            "n_timeout": num_timeout,
            "score": score.score,
            "score_lower": score.lower,
            "score_upper": score.upper,
            "ci95": None if score.ci95 is None else list(score.ci95),
            "metrics": score.metrics,
            "started_s": round(self._started_s, 6),
            "ended_s": round(self._now_s(), 6),
            "response_versions": {str(v): num for v, num in sorted(self._versions().items())},
        }

    def _by_prompt(self) -> dict[int, list[RolloutOutcome]]:
        outcomes: dict[int, list[RolloutOutcome]] = {}
        for (index, _), outcome in sorted(self._done.items(), key=itemgetter(0)):
            outcomes.setdefault(index, []).append(outcome)
        return outcomes

    def _versions(self) -> Counter[int]:
        """Responses by the version that every token of theirs was sampled under."""
        return Counter(outcome.min_version for outcome in self._done.values())

    def describe(self) -> str:
        """Progress in one line."""
        return (
            f"validation of step {self.step} (version {self.version}): {self.num_done} of "
            f"{self.num_total} trials done, {len(self._running)} prompts running"
        )
