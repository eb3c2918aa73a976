"""A disk that ends the process, or fails, at a chosen one of the changes made to it."""

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest
import transformers.modeling_utils

from freewheel.trainer import state


class CrashError(BaseException):
    """The process is gone: nothing of ours catches it."""


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """Counts every change to the disk that is made through Python, safetensors or Arrow.

    Attributes:
        trace: what was done, in order, by name and first argument.
        fail_at: number of the change (from 1) that does not happen; 0: none.
        error: makes what is raised there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trace: list[tuple[str, Any]] = []
        self.fail_at = 0
        self.error: Callable[[], BaseException] = CrashError
        for name in ("mkdir", "rename", "replace", "fsync", "symlink", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))
        monkeypatch.setattr(shutil, "copyfile", self._counted("copyfile", shutil.copyfile))
        opener = self._opener(io.open)
        monkeypatch.setattr(io, "open", opener)
        monkeypatch.setattr(builtins, "open", opener)
        # These write without Python's knowing.
        for owner, name in (
            (state, "save_file"),
            (transformers.modeling_utils, "safe_save_file"),
            (pq.ParquetWriter, "__init__"),
            (pq.ParquetWriter, "write_table"),
            (pq.ParquetWriter, "close"),
        ):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def arm(self, fail_at: int, error: Callable[[], BaseException] = CrashError) -> None:
        """Forget what was done; fail at the so-manieth change from now."""
        self.trace.clear()
        self.fail_at, self.error = fail_at, error

    def _note(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.trace.append((name, arguments[0] if arguments else None))
        if len(self.trace) == self.fail_at:
            raise self.error()

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._note(name, arguments)
            return real(*arguments, **options)

        return call

    def _opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if set(mode) & set("wax+"):
                self._note("open", (file,))
            return real(file, mode, *arguments, **options)

        return call
