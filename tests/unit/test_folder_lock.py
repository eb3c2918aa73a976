"""The lock of a run folder, and what is said of a run whose lock cannot be looked at."""

import errno
import fcntl
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from freewheel.config import Config
from freewheel.errors import ConfigError, RecordError
from freewheel.folder_lock import lock_folder, lock_state
from freewheel.liveness import SILENT_S, liveness
from freewheel.run_folder import LastStatus, RunFolder
from freewheel.status import RunStatus

HERE = socket.gethostname()
NO_PROCESS = 2**22 + 1
"""Beyond the largest number that Linux gives."""


@pytest.fixture
def locked(tmp_path):
    file = lock_folder(tmp_path / "run")
    yield tmp_path / "run"
    file.close()


def refuse_locks(monkeypatch, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_who_may_only_read_sees_a_lock_that_is_held(locked, monkeypatch):
    real = Path.open

    def read_only(path, mode="r", *arguments, **options):
        if set(mode) & set("wa+"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", read_only)
    assert lock_state(locked) == "held"


def test_a_lock_that_may_not_be_read_is_unknown(locked, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert lock_state(locked) == "unknown"


def test_who_looks_does_not_see_others_that_look(tmp_path):
    lock_folder(tmp_path).close()
    with (tmp_path / ".lock").open("rb") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert lock_state(tmp_path) == "free"


def test_a_folder_without_lock_file_is_free(tmp_path):
    assert lock_state(tmp_path) == "free"


def test_a_start_waits_for_who_only_looks(tmp_path, monkeypatch):
    monkeypatch.setattr("freewheel.folder_lock._LOOKER_S", 60.0)
    lock_folder(tmp_path).close()
    looker = (tmp_path / ".lock").open("rb")
    fcntl.flock(looker, fcntl.LOCK_SH | fcntl.LOCK_NB)
    leaving = threading.Timer(0.2, looker.close)
    leaving.start()
    try:
        lock_folder(tmp_path).close()
    finally:
        leaving.join()


def test_a_start_does_not_wait_for_who_holds_it(locked, monkeypatch):
    monkeypatch.setattr("freewheel.folder_lock._LOOKER_S", 60.0)
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on {HERE}"):
        lock_folder(locked)
    assert time.monotonic() - began_s < 60.0


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks_on_its_file_system_a_run_starts_with_a_warning(
    tmp_path, monkeypatch, capsys, number
):
    refuse_locks(monkeypatch, number)
    folder = RunFolder.create(tmp_path / "run", Config())
    warning = capsys.readouterr().err
    assert warning.count("warning: ") == 1
    assert f"its file system has no locks ({os.strerror(number)})" in warning
    assert folder.lock_state() == "unknown"
    folder.close()


def test_another_failure_to_lock_is_named(tmp_path, monkeypatch):
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(ConfigError, match=r"cannot be locked: Input/output error"):
        lock_folder(tmp_path / "run")


def test_a_lock_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / ".lock").symlink_to("/dev/full")
    with pytest.raises(RecordError, match=r"\.lock: cannot be written: "):
        lock_folder(tmp_path)


@pytest.mark.parametrize(
    ("lock", "silent_s", "host", "pid", "expected"),
    [
        ("held", 1000.0, "elsewhere", "nobody", "live"),
        ("free", 0.0, "here", "me", "dead"),
        ("free", 1000.0, "elsewhere", "other", "dead"),
        # Locks that each machine keeps for itself.
        ("free", 1.0, "elsewhere", "other", "live"),
        ("unknown", 1.0, "elsewhere", "other", "live"),
        ("unknown", 1.0, "here", "nobody", "live"),
        ("unknown", SILENT_S + 1, "elsewhere", "me", "unknown"),
        ("unknown", SILENT_S + 1, "here", "me", "unknown"),
        ("unknown", SILENT_S + 1, "here", "nobody", "dead"),
    ],
)
def test_liveness_by_the_lock_else_by_the_last_sign_of_life(
    tmp_path, monkeypatch, lock, silent_s, host, pid, expected
):
    # By name: what differs between processes would give the cases other names in each.
    host = {"here": HERE}.get(host, host)
    pid = {"nobody": NO_PROCESS, "me": os.getpid(), "other": 1}[pid]
    folder = RunFolder(tmp_path)
    monkeypatch.setattr(RunFolder, "lock_state", lambda self: lock)
    last = LastStatus(status=RunStatus(phase="running"), updated=500.0, pid=pid, host=host)
    assert liveness(folder, last, now_s=500.0 + silent_s) == expected


@pytest.mark.parametrize(("lock", "expected"), [("free", "dead"), ("unknown", "unknown")])
def test_liveness_before_the_first_sign_of_life(tmp_path, monkeypatch, lock, expected):
    monkeypatch.setattr(RunFolder, "lock_state", lambda self: lock)
    assert liveness(RunFolder(tmp_path), None, now_s=0.0) == expected
