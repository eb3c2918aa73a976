"""What checkpoints a run has, and in which state each is: for people who look at a run folder."""

from dataclasses import dataclass
from pathlib import Path

from freewheel.checkpoint.reader import (
    LATEST,
    MANIFEST,
    Manifest,
    list_checkpoints,
    read_checkpoint,
    read_control,
    step_of,
)
from freewheel.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One checkpoint folder.

    Attributes:
        policy_version: of the weights that the rollouts had; None if it cannot be read.
        num_bytes: size of all files by the manifest; None if there is none.
        written: when it was complete, in seconds since the epoch; None as before.
        verified: whether contents were compared, not sizes alone.
        problem: what is wrong with it; None: nothing.
    """

    path: Path
    step: int
    policy_version: int | None
    num_bytes: int | None
    written: float | None
    is_latest: bool
    verified: bool
    problem: str | None


def look_at_checkpoints(root: Path, *, verify: bool) -> list[Listed]:
    """All checkpoints under a run's `checkpoints` folder, oldest first. Changes nothing.

    Args:
        root: the folder.
        verify: read every file and compare its SHA-256; otherwise sizes only.
    """
    latest = (root / LATEST).resolve()
    folders = reversed(list_checkpoints(root))
    return [
        _look(folder, is_latest=folder.resolve() == latest, verify=verify) for folder in folders
    ]


def _look(folder: Path, *, is_latest: bool, verify: bool) -> Listed:
    version = num_bytes = written = problem = None
    try:
        manifest = Manifest.read(folder)
        num_bytes = manifest.num_bytes
        written = (folder / MANIFEST).stat().st_mtime
        manifest.verify(contents=False)
        control = read_checkpoint(folder).control if verify else read_control(folder)
        version = control["train"]["version"]
    except (CheckpointError, OSError) as error:
        problem = str(error)
    return Listed(
        path=folder,
        step=step_of(folder),
        policy_version=version,
        num_bytes=num_bytes,
        written=written,
        is_latest=is_latest,
        verified=verify,
        problem=problem,
    )
