"""Checkpoints: a cut taken between two steps, written beside training.

The control state of a cut is collected without an await, so that it is one moment; the trainer's
part is copied in memory while the train loop waits; everything is written later, by this loop. At
most two copies exist: one that is being written and one that waits.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from freewheel.config.sections import Config
from freewheel.control.ledger import without_outcomes
from freewheel.control.trainer_keeper import TrainerKeeper
from freewheel.control.waits import Channel, Signal, WaitTable
from freewheel.control.weight_store import WeightStore
from freewheel.errors import CheckpointError, TrajectoriesLostError, WeightsLostError
from freewheel.protocols import CheckpointStore, Recorder
from freewheel.types import Ref, Weights

T = TypeVar("T")

MAX_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CutState:
    """The control plane's part of a cut; the references keep its bulk data alive until written.

    `held` are the published versions, ascending, that differ from the trainer's weights and that
    rollouts or validations need to go on; `rollout_version` is that of the rollouts, if it is one
    of them. `trajectories` are those of the ready groups, and `owners` the group ids, one each.
    """

    control: dict[str, Any]
    trajectories: Sequence[Ref]
    owners: Sequence[int]
    held: Sequence[int]
    rollout_version: int | None

    def without(self, positions: Sequence[int]) -> "CutState":
        """The cut with the groups of these trajectories as not finished."""
        lost = {self.owners[position] for position in positions}
        kept = [i for i, owner in enumerate(self.owners) if owner not in lost]
        ledger = self.control["ledger"]
        return replace(
            self,
            control={**self.control, "ledger": without_outcomes(ledger, lost)},
            trajectories=[self.trajectories[i] for i in kept],
            owners=[self.owners[i] for i in kept],
        )

    def without_versions(self, versions: Collection[int]) -> "CutState":
        """The cut without these held versions: a resume ends the validations that need them."""
        held = [version for version in self.held if version not in versions]
        return replace(self, control={**self.control, "held_versions": held}, held=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    step: int
    state: CutState
    taken_s: float


class Checkpointer:
    """Loop `checkpoint`. See the module's docstring."""

    def __init__(
        self,
        config: Config,
        *,
        trainer: TrainerKeeper,
        store: CheckpointStore,
        collect: Callable[[], CutState],
        weights: WeightStore,
        waits: WaitTable,
        recorder: Recorder,
    ) -> None:
        self.saved_steps: list[int] = []
        self._config = config
        self._trainer = trainer
        self._store = store
        self._collect = collect
        self._weights = weights
        self._sent: dict[int, Weights] = {}
        self._waits = waits
        self._recorder = recorder
        self._changed = Signal()
        self._jobs: Channel[_Job] = Channel(MAX_COPIES)
        self.num_copies = 0
        self.num_moves = 0
        self.overdue: str | None = None
        self._part = ""

    async def cut(self, step: int) -> None:
        """Take the state of this moment. Called by the train loop between two steps."""
        if self.num_copies >= MAX_COPIES:
            with self._waits.waiting("train", "room for a copy", held_by=("checkpoint",)):
                await self._changed.until(
                    lambda: self._unless_overdue(self.num_copies < MAX_COPIES)
                )
        self._unless_overdue(ready=True)
        state = self._collect()
        for version in state.held:
            self._weights.hold(version)
        # Counted when it is there: the train loop alone takes copies, one after the other.
        await self._trainer.copy_state(step, state.held)
        self.num_copies += 1
        taken_s = asyncio.get_running_loop().time()
        self._jobs.put_nowait(_Job(step=step, state=state, taken_s=taken_s))
        self._recorder.event("checkpoint_cut", step=step)

    async def run(self) -> None:
        """Write cuts, one after the other. One that is overdue ends the run when the next is due.

        Consumes: cuts of the train loop.
        Produces: checkpoint folders; `latest` moves last.
        Waits for: a cut; the trainer's writing; the disk.
        Unblocked by: train; the disk.
        """
        async for job in self._jobs:
            await self._write_watched(job)
            for version in job.state.held:
                self._weights.release(version)
            self.num_copies -= 1
            self._changed.notify()

    async def _write_watched(self, job: _Job) -> None:
        """Write a cut; tell when it takes too long, and go on: training does not need it yet."""
        limit_s = self._config.health.checkpoint_timeout_s
        async with asyncio.TaskGroup() as group:
            write = group.create_task(self._write(job), name=f"checkpoint-{job.step}")
            if not await self._is_written(write, limit_s):
                self.overdue = (
                    f"checkpoint of step {job.step}: {self._part} not written within {limit_s:g} s "
                    "(health.checkpoint_timeout_s); the previous one is untouched"
                )
                self._recorder.event(
                    "checkpoint_overdue",
                    step=job.step,
                    limit_s=limit_s,
                    waits=self._waits.describe(),
                )
                self._changed.notify()
        self.overdue = None

    async def _is_written(self, write: asyncio.Task[None], limit_s: float) -> bool:
        """Whether it ends within its limit; after a replacement of the trainer it has it anew."""
        while True:
            before = self._trainer.num_replaced
            done, _ = await asyncio.wait({write}, timeout=limit_s)
            if done:
                return True
            if self._trainer.num_replaced == before and not self._trainer.is_replacing:
                return False

    def _unless_overdue(self, ready: bool) -> bool | None:
        """True if it is ready, None if not yet.

        Raises:
            CheckpointError: a write is overdue, and the next one is due.
        """
        if self.overdue is not None:
            raise CheckpointError(self.overdue)
        return True if ready else None

    async def _write(self, job: _Job) -> None:
        folder = await self._on_disk(job, "folder", self._store.begin(job.step))
        state = await self._write_state(job, folder)
        await self._on_disk(job, "records", self._recorder.flush())
        # Those that were saved by now: an earlier one may have been unwritten at the cut.
        control = {**state.control, "checkpoints": list(self.saved_steps)}
        with self._waits.waiting("checkpoint", "a trainer's replacement", held_by=("trainer",)):
            await self._trainer.saving.acquire()
        try:
            path = await self._on_disk(job, "manifest", self._store.commit(job.step, control))
            self._trainer.saved(job.step, path)
        finally:
            self._trainer.saving.release()
        self.saved_steps.append(job.step)
        self._recorder.event(
            "checkpoint_saved",
            step=job.step,
            path=str(path),
            wall_s=round(asyncio.get_running_loop().time() - job.taken_s, 6),
        )

    async def _write_state(self, job: _Job, folder: Path) -> CutState:
        """The trainer's part, without what is lost and can be spared.

        Groups whose trajectories are lost run again after a resume.
        """
        state, self._part = job.state, "state"
        while True:
            look_up = partial(self._look_up, state.held)
            try:
                await self._trainer.write_state(job.step, folder, state.trajectories, look_up)
            except TrajectoriesLostError as error:
                state = state.without(error.positions)
                self._recorder.event("trajectories_lost", step=job.step, reason=str(error))
            except WeightsLostError as error:
                state = await self._renew_or_spare(job.step, state, error)
            else:
                return state

    def _look_up(self, versions: Sequence[int]) -> list[Weights]:
        """The held versions as they are now: a replaced trainer has published some again."""
        self._sent = {version: self._weights.get(version) for version in versions}
        return list(self._sent.values())

    async def _renew_or_spare(
        self, step: int, state: CutState, error: WeightsLostError
    ) -> CutState:
        """The cut to try again with, after some of its held versions turned out to be lost.

        Raises:
            WeightsLostError: rollouts could not go on without one that nobody can publish again.
        """
        lost = [v for v in (error.versions or state.held) if v in self._sent]
        if not lost:
            raise error
        for version in lost:
            self._recorder.event("weights_lost", version=version, step=step, reason=str(error))
        for version in lost:
            # One that a validation alone needs is not worth a trainer that works.
            is_worth_it = version == state.rollout_version or self._is_newest(version)
            if is_worth_it and self._is_still_lost(version):
                await self._trainer.renew(version, error, waiter="checkpoint")
        gone = [version for version in lost if self._is_still_lost(version)]
        if state.rollout_version in gone:
            raise error
        return state.without_versions(gone)

    def _is_still_lost(self, version: int) -> bool:
        """True if nobody has published it again since it was sent."""
        return self._weights.get(version) is self._sent[version]

    def _is_newest(self, version: int) -> bool:
        latest = self._weights.latest
        return latest is not None and latest.version == version

    async def _on_disk(self, job: _Job, what: str, write: Awaitable[T]) -> T:
        """Something that this process writes; `_write_watched` looks after the limit."""
        self._part = what
        with self._waits.waiting(
            "checkpoint",
            f"{what} of step {job.step}",
            held_by=("disk",),
            timeout_s=self._config.health.checkpoint_timeout_s,
        ):
            result = await write
        self.num_moves += 1
        return result

    async def drain(self) -> None:
        """Wait until every cut is written.

        Raises:
            CheckpointError: a write is overdue.
        """
        with self._waits.waiting("train", "checkpoints to be written", held_by=("checkpoint",)):
            await self._changed.until(lambda: self._unless_overdue(self.num_copies == 0))
