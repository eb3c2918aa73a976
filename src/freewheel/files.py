"""Writing files so that a reader, or a crash, never sees half of one; JSON that all can read."""

import dataclasses
import json
import math
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from freewheel.unicode_text import well_formed

_SURROGATE = "\\ud"
"""How the escape of a surrogate begins in JSON."""


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file beside its place, bring it to disk, then move it there.

    Args:
        path: where it goes; its folder exists.
        text: its content.
        durable: false leaves the time of the disk write to the system.

    Raises:
        OSError: it could not be written; what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


# Everything that a checkpoint does to the disk goes through the functions below (or a library's
# own writer, into a folder that no reader looks at), so that a test can crash at each of them.


def write_text(path: Path, text: str) -> None:
    """Write a file in place and bring it to disk. For folders that no reader looks at yet."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content. Not yet on disk when it returns."""
    shutil.copyfile(source, target)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if need be."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)


def make_subfolder(path: Path) -> None:
    """Make a folder in one that exists, if need be.

    Raises:
        OSError: among others if the one above it is missing, as where it was made elsewhere.
    """
    path.mkdir(exist_ok=True)


def move(source: Path, target: Path) -> None:
    """Rename, and bring the new name to disk. The target does not exist, or is replaced at once."""
    source.replace(target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def link_to(link: Path, target: str, *, aside: Path) -> None:
    """Let a symbolic link point to `target`: made aside and moved, so that it never is missing."""
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    move(aside, link)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder, or the content of a file, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring every file under a folder, and the folders, to disk."""
    for path in (*folder.rglob("*"), folder):
        sync_folder(path)


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that every reader takes.

    NaN and infinities become null, NumPy numbers plain ones, text well-formed Unicode.
    """
    try:
        text = json.dumps(value, allow_nan=False, default=_plain, indent=indent)
    except ValueError:
        text = None
    # Only now walk the value: hardly any row has such a number, or a surrogate, lone or paired.
    if text is None or _SURROGATE in text:
        return json.dumps(_clean(value), allow_nan=False, default=_plain, indent=indent)
    return text


def _clean(value: Any) -> Any:
    """With finite numbers and well-formed text only."""
    if isinstance(value, dict):
        return {_clean_key(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    plain = value if isinstance(value, int | float | bool | None) else _plain(value)
    return plain if plain is value else _clean(plain)


def _clean_key(key: Any) -> Any:
    return well_formed(key) if isinstance(key, str) else key


def _plain(value: Any) -> Any:
    """What JSON has no word for; a record never ends a run for a value of an odd type."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
