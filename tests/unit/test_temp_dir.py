"""The folder of a Ray cluster, between runs that start at the same moment."""

import fcntl
import tempfile

from freewheel.backends.ray import temp_dir
from freewheel.backends.ray.temp_dir import TempDir


def test_a_run_that_starts_between_making_and_locking_takes_no_folder_away(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temp_dir, "_MAX_BASE_CHARS", 200)
    real, others = fcntl.flock, []

    def flock(file, operation):
        if operation == fcntl.LOCK_EX and not others:
            others.append(None)
            others.append(TempDir())
        real(file, operation)

    monkeypatch.setattr(temp_dir.fcntl, "flock", flock)
    mine = TempDir()
    other = others[1]
    assert mine.path.is_dir()
    assert other.path.is_dir()
    assert mine.path != other.path
    # Both are locked: a third run leaves them alone.
    third = TempDir()
    assert mine.path.is_dir()
    for folder in (mine, other, third):
        folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_owner_is_gone_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temp_dir, "_MAX_BASE_CHARS", 200)
    gone = TempDir()
    gone.release()
    new = TempDir()
    assert not gone.path.exists()
    new.remove()
