"""Writing checkpoint folders: aside, verified, renamed; `latest` moves last.

A crash at any point leaves the earlier checkpoints and `latest` as they were; what was half written
lies in a folder whose name no reader takes for a checkpoint, and is removed by the next writer. All
that is done to the disk goes through `freewheel.files`.

What cannot be removed (a file that is open elsewhere on a network disk, missing rights) costs room,
not the run: it is reported, and tried again with the next checkpoint.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from freewheel import files
from freewheel.checkpoint.contents import missing_files
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
_OLD = _ASIDE + "old-"
_REPLACED = ".replaced-"


class FileCheckpointStore:
    """CheckpointStore over a folder of the run.

    Args:
        root: the run's `checkpoints` folder; made when the first checkpoint is begun.
        keep: newest checkpoints to keep.
        on_not_removed: called from the store's thread, each time that an old checkpoint, or what
            is left of one, cannot be removed; with its path and why.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        on_not_removed: Callable[[Path, OSError], None] = lambda _path, _error: None,
    ) -> None:
        self._root = root
        self._keep = keep
        self._on_not_removed = on_not_removed
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
            files.make_folder(self._root)
            restore_replaced(self._root)
            if folder.exists():
                # Out of the way first: what is left of it may not be removable.
                files.move(folder, _free_name(self._root, folder_name(step)))
            for left_over in sorted(self._root.glob(_ASIDE + "*")):
                self._remove(left_over)
            files.make_folder(folder)
        except OSError as error:
            raise _foreign(folder, error) from error
        return folder

    def _commit(self, step: int, control: dict[str, Any]) -> Path:
        aside = self._root / (_ASIDE + folder_name(step))
        final = self._root / folder_name(step)
        try:
            files.write_text(aside / CONTROL, json.dumps(control, indent=1))
            manifest = _manifest(aside, step)
            _check_complete(aside, manifest, control)
            files.write_text(aside / MANIFEST, json.dumps(manifest, indent=1))
            read_checkpoint(aside)
            files.sync_tree(aside)
            self._put_in_place(aside, final)
            point_latest_to(final)
            self._drop_old(final)
        except OSError as error:
            raise _foreign(aside, error) from error
        return final

    def _put_in_place(self, aside: Path, final: Path) -> None:
        """Rename; a checkpoint of the same step stays findable until the new one is in its place.

        There is one if a run that was resumed ends before its first step does.
        """
        replaced = self._root / (_REPLACED + final.name)
        if final.exists():
            files.move(final, replaced)
        files.move(aside, final)
        if replaced.exists():
            self._discard(replaced)

    def _drop_old(self, newest: Path) -> None:
        others = [path for path in list_checkpoints(self._root) if path != newest]
        for old in others[self._keep - 1 :]:
            self._discard(old)

    def _discard(self, folder: Path) -> None:
        """Rename, then remove: a crash while removing leaves no half checkpoint behind."""
        aside = _free_name(self._root, folder.name)
        try:
            files.move(folder, aside)
        except OSError as error:
            self._on_not_removed(folder, error)
        else:
            self._remove(aside)

    def _remove(self, path: Path) -> None:
        """Remove what no reader looks at; the next checkpoint tries again."""
        try:
            files.remove(path)
        except OSError as error:
            self._on_not_removed(path, error)


def restore_replaced(root: Path) -> None:
    """Undo a replacement that a crash cut off between its two renames.

    Raises:
        OSError: the folder cannot be changed.
    """
    for replaced in root.glob(_REPLACED + "*"):
        final = root / replaced.name.removeprefix(_REPLACED)
        if final.exists():
            files.move(replaced, _free_name(root, final.name))
        else:
            files.move(replaced, final)


def point_latest_to(folder: Path) -> None:
    """Move the link `latest` beside a checkpoint to it.

    Raises:
        OSError: the link cannot be written.
    """
    root = folder.parent
    files.link_to(root / LATEST, folder.name, aside=root / (_ASIDE + LATEST))


def _free_name(root: Path, name: str) -> Path:
    """A name for what is to be removed: one of the same may lie there that could not be."""
    number = 1
    while (root / f"{_OLD}{name}.{number}").exists():
        number += 1
    return root / f"{_OLD}{name}.{number}"


def _check_complete(folder: Path, manifest: dict[str, Any], control: dict[str, Any]) -> None:
    """Refuse a checkpoint of which a part was written elsewhere, or not at all."""
    missing = missing_files(folder, manifest["files"], control)
    if missing:
        raise CheckpointError(
            f"{folder}: the trainer has not written {', '.join(missing)} here; trainer.run_dir has "
            "to have the same path on all nodes (a shared file system)"
        )


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "format": FORMAT,
        "step": step,
        "files": {
            path.relative_to(folder).as_posix(): {
                "num_bytes": path.stat().st_size,
                "sha256": file_digest(path),
            }
            for path in found
        },
    }


def _foreign(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{error.filename or path}: cannot be written: {error.strerror}")
