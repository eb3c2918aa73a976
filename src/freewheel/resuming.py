"""Taking up a run again: which checkpoint, whether it fits, and what becomes of all that is newer.

Nothing in the run folder changes before a checkpoint is found, verified and known to fit. What lies
after it in the story of the run then goes to `superseded/`; nothing is deleted.
"""

import sys
from pathlib import Path

from freewheel.checkpoint import (
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    point_latest_to,
    read_checkpoint,
    restore_replaced,
    step_of,
)
from freewheel.config import Config
from freewheel.control.run_state import ResumePoint, structure
from freewheel.errors import CheckpointError, ConfigError, RecordError
from freewheel.model_identity import model_differences
from freewheel.run_folder import RunFolder

_BEFORE_THE_KEY = {"model.lora_rank": 0}
"""What checkpoints were made with that do not name a structural key yet."""


def nothing_left(folder: RunFolder, config: Config, step: int | None) -> str | None:
    """Whether a run is complete, so that a resume would have nothing to do.

    Args:
        folder: of the run, open to read.
        config: checked configuration to go on with.
        step: the checkpoint's step to go on from; None: the newest.

    Returns:
        What to tell the user; None: there is something to do, or a checkpoint to make good.
    """
    summary = folder.read_summary()
    if summary is None or summary["status"] != "completed":
        return None
    done = int(summary["steps"])
    reason = _completeness(done, folder.read_config(), config)
    if reason is None or step not in (None, done):
        return None
    root = folder.checkpoints_path
    newest, _ = find_checkpoint(root)
    is_there = newest is not None and newest.step == done
    return reason if is_there or not list_checkpoints(root) else None


def _completeness(done: int, before: Config, now: Config) -> str | None:
    """Why a run that completed so many steps by one configuration is complete by another too."""
    if _scores_at_end(now) and not _scores_at_end(before):
        return None
    total, epochs = now.trainer.total_training_steps, now.trainer.total_epochs
    if total is not None:
        if done < total:
            return None
        key, of = "trainer.total_training_steps", f"{done} of {total} steps"
    elif before.trainer.total_training_steps is None and epochs <= before.trainer.total_epochs:
        key, of = "trainer.total_epochs", f"{done} steps, {before.trainer.total_epochs} epochs"
    else:
        return None
    return f"the run is complete ({of}); raise {key} to go on"


def _scores_at_end(config: Config) -> bool:
    return bool(config.data.val_files) and config.trainer.val_at_end


def take_up(folder: RunFolder, config: Config, model: Path, step: int | None) -> ResumePoint | None:
    """Find where to go on and bring the run folder to that moment.

    Args:
        folder: of the run, locked.
        config: checked configuration to go on with.
        model: the folder that `model.path` means.
        step: go on from the checkpoint of this step; None: from the newest whole one.

    Returns:
        Where to go on; None: there is no checkpoint yet, the run starts from the beginning.

    Raises:
        ConfigError: there is no checkpoint of that step.
        CheckpointError: it is broken, or does not fit; nothing was changed.
        RecordError: the records have fewer rows than the checkpoint knew, or the disk fails.
    """
    root = folder.checkpoints_path
    try:
        restore_replaced(root)
        checkpoint = _newest(root) if step is None else _of_step(root, step)
        if checkpoint is not None:
            _check_fits(checkpoint, config, model)
        _bring_back_to(folder, checkpoint)
    except OSError as error:
        raise RecordError(f"{error.filename or folder.path}: {error.strerror}") from error
    folder.write_config(config)
    return checkpoint and ResumePoint(folder=checkpoint.folder, control=checkpoint.control)


def _newest(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint; says which had to be passed over."""
    checkpoint, problems = find_checkpoint(root)
    for problem in problems:
        sys.stderr.write(f"passed over a broken checkpoint: {problem}\n")
    if checkpoint is not None:
        if problems:
            sys.stderr.write(f"going on from the previous good one: step {checkpoint.step}\n")
        return checkpoint
    if problems:
        raise CheckpointError(f"{root}: no checkpoint is whole; {problems[0]}")
    sys.stderr.write(f"{root}: no checkpoint yet, the run starts from the beginning\n")
    return None


def _of_step(root: Path, step: int) -> Checkpoint:
    """The checkpoint of a step that the user named; none other is taken for it."""
    found = {step_of(path): path for path in list_checkpoints(root)}
    if step not in found:
        there = ", ".join(str(other) for other in sorted(found)) or "none"
        raise ConfigError(f"{root}: no checkpoint of step {step}; there are: {there}")
    try:
        return read_checkpoint(found[step])
    except CheckpointError as error:
        other, _ = find_checkpoint(root)
        offer = (
            "no other is whole"
            if other is None
            else f"the newest whole one is of step {other.step} (--from {other.step})"
        )
        raise CheckpointError(f"{error}; {offer}") from error


def _check_fits(checkpoint: Checkpoint, config: Config, model: Path) -> None:
    """The run is the same one: what gives samples their identity, and the model."""
    now = structure(config)
    before = dict.fromkeys(now) | _BEFORE_THE_KEY | checkpoint.control["structure"]
    changed = [
        f"{key}={now[key]!r}, but the run has {before[key]!r}"
        for key in now
        if now[key] != before[key]
    ]
    if changed:
        raise CheckpointError(f"a resumed run cannot change {'; '.join(changed)}")
    differences = model_differences(checkpoint.folder / "hf", model)
    if differences:
        raise CheckpointError(
            f"{checkpoint.folder}: is of another model than model.path={config.model.path}: "
            f"{'; '.join(differences)}"
        )


def _bring_back_to(folder: RunFolder, checkpoint: Checkpoint | None) -> None:
    """Move what is newer to `superseded/`. Cut off at any point, it can be done again.

    Checkpoints first: one that is newer than the records would be taken for the newest.
    """
    num_rows = {} if checkpoint is None else checkpoint.control["num_rows"]
    folder.check_rows(num_rows)
    if checkpoint is not None:
        for path in list_checkpoints(folder.checkpoints_path):
            if step_of(path) > checkpoint.step:
                moved = folder.supersede_checkpoint(path)
                sys.stderr.write(f"{path.name} is newer; it lies in {moved} now\n")
        point_latest_to(checkpoint.folder)
    folder.tidy()
    folder.cut_back(num_rows)
