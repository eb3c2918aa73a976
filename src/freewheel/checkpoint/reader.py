"""Reading checkpoint folders: which there are, whether they are whole, what they hold.

A checkpoint is `step_NNNNNN/` with `manifest.json` (size and SHA-256 of every other file, written
last), `control.json` (the control plane's state) and what the trainer wrote. Nothing in it is code;
reading one cannot run any. Whatever is wrong with one is a CheckpointError with path and reason.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.checkpoint.control_state import CONTROL_FORMAT, control_problem
from freewheel.checkpoint.safetensors_header import safetensors_problem
from freewheel.errors import CheckpointError

FORMAT = 1
LATEST = "latest"
MANIFEST = "manifest.json"
CONTROL = "control.json"
_NAME = re.compile(r"step_(\d{6,})")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint: its folder, its step, the control plane's state."""

    folder: Path
    step: int
    control: dict[str, Any]


def folder_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """Step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step_"))


def list_checkpoints(root: Path) -> list[Path]:
    """Folders of complete checkpoints, newest first. Unfinished ones have other names."""
    if not root.is_dir():
        return []
    found = [
        (int(match.group(1)), path)
        for path in root.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def find_checkpoint(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with the newer ones.

    Args:
        root: the run's `checkpoints` folder.

    Returns:
        The checkpoint (None if there is none) and one message for each that had to be passed over.
    """
    problems: list[str] = []
    for folder in list_checkpoints(root):
        try:
            return read_checkpoint(folder), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify every file of a checkpoint against its manifest and read the control state.

    Raises:
        CheckpointError: names the folder, the file and what is wrong with it.
    """
    manifest = Manifest.read(folder)
    manifest.verify(contents=True)
    control = read_control(folder)
    _check_step(folder, manifest.step, control["train"]["step"])
    return Checkpoint(folder=folder, step=manifest.step, control=control)


def _check_step(folder: Path, step: int, control_step: int) -> None:
    """The folder's name (if it is that of a checkpoint), the manifest and the state agree."""
    named = step_of(folder) if _NAME.fullmatch(folder.name) else step
    if not named == step == control_step:
        raise CheckpointError(
            f"{folder / MANIFEST}: says step {step}, {CONTROL} step {control_step}; the folder is "
            f"named {folder.name}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint's `manifest.json` says: its step; size and SHA-256 of each file."""

    folder: Path
    step: int
    files: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read it; names that leave the folder are refused.

        Raises:
            CheckpointError: it is missing, of another format, or not a manifest.
        """
        content = _read_json(folder / MANIFEST)
        _check_format(folder / MANIFEST, content.get("format"), FORMAT)
        files, step = content.get("files"), content.get("step")
        entries_ok = isinstance(files, dict) and all(
            isinstance(entry, dict)
            and isinstance(entry.get("num_bytes"), int)
            and isinstance(entry.get("sha256"), str)
            and not Path(name).is_absolute()
            and ".." not in Path(name).parts
            for name, entry in files.items()
        )
        if not isinstance(files, dict) or not entries_ok or type(step) is not int:
            raise CheckpointError(f"{folder / MANIFEST}: is not the manifest of a checkpoint")
        if CONTROL not in files:
            raise CheckpointError(f"{folder / MANIFEST}: does not list {CONTROL}")
        return cls(folder=folder, step=step, files=files)

    @property
    def num_bytes(self) -> int:
        """Size of all files that it lists."""
        return sum(entry["num_bytes"] for entry in self.files.values())

    def verify(self, *, contents: bool) -> None:
        """Check that every file is there with its size and, if asked for, with its content.

        Raises:
            CheckpointError: names the first file that is not.
        """
        for name, entry in self.files.items():
            verify_file(self.folder / name, entry, contents=contents)


def verify_file(path: Path, entry: dict[str, Any], *, contents: bool) -> None:
    """Check one file against its entry in a manifest.

    Raises:
        CheckpointError: names the file and what is wrong.
    """
    try:
        size = path.stat().st_size
        if size != entry["num_bytes"]:
            raise CheckpointError(
                f"{path}: has {size} bytes, the manifest says {entry['num_bytes']}"
            )
        if not contents:
            return
        if file_digest(path) != entry["sha256"]:
            raise CheckpointError(f"{path}: its content is not what was written (SHA-256 differs)")
        problem = safetensors_problem(path) if path.suffix == ".safetensors" else None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hex.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _check_format(path: Path, found: Any, known: int) -> None:
    if found != known or type(found) is not int:
        newer = type(found) is int and found > known
        by = "a newer version" if newer else "no known version"
        raise CheckpointError(
            f"{path}: format {found!r}, written by {by}; this version of Freewheel reads {known}"
        )


def read_control(folder: Path) -> dict[str, Any]:
    """The control plane's state. Does not look at the manifest.

    Raises:
        CheckpointError: the file is missing, of another format, or not of the shape it should have.
    """
    control = _read_json(folder / CONTROL)
    _check_format(folder / CONTROL, control.get("format"), CONTROL_FORMAT)
    problem = control_problem(control)
    if problem is not None:
        raise CheckpointError(f"{folder / CONTROL}: {problem}")
    return control


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not an object")
    return content
