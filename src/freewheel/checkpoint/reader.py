"""Reading checkpoint folders: which there are, whether they are whole, what they hold.

A checkpoint is `step_NNNNNN/` with `manifest.json` (size and SHA-256 of every other file, written
last), `control.json` (the control plane's state) and what the trainer wrote. Nothing in it is code;
reading one cannot run any.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    manifest = _read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: format {manifest.get('format')}; this version of Freewheel reads {FORMAT}"
        )
    for name, entry in _listed_files(folder, manifest).items():
        _verify_file(folder / name, entry)
    control = _read_json(folder / CONTROL)
    return Checkpoint(folder=folder, step=manifest["step"], control=control)


def _listed_files(folder: Path, manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The manifest's files, if it has the shape of one; names that leave the folder are refused."""
    files, step = manifest.get("files"), manifest.get("step")
    entries_ok = isinstance(files, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("num_bytes"), int)
        and isinstance(entry.get("sha256"), str)
        and not Path(name).is_absolute()
        and ".." not in Path(name).parts
        for name, entry in files.items()
    )
    if not isinstance(files, dict) or not entries_ok or not isinstance(step, int):
        raise CheckpointError(f"{folder / MANIFEST}: is not the manifest of a checkpoint")
    if CONTROL not in files:
        raise CheckpointError(f"{folder / MANIFEST}: does not list {CONTROL}")
    return files


def _verify_file(path: Path, entry: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size != entry["num_bytes"]:
        raise CheckpointError(f"{path}: has {size} bytes, the manifest says {entry['num_bytes']}")
    if file_digest(path) != entry["sha256"]:
        raise CheckpointError(f"{path}: its content is not what was written (SHA-256 differs)")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not an object")
    return content
