"""Checkpoints: a cut taken between two steps, written beside training.

The control state of a cut is collected without an await, so that it is one moment; the trainer's
part is copied in memory while the train loop waits; everything is written later, by this loop. At
most two copies exist: one that is being written and one that waits.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.config.sections import Config
from freewheel.control.waits import Channel, Signal, WaitTable
from freewheel.errors import CheckpointError
from freewheel.protocols import CheckpointStore, Recorder, Trainer
from freewheel.types import Ref, Weights

MAX_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CutState:
    """The control plane's part of a cut; the references keep its bulk data alive until written.

    `held` are the published versions, ascending, that differ from the trainer's weights and that
    rollouts or validations need to go on.
    """

    control: dict[str, Any]
    trajectories: Sequence[Ref]
    held: Sequence[Weights]


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
        trainer: Trainer,
        store: CheckpointStore,
        collect: Callable[[], CutState],
        waits: WaitTable,
        recorder: Recorder,
    ) -> None:
        self.saved_steps: list[int] = []
        self._config = config
        self._trainer = trainer
        self._store = store
        self._collect = collect
        self._waits = waits
        self._recorder = recorder
        self._changed = Signal()
        self._jobs: Channel[_Job] = Channel(MAX_COPIES)
        self.num_copies = 0

    async def cut(self, step: int) -> None:
        """Take the state of this moment. Called by the train loop between two steps."""
        if self.num_copies >= MAX_COPIES:
            with self._waits.waiting("train", "room for a copy", held_by=("checkpoint",)):
                await self._changed.until(lambda: True if self.num_copies < MAX_COPIES else None)
        state = self._collect()
        self.num_copies += 1
        try:
            await self._copy(step)
        except BaseException:
            self.num_copies -= 1
            raise
        taken_s = asyncio.get_running_loop().time()
        self._jobs.put_nowait(_Job(step=step, state=state, taken_s=taken_s))
        self._recorder.event("checkpoint_cut", step=step)

    async def _copy(self, step: int) -> None:
        limit_s = self._config.health.checkpoint_timeout_s
        async with self._waits.limited(
            "train",
            "checkpoint copy",
            held_by=("trainer",),
            timeout_s=limit_s,
            otherwise=lambda: CheckpointError(
                f"checkpoint of step {step}: not copied within {limit_s:g} s "
                "(health.checkpoint_timeout_s)"
            ),
        ):
            await self._trainer.copy_state(step)

    async def run(self) -> None:
        """Write cuts, one after the other.

        Consumes: cuts of the train loop.
        Produces: checkpoint folders; `latest` moves last.
        Waits for: a cut; the trainer's writing; the disk.
        Unblocked by: train; the disk; its own deadline.
        """
        async for job in self._jobs:
            await self._write(job)
            self.num_copies -= 1
            self._changed.notify()

    async def _write(self, job: _Job) -> None:
        limit_s = self._config.health.checkpoint_timeout_s
        async with self._waits.limited(
            "checkpoint",
            f"write of step {job.step}",
            held_by=("trainer", "disk"),
            timeout_s=limit_s,
            otherwise=lambda: CheckpointError(
                f"checkpoint of step {job.step}: not written within {limit_s:g} s "
                "(health.checkpoint_timeout_s); the previous one is untouched"
            ),
        ):
            folder = await self._store.begin(job.step)
            await self._trainer.write_state(
                job.step, folder, job.state.trajectories, job.state.held
            )
            await self._recorder.flush()
            path = await self._store.commit(job.step, job.state.control)
        self.saved_steps.append(job.step)
        self._recorder.event(
            "checkpoint_saved",
            step=job.step,
            path=str(path),
            wall_s=round(asyncio.get_running_loop().time() - job.taken_s, 6),
        )

    async def drain(self) -> None:
        """Wait until every cut is written."""
        with self._waits.waiting("train", "checkpoints to be written", held_by=("checkpoint",)):
            await self._changed.until(lambda: True if self.num_copies == 0 else None)
