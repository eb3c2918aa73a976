"""The train loop: take a batch, train, then cut, request validation, publish; wait for none of it.

Owns the trainer's step and the policy version. The order after a step makes a checkpoint
independent of any validation.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from freewheel.config.sections import Config
from freewheel.control.ledger import Group, Ledger
from freewheel.control.pool import Pool
from freewheel.control.rollouter import Admission, Rollouter
from freewheel.control.staleness import BatchRule, StalenessBound, choose_batch
from freewheel.control.step_metrics import group_metrics
from freewheel.control.trainer_keeper import TrainerKeeper
from freewheel.control.waits import WaitTable
from freewheel.control.weight_store import WeightStore
from freewheel.errors import InvariantError, TrajectoriesLostError
from freewheel.protocols import Recorder
from freewheel.types import TrainRequest, TrainResult, Weights


class Cuts(Protocol):
    """What the train loop asks of checkpoints."""

    async def cut(self, step: int) -> None:
        """Take the state of this moment; write it later."""
        ...


class Validations(Protocol):
    """What the train loop asks of validation."""

    def request(self, *, step: int, version: int) -> None:
        """Queue or skip a validation; returns at once."""
        ...

    @property
    def running(self) -> bool:
        """True while one runs."""
        ...


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Where training stands; part of every checkpoint."""

    step: int = 0
    version: int = 0
    steps_since_publish: int = 0
    validation_requested_at: int = -1
    wait_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("samples", "validation", "checkpoint", "sync"), 0.0)
    )


