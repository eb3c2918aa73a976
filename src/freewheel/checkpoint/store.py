"""Writing checkpoint folders: aside, verified, renamed; `latest` moves last.

A crash at any point leaves the earlier checkpoints and `latest` as they were; what was half written
lies in a folder whose name no reader takes for a checkpoint, and is removed by the next writer.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from freewheel.checkpoint.reader import (
    CONTROL,
    FORMAT,
    LATEST,
    MANIFEST,
    file_digest,
    folder_name,
    list_checkpoints,
    read_checkpoint,
)
from freewheel.errors import CheckpointError
from freewheel.threads import CallThread

_ASIDE = ".writing-"


class FileCheckpointStore:
    """CheckpointStore over a folder of the run.

    Args:
        root: the run's `checkpoints` folder; made when the first checkpoint is begun.
        keep: newest checkpoints to keep.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root = root
        self._keep = keep
        self._thread = CallThread("checkpoint-store")

    async def begin(self, step: int) -> Path:
        """Make an empty folder for what the trainer writes."""
        return await self._thread.run(self._begin, step)

    async def commit(self, step: int, control: dict[str, Any]) -> Path:
        """Write the control state and the manifest, verify, rename, move `latest`.

        Raises:
            CheckpointError: with the path and the reason; earlier checkpoints are untouched.
        """
        return await self._thread.run(self._commit, step, control)

    def _begin(self, step: int) -> Path:
        folder = self._root / (_ASIDE + folder_name(step))
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for left_over in self._root.glob(_ASIDE + "*"):
                _remove(left_over)
            folder.mkdir()
        except OSError as error:
            raise _foreign(folder, error) from error
        return folder

    def _commit(self, step: int, control: dict[str, Any]) -> Path:
        aside = self._root / (_ASIDE + folder_name(step))
        final = self._root / folder_name(step)
        try:
            _write_json(aside / CONTROL, control)
            _write_json(aside / MANIFEST, _manifest(aside, step))
            read_checkpoint(aside)
            for folder in [path for path in aside.rglob("*") if path.is_dir()] + [aside]:
                _sync_folder(folder)
            if final.exists():
                # A run that was resumed from an earlier step writes the same step again.
                shutil.rmtree(final)
            aside.rename(final)
            _sync_folder(self._root)
            self._point_latest_to(final)
            self._drop_old(final)
        except OSError as error:
            raise _foreign(aside, error) from error
        return final

    def _point_latest_to(self, folder: Path) -> None:
        link = self._root / (_ASIDE + LATEST)
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._root / LATEST)
        _sync_folder(self._root)

    def _drop_old(self, newest: Path) -> None:
        others = [path for path in list_checkpoints(self._root) if path != newest]
        for old in others[self._keep - 1 :]:
            # Renamed first, so that a crash while deleting leaves no half checkpoint behind.
            aside = self._root / (_ASIDE + "old-" + old.name)
            old.rename(aside)
            shutil.rmtree(aside)


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "format": FORMAT,
        "step": step,
        "files": {
            path.relative_to(folder).as_posix(): {
                "num_bytes": path.stat().st_size,
                "sha256": file_digest(path),
            }
            for path in files
        },
    }


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _foreign(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{error.filename or path}: cannot be written: {error.strerror}")
