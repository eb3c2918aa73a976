"""Keeps the trainer alive: one that is lost is replaced and brought back to where it was.

The keeper is the trainer that the other roles see; it sets the deadlines of its calls. A lost or
overdue trainer is killed, started again from the newest checkpoint, and trained again on the same
batches in the same order (the journal), so that nothing outside of it changes: no sample is counted
twice, no version is another one than before, rollouts and validation go on meanwhile. On the CPU
the weights are the same bit for bit. A call that loses the trainer again and again ends the run.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from freewheel.config.sections import HealthConfig
from freewheel.control import trainer_calls as calls
from freewheel.control.restarts import Restarts
from freewheel.control.trainer_calls import Call
from freewheel.control.trainer_journal import TrainJournal
from freewheel.control.waits import WaitTable, because
from freewheel.errors import (
    CheckpointError,
    FreewheelError,
    InvariantError,
    StartupError,
    TrainerLostError,
    TrainerStateLostError,
    TrajectoriesLostError,
    WeightsLostError,
)
from freewheel.protocols import Recorder, Trainer, Watched
from freewheel.types import Ref, TrainerInfo, TrainRequest, TrainResult, Weights

T = TypeVar("T")

_MAX_OVERDUE = 1
"""So often a trainer that does not answer a call in time is replaced."""
_MAX_LOSSES = 3
"""Of trainers over one call, in a row: more is no accident, the call kills the trainer."""
_RESTORED = -1
"""Instead of a step: the version was not published by this life first, a checkpoint carries it."""


class OverdueError(Exception):
    """A call to the trainer was not answered within its limit; `error` is what that amounts to."""

    def __init__(self, error: FreewheelError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Publication:
    """The step after which a version was first published; the trainer that did so last."""

    step: int
    trainer: Trainer


class TrainerKeeper:
    """See the module's docstring.

    Attributes:
        saving: held while a checkpoint becomes whole, and while a trainer is replaced.
        num_moves: calls to trainers that were answered.
        is_replacing: whether a replacement is under way.
        num_replaced: replacements that are over.

    Args:
        make: makes a trainer that is yet to be started.
        health: limits.
        restarts: the run's allowance of replacements.
        waits: the wait table.
        recorder: takes the events.
        on_republished: is given published weights again after a replacement, as the first ones may
            have been lost with the trainer's node: the newest, and those that a cut needs which is
            not written yet.
    """

    def __init__(
        self,
        make: Callable[[], Trainer],
        *,
        health: HealthConfig,
        restarts: Restarts,
        waits: WaitTable,
        recorder: Recorder,
        on_republished: Callable[[Weights], None],
    ) -> None:
        self.num_moves = 0
        self.is_replacing = False
        self.num_replaced = 0
        self._make = make
        self._health = health
        self._restarts = restarts
        self._waits = waits
        self._recorder = recorder
        self._on_republished = on_republished
        self._trainer = make()
        self._replacing = asyncio.Lock()
        self.saving = asyncio.Lock()
        self._journal = TrainJournal(health.trainer_replay_bytes)
        self._saved_step = 0
        self._saved_folder: Path | None = None
        self._num_lost: Counter[str] = Counter()
        self._is_needed = False
        # By step: the published versions that the cut needs, that the checkpoint carries.
        self._copies: dict[int, set[int]] = {}
        self._carried: dict[int, set[int]] = {}
        self._published: dict[int, _Publication] = {}
        self._step = 0

    @property
    def processes(self) -> Sequence[Watched]:
        """The processes of the present trainer, by rank; none while it is being replaced."""
        return () if self.is_replacing else self._trainer.processes

    @property
    def waiting_for(self) -> str:
        """What a start that is under way waits for; empty if it waits for nothing."""
        return self._trainer.waiting_for

    async def start(self, checkpoint: Path | None) -> None:
        """Bring the first trainer up, from a checkpoint's folder if one is given.

        Raises:
            StartupError: it did not come up within `health.startup_timeout_s`.
            TrainerLostError: it died again and again.
        """
        while True:
            try:
                info = await self._start(checkpoint, waiter="train")
                break
            except TrainerLostError as lost:
                self._trainer.kill()
                self._restarts.spend("trainer", lost)
                self._trainer = self._make()
        self._saved_folder, self._saved_step = checkpoint, info.step
        self._step = info.step
        self._journal.begin(info.step)
        self._is_needed = True

    async def train_step(self, request: TrainRequest) -> TrainResult:
        """Train on whole groups, and remember them until a checkpoint holds what they taught."""
        call = calls.training(request.step, waiter="train", health=self._health)
        result = await self._answer(call, lambda trainer: trainer.train_step(request))
        self._step = request.step
        self._journal.add(request)
        return result

    async def publish(self, version: int) -> Weights:
        """Copy the current weights to where replicas can fetch them."""
        step = self._step
        weights = await self._answer(
            calls.publication(version, waiter="train", health=self._health),
            lambda t: t.publish(version),
        )
        self._note_publication(version, step)
        return weights

    async def publish_restored(self, version: int) -> Weights:
        """Publish again a version that the checkpoint carries beside the trainer's weights."""
        call = calls.publication(version, waiter="train", health=self._health)
        weights = await self._answer(call, lambda t: t.publish_restored(version))
        self._note_publication(version, _RESTORED)
        self._carried.setdefault(self._saved_step, set()).add(version)
        return weights

    async def copy_state(self, step: int, held: Sequence[int]) -> None:
        """Copy model, optimizer, schedule and RNG in memory, to be written later.

        Args:
            step: which the trainer is at.
            held: the published versions that are to be written with it.
        """
        await self._answer(
            calls.copying(step, waiter="train", health=self._health),
            lambda trainer: trainer.copy_state(step),
        )
        self._copies[step] = set(held)

    async def write_state(
        self,
        step: int,
        folder: Path,
        trajectories: Sequence[Ref],
        look_up_held: Callable[[], Sequence[Weights]],
    ) -> None:
        """Write the copy of a step, however long it takes: its caller tells when it is overdue.

        Args:
            step: the copy's.
            folder: exists.
            trajectories: to be written with it.
            look_up_held: gives the published versions to be written with it. Asked again for each
                trainer: what the one before published may have gone down with it.

        Raises:
            TrajectoriesLostError, WeightsLostError: see `Trainer.write_state`.
        """

        def write(trainer: Trainer) -> Awaitable[None]:
            held = look_up_held()
            self._copies[step] = self._carried[step] = {weights.version for weights in held}
            return trainer.write_state(step, folder, trajectories, held)

        await self._answer(calls.writing(step, health=self._health), write)
        del self._copies[step]

    async def load_trajectories(self, folder: Path, group_ids: Sequence[int]) -> list[Ref]:
        """References to the trajectories of these groups, read from a checkpoint's folder."""

        async def load(trainer: Trainer) -> list[Ref]:
            return trainer.load_trajectories(folder, group_ids)

        # The limit is never reached: the references are there at once.
        limit_s = self._health.startup_timeout_s
        call = Call(waiter="train", what="trajectories of the checkpoint", limit_s=limit_s)
        return await self._answer(call, load)

    def saved(self, step: int, folder: Path) -> None:
        """A checkpoint is whole: a lost trainer starts from it. Called under `saving`."""
        self._saved_step, self._saved_folder = step, folder
        self._carried = {s: held for s, held in self._carried.items() if s >= step}
        self._journal.forget(step)

    async def renew(self, version: int, lost: WeightsLostError, *, waiter: str) -> None:
        """Publish a version again, if that is possible. What it had published went down, so it did.

        It is not possible if the trainer has been replaced since and has not done so already: the
        newest checkpoint is of a later step than the version. To replace it again would not help.
        """
        publication = self._published.get(version)
        if self._replacing.locked():
            await self._replacement(waiter)
        elif publication is not None and publication.trainer is self._trainer:
            await self._replace(self._trainer, TrainerLostError(str(lost)), waiter)

    async def report_lost(self, process: Watched, cause: str) -> None:
        """Replace the trainer if a process that is gone is one of its own, before a call finds it.

        Not during a start, which sees to it itself, nor once no call is to come (`dismiss`).
        """
        trainer = self._trainer
        if self._is_needed and not self.is_replacing and process in trainer.processes:
            await self._replace(trainer, TrainerLostError(cause), "process-watch")

    def dismiss(self) -> None:
        """Nothing more is to be trained or saved: a loss matters to those only who call again."""
        self._is_needed = False

    def kill(self) -> None:
        """End the processes at once. Idempotent; never waits."""
        self._trainer.kill()

    def _note_publication(self, version: int, step: int) -> None:
        self._published[version] = _Publication(step=step, trainer=self._trainer)
        self._published = self._wanted()

    def _wanted(self) -> dict[int, _Publication]:
        """Publications of use: the newest, and those that cuts need which are not written yet."""
        held = {version for versions in self._copies.values() for version in versions}
        newest = max(self._published, default=None)
        return {v: p for v, p in self._published.items() if v == newest or v in held}

    # -- calls --------------------------------------------------------------------------------

    async def _answer(self, call: Call, ask: Callable[[Trainer], Awaitable[T]]) -> T:
        """The answer to a call, from another trainer if the first is lost over it, or overdue."""
        num_overdue = 0
        while True:
            trainer = await self._current(call)
            try:
                return await self._ask(call, ask, trainer)
            except OverdueError as error:
                num_overdue += 1
                if num_overdue > _MAX_OVERDUE:
                    raise error.error from error
                await self._replace(trainer, TrainerLostError(str(error)), call.waiter)
            except TrainerLostError as error:
                await self._replace(trainer, error, call.waiter)

    async def _current(self, call: Call) -> Trainer:
        """The trainer, after the end of a replacement that is under way."""
        if self._replacing.locked():
            await self._replacement(call.waiter)
        return self._trainer

    async def _replacement(self, waiter: str) -> None:
        with self._waits.waiting(waiter, "the trainer's replacement", held_by=("trainer",)):
            async with self._replacing:
                pass

    async def _ask(self, call: Call, ask: Callable[[Trainer], Awaitable[T]], trainer: Trainer) -> T:
        waiter, what, limit_s, overdue = call.waiter, call.what, call.limit_s, call.overdue
        held_by = ("trainer",)
        if overdue is None:
            with self._waits.waiting(waiter, what, held_by=held_by, timeout_s=limit_s):
                return await self._counting(what, ask(trainer))
        async with self._waits.limited(
            waiter,
            what,
            held_by=held_by,
            timeout_s=limit_s,
            otherwise=lambda: OverdueError(overdue),
        ):
            return await self._counting(what, ask(trainer))

    async def _counting(self, what: str, answer: Awaitable[T]) -> T:
        """Await an answer, and count the trainers that are lost over it in a row."""
        try:
            result = await answer
        except TrainerLostError:
            self._num_lost[what] += 1
            raise
        self._num_lost.pop(what, None)
        self.num_moves += 1
        return result

    # -- replacement --------------------------------------------------------------------------

    async def _replace(self, lost: Trainer, cause: TrainerLostError, waiter: str) -> None:
        """Replace a lost trainer, unless another caller has done so meanwhile."""
        async with self._replacing:
            if self._trainer is not lost:
                return
            self.is_replacing = True
            try:
                # A checkpoint that became whole meanwhile would be another one to start from.
                await self._wait_for_commit(waiter)
                try:
                    await self._replace_until_up(cause, waiter)
                finally:
                    self.saving.release()
            except BaseException:  # cancelled, too: nobody may take it for one that is whole
                self._trainer.kill()
                raise
            finally:
                self.is_replacing = False
                self.num_replaced += 1
                self._restarts.arrivals.notify()

    async def _wait_for_commit(self, waiter: str) -> None:
        limit_s = self._health.checkpoint_timeout_s
        async with self._waits.limited(
            waiter,
            "a checkpoint's commit to end",
            held_by=("checkpoint",),
            timeout_s=limit_s,
            otherwise=lambda: CheckpointError(
                f"a checkpoint is being committed for more than {limit_s:g} s "
                "(health.checkpoint_timeout_s), and the trainer is lost"
            ),
        ):
            await self.saving.acquire()

    async def _replace_until_up(self, cause: TrainerLostError, waiter: str) -> None:
        self._check_replayable(cause)
        while True:
            self._trainer.kill()
            if max(self._num_lost.values(), default=0) >= _MAX_LOSSES:
                raise cause
            self._restarts.spend("trainer", cause)
            self._trainer = self._make()
            try:
                await self._bring_back(waiter)
            except OverdueError as error:
                raise error.error from cause
            except TrainerStateLostError:
                raise
            except TrainerLostError as error:
                cause = error
            else:
                return

    def _check_replayable(self, cause: TrainerLostError) -> None:
        if self._saved_step < self._journal.begins_after:
            raise TrainerStateLostError(
                f"{cause}; it cannot be brought back: what was trained since the checkpoint of "
                f"step {self._saved_step} is more than health.trainer_replay_bytes="
                f"{self._health.trainer_replay_bytes} holds"
            ) from cause

    async def _bring_back(self, waiter: str) -> None:
        """Start from the newest checkpoint, train again on what came since."""
        began_s = asyncio.get_running_loop().time()
        info = await self._start(self._saved_folder, waiter=waiter)
        if info.step != self._saved_step:
            raise InvariantError(
                f"the trainer started from step {info.step}, the journal from {self._saved_step}"
            )
        carried = self._carried.get(self._saved_step, set[int]())
        for version, publication in self._wanted().items():
            if version in carried:
                await self._republish(version, publication, waiter, restored=True)
        await self._catch_up(self._saved_step, waiter)
        for request in self._journal:
            await self._replay(request, waiter)
            await self._catch_up(request.step, waiter)
        self._recorder.event(
            "trainer_replayed",
            from_step=self._saved_step,
            to_step=self._step,
            wall_s=round(asyncio.get_running_loop().time() - began_s, 6),
        )

    async def _start(self, checkpoint: Path | None, *, waiter: str) -> TrainerInfo:
        limit_s, trainer = self._health.startup_timeout_s, self._trainer
        async with self._waits.limited(
            waiter,
            "the trainer's process and model",
            held_by=("trainer",),
            note=lambda: trainer.waiting_for,
            timeout_s=limit_s,
            otherwise=lambda: StartupError(
                f"the trainer did not come up within {limit_s:g} s (health.startup_timeout_s)"
                f"{because(trainer.waiting_for)}"
            ),
        ):
            info = await self._counting("start", trainer.start(checkpoint))
        self._restarts.came_up("trainer")
        self._recorder.event("trainer_up", **asdict(info))
        return info

    async def _replay(self, request: TrainRequest, waiter: str) -> None:
        call = calls.training(request.step, waiter=waiter, health=self._health)
        try:
            await self._ask(call, lambda trainer: trainer.train_step(request), self._trainer)
        except TrajectoriesLostError as error:
            raise TrainerStateLostError(
                f"the trainer cannot be brought back: trajectories of step {request.step} are "
                f"gone, too ({error})"
            ) from error

    async def _catch_up(self, step: int, waiter: str) -> None:
        """Do again what followed a step: the copy that is to be written, the publications."""
        if step in self._copies:
            await self._ask(
                calls.copying(step, waiter=waiter, health=self._health),
                lambda t: t.copy_state(step),
                self._trainer,
            )
        for version, publication in self._wanted().items():
            if publication.step == step:
                await self._republish(version, publication, waiter, restored=False)

    async def _republish(
        self, version: int, publication: _Publication, waiter: str, *, restored: bool
    ) -> None:
        call = calls.publication(version, waiter=waiter, health=self._health)
        if restored:
            weights = await self._ask(call, lambda t: t.publish_restored(version), self._trainer)
        else:
            weights = await self._ask(call, lambda t: t.publish(version), self._trainer)
        self._published[version] = replace(publication, trainer=self._trainer)
        self._on_republished(weights)