class TrainLoop:
    """Loop `train`. See the module's docstring."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: TrainerKeeper,
        ledger: Ledger,
        pool: Pool,
        store: WeightStore,
        staleness: StalenessBound,
        admission: Admission,
        rollouter: Rollouter,
        cuts: Cuts,
        validations: Validations,
        waits: WaitTable,
        recorder: Recorder,
        run_time_s: Callable[[], float],
    ) -> None:
        self.state = TrainState()
        self.last_metrics: dict[str, float] = {}
        self.stopping = False
        self.is_training = False
        self._config = config
        self._trainer = trainer
        self._ledger = ledger
        self._pool = pool
        self._store = store
        self._staleness = staleness
        self._admission = admission
        self._rollouter = rollouter
        self._cuts = cuts
        self._validations = validations
        self._waits = waits
        self._recorder = recorder
        self._run_time_s = run_time_s
        self._cut_step = -1
        self._step_began_s = 0.0
        self._busy_before_s = 0.0
        self._timing_s: dict[str, float] = {}

    # -- beginnings ---------------------------------------------------------------------------

    async def begin(self, *, resumed: bool) -> None:
        """Publish the weights that the first rollouts need; validate before training if asked."""
        self._step_began_s = self._now_s()
        if resumed:
            await self._begin_again()
            return
        await self.publish(0)
        if self._config.data.val_files and self._config.trainer.val_before_train:
            self.state.validation_requested_at = 0
            self._validations.request(step=0, version=0)

    async def _begin_again(self) -> None:
        """Do what was still to be done after the step of the cut."""
        self._cut_step = self.state.step
        if self.state.validation_requested_at < self.state.step:
            self._request_validation()
        if self.publication_due():
            await self.publish(self.state.version + 1)
        elif self.state.steps_since_publish == 0:
            await self.publish(self.state.version)
        else:
            await self.publish(self.state.version, restored=True)

    # -- the loop -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the last step, the end of the data, or a stop.

        Consumes: ready groups from the ledger.
        Produces: trained steps, published versions; cuts and validation requests where due.
        Waits for: enough ready groups; the trainer's own work.
        Unblocked by: rollouter.
        """
        while (group_ids := await self._take_batch()) is not None:
            if await self._train(group_ids):
                await self._after_step()

    async def finish(self) -> None:
        """After the last step: what was not due by its frequency. After a stop: only the cut."""
        if self.state.step != self._cut_step and self._ledger.next_group_id > 0:
            await self._cut()
        if self.stopping:
            return
        if self.state.steps_since_publish > 0:
            await self.publish(self.state.version + 1)
        wanted = self._config.data.val_files and self._config.trainer.val_at_end
        if wanted and self.state.validation_requested_at < self.state.step:
            self.state.validation_requested_at = self.state.step
            self._validations.request(step=self.state.step, version=self.state.version)

    def stop(self) -> None:
        """End after the current step."""
        self.stopping = True
        self._ledger.changed.notify()

    async def _take_batch(self) -> list[int] | None:
        with self._timed("gen"):
            while not self._is_over():
                if (group_ids := self._choose()) is not None:
                    return group_ids
                await self._wait_for_samples()
        return None

    def _is_over(self) -> bool:
        total = self._config.trainer.total_training_steps
        done = total is not None and self.state.step >= total
        exhausted = self._rollouter.ended and not self._ledger.open
        return self.stopping or done or exhausted

    def _choose(self) -> list[int] | None:
        size = self._config.groups_per_step
        if self._rollouter.ended:
            size = min(size, len(self._ledger.open))
        if self._ledger.num_ready < size:
            return None
        return choose_batch(
            self._ledger.candidates(),
            BatchRule(
                size=size,
                version=self.state.version,
                steps_left=self.trigger - self.state.steps_since_publish,
                groups_per_step=self._config.groups_per_step,
                groups_per_version=self._config.groups_per_version,
            ),
        )

    async def _wait_for_samples(self) -> None:
        """Wait for a change, and book the time on who kept the samples back."""
        num_ready = self._ledger.num_ready
        if num_ready >= self._config.groups_per_step and num_ready == len(self._ledger.open):
            raise InvariantError(
                f"all {num_ready} open groups are ready, but no batch of them is allowed "
                f"at version {self.state.version}: {self._ledger.candidates()}"
            )
        blocked = self._validations.running and self._admission.is_blocked_by_pins()
        cause = "validation" if blocked else "samples"
        with (
            self._booked(cause),
            self._waits.waiting(
                "train",
                f"samples ({cause})",
                held_by=self._rollouter.running_names,
                note=self._describe_open,
            ),
        ):
            await self._ledger.changed.wait()

    def _describe_open(self) -> str:
        return (
            f"rollouter: {self._ledger.num_ready} groups ready, {self._rollouter.num_running} "
            f"running, {self._config.groups_per_step} wanted"
        )

    async def _train(self, group_ids: Sequence[int]) -> bool:
        """One step; False if trajectories were lost, so that their groups run again first."""
        groups = [self._ledger.open[group_id] for group_id in group_ids]
        self._check_staleness(groups)
        request = self._request(groups)
        self.is_training = True
        try:
            with self._timed("update_actor"):
                result = await self._trainer.train_step(request)
        except TrajectoriesLostError as error:
            self._run_again(groups, error)
            return False
        finally:
            self.is_training = False
        self._ledger.train(group_ids, request.step)
        self.state.step = request.step
        self.state.steps_since_publish += 1
        self._record(groups, result)
        return True

    def _request(self, groups: Sequence[Group]) -> TrainRequest:
        outcomes = [outcome for group in groups for outcome in group.finished]
        return TrainRequest(
            step=self.state.step + 1,
            policy_version=self.state.version,
            payloads=tuple(ref for group in groups for ref in group.payloads),
            mini_batch_groups=self._config.actor.ppo_mini_batch_size,
            num_tokens=sum(o.num_prompt_tokens + o.num_response_tokens for o in outcomes),
        )

    def _run_again(self, groups: Sequence[Group], error: TrajectoriesLostError) -> None:
        owners = [group.group_id for group in groups for _ in group.payloads]
        lost = sorted({owners[position] for position in error.positions})
        self._recorder.event("trajectories_lost", groups=lost, reason=str(error))
        self._rollouter.run_again(self._ledger.run_again(lost))

    def _check_staleness(self, groups: Sequence[Group]) -> None:
        for group in groups:
            staleness = self.state.version - group.oldest_version
            if staleness > group.max_staleness:
                raise InvariantError(
                    f"group {group.group_id} is {staleness} versions old at version "
                    f"{self.state.version}; at most {group.max_staleness} are allowed"
                )

    # -- after a step -------------------------------------------------------------------------

    async def _after_step(self) -> None:
        if self._is_due(self._config.trainer.save_freq) or self._is_last():
            await self._cut()
        self._request_validation()
        if self.publication_due():
            await self.publish(self.state.version + 1)

    async def _cut(self) -> None:
        self._cut_step = self.state.step
        with self._booked("checkpoint"), self._timed("save_checkpoint"):
            await self._cuts.cut(self.state.step)

    def _request_validation(self) -> None:
        if not self._config.data.val_files:
            return
        at_end = self._config.trainer.val_at_end and self._is_last()
        if self._is_due(self._config.trainer.test_freq) or at_end:
            self.state.validation_requested_at = self.state.step
            version = self.state.version + int(self.publication_due())
            self._validations.request(step=self.state.step, version=version)

    def publication_due(self) -> bool:
        """True if the trainer's weights are to be published before anything else."""
        unpublished = self.state.steps_since_publish > 0
        return self.state.steps_since_publish >= self.trigger or (unpublished and self._is_last())

    def _is_due(self, freq: int) -> bool:
        return freq > 0 and self.state.step > 0 and self.state.step % freq == 0

    def _is_last(self) -> bool:
        """True after the last step, where their number is known before."""
        total = self._config.trainer.total_training_steps
        return total is not None and self.state.step >= total

    async def take_back(self, version: int) -> None:
        """Fetch a version that a checkpoint carries for a validation. Before the first publication.

        Replicas get it when the validation pins them; for rollouts it is never the newest.
        """
        weights = await self._fetch(version, restored=True)
        self._store.add_held(weights)
        self._recorder.event("weights_taken_back", version=version, num_bytes=weights.num_bytes)

    async def publish(self, version: int, *, restored: bool = False) -> None:
        """Publish the trainer's weights under a version; or the one that a checkpoint carries."""
        weights = await self._fetch(version, restored=restored)
        if not restored:
            self.state.version = version
            self.state.steps_since_publish = 0
        if not self._staleness.knows(version):
            self._staleness.publish(version, num_trained=self._ledger.num_trained_groups)
        self._store.add(weights)
        self._pool.published(version)
        self._recorder.event("weights_published", version=version, num_bytes=weights.num_bytes)

    async def _fetch(self, version: int, *, restored: bool) -> Weights:
        publish = self._trainer.publish_restored if restored else self._trainer.publish
        with self._booked("sync"), self._timed("param_sync"):
            return await publish(version)

    # -- records ------------------------------------------------------------------------------

    def _record(self, groups: Sequence[Group], result: TrainResult) -> None:
        now_s = self._now_s()
        step_s = now_s - self._step_began_s
        timing_s, self._timing_s = {**self._timing_s, "step": step_s}, {}
        self._step_began_s = now_s
        row: dict[str, Any] = {
            **group_metrics(groups, version=self.state.version),
            **result.metrics,
            **{f"timing_s/{name}": round(value, 6) for name, value in timing_s.items()},
            "fully_async/rollouter/idle_ratio": self._idle_ratio(step_s),
            "fully_async/count/groups_ready": self._ledger.num_ready,
            "fully_async/count/groups_running": self._rollouter.num_running,
        }
        self.last_metrics = row
        place = {
            "step": self.state.step,
            "policy_version": self.state.version,
            "time_s": round(self._run_time_s(), 6),
        }
        self._recorder.metrics({**place, **row})

    def _idle_ratio(self, step_s: float) -> float:
        """Share of the time since the row before in which a shared replica had no work."""
        busy_s, self._busy_before_s = self._pool.busy_s() - self._busy_before_s, self._pool.busy_s()
        total_s = step_s * self._config.rollout.replicas
        return round(min(1.0, max(0.0, 1 - busy_s / total_s)), 6) if total_s else 0.0

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the block's time to the step's timing of this name."""
        began_s = self._now_s()
        try:
            yield
        finally:
            self._timing_s[name] = self._timing_s.get(name, 0.0) + self._now_s() - began_s

    @contextmanager
    def _booked(self, cause: str) -> Iterator[None]:
        """Add the block's time to what the trainer waited for this cause."""
        began_s = self._now_s()
        try:
            yield
        finally:
            self.state.wait_s[cause] += self._now_s() - began_s

    @property
    def trigger(self) -> int:
        """Trainer steps between two publications."""
        return self._config.async_training.trigger_parameter_sync_step

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
