"""The folder of a Ray cluster of our own: sockets and logs, below the system's temporary folder."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "freewheel-"
_LOCK = "owner.lock"
# Sockets lie 87 characters deeper, and the path of one may have 107 bytes.
_MAX_BASE_CHARS = 16


class TempDir:
    """A new folder, locked for as long as this process lives.

    Folders of processes that were killed before they could delete theirs are deleted first: nobody
    holds their locks. A lock, unlike a process id, also tells across containers.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(str(base)) > _MAX_BASE_CHARS:
            base = Path("/tmp")
        for stale in base.glob(f"{_PREFIX}*"):
            _remove_if_stale(stale)
        self._lock = -1
        while self._lock < 0:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._lock = _lock_new(self.path)

    def remove(self) -> None:
        """Delete the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave the folder to be looked into; the next run on this machine deletes it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock_new(folder: Path) -> int:
    """Lock a new folder; -1 if another run took it for a stale one before it was locked."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        if os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK)):
            return lock
    except FileNotFoundError:
        pass
    os.close(lock)
    return -1


def _remove_if_stale(folder: Path) -> None:
    """Delete a folder whose owner is gone. One without a lock file is not ours."""
    with contextlib.suppress(OSError):
        lock = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
