"""The lock of a run folder: one process at a time writes in it.

An exclusive flock on `.lock`, which ends with the process however it ends; the file says who holds
it. Who only looks takes a shared lock for a moment and needs no more than to read: lookers never
see each other, and a start that meets one waits for it. A file system may have no locks at all.
"""

import contextlib
import errno
import fcntl
import io
import os
import socket
import sys
import time
from pathlib import Path
from typing import Literal

from freewheel.errors import ConfigError, RecordError

LockState = Literal["held", "free", "unknown"]

_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})
"""What flock says where there are no locks (Lustre without `flock`, NFS without its lockd)."""

_LOOKER_S = 2.0
"""Longest wait for those that only look; each is there for one system call."""

_AGAIN_S = 0.01


def lock_folder(path: Path) -> io.TextIOWrapper:
    """Lock a folder, which is made if need be, until the file is closed or the process ends.

    Without locks on its file system it is not locked, with a warning on standard error.

    Args:
        path: the folder.

    Returns:
        The open lock file.

    Raises:
        ConfigError: the folder cannot be made or locked, or another process holds the lock.
        RecordError: the lock file cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = _lock_path(path).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run folder {path} cannot be written: {error.strerror}") from error
    try:
        _lock(file, path)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            file.close()  # tries to write once more
        raise RecordError(f"{_lock_path(path)}: cannot be written: {error.strerror}") from error
    except ConfigError:
        file.close()
        raise
    return file


def lock_state(path: Path) -> LockState:
    """Whether a process holds a folder's lock; `unknown` if that cannot be found out from here."""
    try:
        with _lock_path(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return "free"
    except BlockingIOError:
        return "held"
    except OSError:
        # No permission to read it, no locks on this file system, a server that is gone.
        return "unknown"
    return "free"


def _lock_path(path: Path) -> Path:
    return path / ".lock"


def _lock(file: io.TextIOWrapper, path: Path) -> None:
    try:
        _take(file)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise ConfigError(f"run folder {path} is in use by {holder}") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise ConfigError(f"run folder {path} cannot be locked: {error.strerror}") from error
        sys.stderr.write(
            f"warning: {path}: its file system has no locks ({error.strerror}): nothing keeps a "
            "second process from writing in it\n"
        )


def _take(file: io.TextIOWrapper) -> None:
    """Take the exclusive lock. BlockingIOError: another process has it."""
    until_s = time.monotonic() + _LOOKER_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _is_only_looked_at(file) or time.monotonic() > until_s:
                raise
        else:
            return
        time.sleep(_AGAIN_S)  # noqa: TID251 - before any loop; flock cannot wait with a limit


def _is_only_looked_at(file: io.TextIOWrapper) -> bool:
    """Whether no lock on it is exclusive."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
