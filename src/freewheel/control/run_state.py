"""The control plane's state: taken at a cut, taken over by a resume.

A cut is collected without an await, so that it is one moment of all roles.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freewheel.checkpoint import CONTROL_FORMAT
from freewheel.config.sections import Config
from freewheel.control.checkpointing import CutState
from freewheel.control.roles import Roles
from freewheel.control.train_loop import TrainState
from freewheel.control.validation import Due
from freewheel.errors import CheckpointError
from freewheel.protocols import Recorder
from freewheel.types import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint to go on from: its folder and its control state."""

    folder: Path
    control: dict[str, Any]


class RunState:
    """Collects and restores the state of all roles.

    Args:
        config: checked configuration.
        roles: whose state it is.
        recorder: knows how many rows are recorded.
        now_s: seconds since the run's first start.
    """

    def __init__(
        self, config: Config, *, roles: Roles, recorder: Recorder, now_s: Callable[[], float]
    ) -> None:
        self._config = config
        self._roles = roles
        self._recorder = recorder
        self._now_s = now_s
        self._loop = asyncio.get_running_loop()
        self._loop_began_s = self._loop.time()
        self._carried_busy = (0.0, 0.0)

    def collect(self) -> CutState:
        """The control plane's state of this moment. No await, so that it is one moment."""
        train = self._roles.train.state
        ready = [group for group in self._roles.ledger.open.values() if group.ready]
        datasets = self._roles.workers.datasets or {}
        rollout_version = self._rollout_version()
        held = self._held_versions(rollout_version)
        train_data, val_data = datasets.get(Split.TRAIN), datasets.get(Split.VALIDATION)
        control = {
            "format": CONTROL_FORMAT,
            "structure": structure(self._config),
            "data_fingerprint": train_data and train_data.fingerprint,
            "val_data_fingerprint": val_data and val_data.fingerprint,
            "train": asdict(train),
            "ledger": self._roles.ledger.state(),
            "staleness": self._roles.staleness.state(),
            "validations": self._roles.validator.state(),
            "held_versions": held,
            "num_rows": self._recorder.num_rows(),
            "num_validations": self._roles.validator.num_recorded,
            "run_s": self._now_s(),
            "busy_s": self.busy_and_total_s(),
        }
        return CutState(
            control=control,
            trajectories=tuple(ref for group in ready for ref in group.payloads),
            owners=tuple(group.group_id for group in ready for _ in group.payloads),
            held=held,
            rollout_version=rollout_version,
        )

    def _rollout_version(self) -> int | None:
        """The version that rollouts of a resumed run go on with, if the trainer has newer ones."""
        train = self._roles.train.state
        is_between = train.steps_since_publish % self._roles.train.trigger != 0
        return train.version if is_between else None

    def _held_versions(self, rollout_version: int | None) -> list[int]:
        """Published versions, ascending, that a resumed run needs and the trainer has no more.

        The one that rollouts go on with, between two publications; those of the validations.
        """
        train = self._roles.train.state
        wanted = {row["version"] for row in self._roles.validator.state()}
        if rollout_version is not None:
            wanted.add(rollout_version)
        if train.steps_since_publish == 0:
            wanted.discard(train.version)
        return [version for version in sorted(wanted) if self._roles.store.has(version)]

    def restore(self, control: dict[str, Any]) -> None:
        """Take over the control plane's state of a checkpoint. Needs no worker."""
        self._roles.train.state = TrainState(**control["train"])
        self._roles.staleness.restore(control["staleness"])
        self._roles.ledger.restore(control["ledger"])
        self._roles.validator.num_recorded = control["num_validations"]
        self._roles.checkpointer.saved_steps = [
            *control["checkpoints"],
            self._roles.train.state.step,
        ]
        self._carried_busy = tuple(control["busy_s"])

    async def rejoin(self, resume: ResumePoint) -> None:
        """What a resume needs workers for: check the data, name the trajectories, validations."""
        await self._roles.workers.dataset(Split.TRAIN, "train")
        self._check_data(resume)
        ready = self._roles.ledger.ready_ids()
        refs = await self._roles.trainer.load_trajectories(resume.folder, ready)
        self._roles.ledger.attach(dict(zip(ready, refs, strict=True)))
        await self._take_up_validations(resume.control)

    async def _take_up_validations(self, control: dict[str, Any]) -> None:
        """Go on with the validations of the cut, as far as their weights are still there."""
        version = self._roles.train.state.version
        kept: set[int] = set(control.get("held_versions", ()))
        to_come = set[int]() if self._roles.train.publication_due() else {version}
        for due in sorted((Due(**row) for row in control["validations"]), key=lambda d: d.version):
            if not self._config.data.val_files:
                self._roles.validator.skip(due, "the run was resumed without data.val_files")
            elif due.version in kept | to_come:
                self._roles.validator.take_up(due)
            else:
                self._roles.validator.skip(due, "the run was resumed; its policy version is gone")
        for older in sorted(kept - to_come):
            if self._roles.store.is_held(older):
                await self._roles.train.take_back(older)

    def _check_data(self, resume: ResumePoint) -> None:
        """Samples are numbered by the training data; scores of other held-out data do not compare.

        Validation may be left out or begun: only data in the place of other data is refused.
        """
        kinds = {
            "train": (Split.TRAIN, resume.control["data_fingerprint"]),
            "val": (Split.VALIDATION, resume.control.get("val_data_fingerprint")),
        }
        for kind, (split, before) in kinds.items():
            info = (self._roles.workers.datasets or {}).get(split)
            if info is not None and before not in (None, info.fingerprint):
                raise CheckpointError(
                    f"{resume.folder}: its data.{kind}_files (or data.{kind}_max_samples) held "
                    f"other prompts: fingerprint {before}, now {info.fingerprint}"
                )

    def busy_and_total_s(self) -> tuple[float, float]:
        """Seconds in which shared replicas had work, and all there were, over all lives."""
        busy_s, total_s = self._carried_busy
        elapsed_s = self._loop.time() - self._loop_began_s
        shared = self._config.rollout.replicas
        return busy_s + self._roles.pool.busy_s(), total_s + elapsed_s * shared


def structure(config: Config) -> dict[str, Any]:
    """The configuration keys that a resumed run cannot change."""
    return {
        "rollout.n": config.rollout.n,
        "actor.ppo_mini_batch_size": config.actor.ppo_mini_batch_size,
        "async_training.require_batches": config.async_training.require_batches,
        "async_training.trigger_parameter_sync_step": (
            config.async_training.trigger_parameter_sync_step
        ),
        "data.shuffle": config.data.shuffle,
        "trainer.seed": config.trainer.seed,
        **_adapter_structure(config),
    }


def _adapter_structure(config: Config) -> dict[str, Any]:
    """What is trained: the weights, or an adapter of this rank, scale and place."""
    model = config.model
    if not model.lora_rank:
        return {"model.lora_rank": 0}
    targets = model.target_modules
    return {
        "model.lora_rank": model.lora_rank,
        "model.lora_alpha": model.lora_alpha,
        "model.target_modules": targets if isinstance(targets, str) else list(targets),
    }
