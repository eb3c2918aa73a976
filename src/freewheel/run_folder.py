"""The folder of a run: its files, who may write them, and how it is taken up again.

One process at a time writes in it (`folder_lock`). The three files that tell the story of training
(`CUT_FILES`) are cut back to the checkpoint on resume; what is cut, checkpoints that are newer, and
a line that a crash left half-written go to `superseded/`.
"""

import contextlib
import io
import json
import os
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from freewheel.config import Config, dump_config, load_config
from freewheel.config.checks import Purpose
from freewheel.errors import ConfigError, RecordError
from freewheel.files import dump_json, make_folder, move, sync_folder, write_atomic
from freewheel.folder_lock import LockState, lock_folder, lock_state
from freewheel.run_origin import Origin
from freewheel.status import RunStatus

CUT_FILES = ("metrics", "validations", "samples")
ROW_FILES = (*CUT_FILES, "events")

_CHUNK_BYTES = 1 << 20


class RunClock:
    """Seconds since the run's first start; goes on after a resume, never backwards.

    Args:
        time_origin: wall-clock time of the first start, in seconds since the epoch.
        at_least_s: where it goes on if the wall clock was set back since; what an earlier life
            has recorded.
        wall: the wall clock.
        monotonic: the clock that the wall clock's jumps do not reach.
    """

    def __init__(
        self,
        time_origin: float,
        *,
        at_least_s: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.time_origin = time_origin
        self.wall = wall
        self.monotonic = monotonic
        self._offset_s = max(at_least_s, wall() - time_origin) - monotonic()

    def t_s(self) -> float:
        """Seconds since the run's first start."""
        return self.monotonic() + self._offset_s

    def stamp(self) -> dict[str, Any]:
        """The three times of an event: `t_s`, `time` (wall, ISO 8601, UTC), `monotonic_s`."""
        now = self.monotonic()
        wall = datetime.fromtimestamp(self.wall(), UTC)
        return {
            "t_s": round(now + self._offset_s, 6),
            "time": wall.isoformat(timespec="milliseconds"),
            "monotonic_s": round(now, 6),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStatus:
    """What a run said of itself last, and when (`updated`, seconds since the epoch)."""

    status: RunStatus
    updated: float
    pid: int
    host: str


class RunFolder:
    """A run folder. Make one by `create`, `resume` (both lock it) or `look` (read only)."""

    def __init__(self, path: Path, lock: io.TextIOWrapper | None = None) -> None:
        # Workers have another working directory, perhaps on another machine.
        self.path = path.absolute()
        self._lock = lock

    @classmethod
    def create(
        cls, path: Path, config: Config, *, purpose: Purpose = "train", target: str = ""
    ) -> "RunFolder":
        """Begin a new run.

        Args:
            path: its folder.
            config: resolved configuration.
            purpose: what it is for; a validation is not resumed.
            target: of a validation: what it scores.

        Raises:
            ConfigError: the folder holds a run, is in use, or cannot be made.
            RecordError: it takes no files.
        """
        cls.check_free(path)
        folder = cls(path, lock_folder(path))
        origin = Origin(
            time_origin=time.time(), host=socket.gethostname(), purpose=purpose, target=target
        )
        try:
            folder._begin(config, origin)
        except RecordError:
            folder.close()
            raise
        return folder

    def _begin(self, config: Config, origin: Origin) -> None:
        with _writing(self.origin_path):
            origin.write(self.origin_path)
        self.write_config(config)

    @classmethod
    def check_free(cls, path: Path) -> None:
        """Refuse a folder that holds a run, or a validation.

        Raises:
            ConfigError: it does.
        """
        if not holds_run(path):
            return
        if cls(path).read_origin().purpose == "validate":
            raise ConfigError(f"{path} holds a validation; choose another folder")
        raise ConfigError(
            f"{path} holds a run; resume it (freewheel resume {path}), or choose another "
            "trainer.run_dir"
        )

    @classmethod
    def check_resumable(cls, path: Path) -> None:
        """Refuse a folder whose run cannot be resumed.

        Raises:
            ConfigError: it holds no run, or a validation.
        """
        origin = cls.look(path).read_origin()
        if origin.purpose == "validate":
            raise ConfigError(
                f"{path} holds a validation, which is not resumed; to score again: "
                f"{origin.validate_command(path)}"
            )

    @classmethod
    def resume(cls, path: Path) -> "RunFolder":
        """Lock the folder of a run, to take it up again. Changes nothing else.

        Call `tidy` and `cut_back` before anything is recorded.

        Raises:
            ConfigError: the folder holds no run that can be resumed, or is in use.
            RecordError: it takes no files.
        """
        cls.check_resumable(path)
        folder = cls.look(path)
        folder._lock = lock_folder(path)
        return folder

    @classmethod
    def look(cls, path: Path) -> "RunFolder":
        """Open a folder to read it.

        Raises:
            ConfigError: it holds no run.
        """
        if not holds_run(path):
            reason = (
                "is not a run folder: it has no config.yaml" if path.is_dir() else "no such folder"
            )
            raise ConfigError(f"{path}: {reason}")
        return cls(path)

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def summary_path(self) -> Path:
        """Written at the end, whatever the end."""
        return self.path / "summary.json"

    @property
    def status_path(self) -> Path:
        """What the run is doing."""
        return self.path / "status.json"

    @property
    def origin_path(self) -> Path:
        """When the run started first, and what it is for."""
        return self.path / "origin.json"

    @property
    def checkpoints_path(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def rows_path(self, name: str) -> Path:
        """One of the files in `ROW_FILES`."""
        return self.path / f"{name}.jsonl"

    def clock(self, *, at_least_s: float = 0.0) -> RunClock:
        """A clock that counts from the run's first start.

        Args:
            at_least_s: what it shows now or more, in seconds: the time that a checkpoint was cut.
        """
        return RunClock(self.read_origin().time_origin, at_least_s=at_least_s)

    def make_logs(self) -> Path:
        """The folder for what worker processes print, made if need be.

        Raises:
            RecordError: it cannot be.
        """
        logs = self.path / "logs"
        with _writing(logs):
            logs.mkdir(exist_ok=True)
        return logs

    def read_origin(self) -> Origin:
        """How the run began.

        Raises:
            RecordError: `origin.json` is damaged.
        """
        return Origin.read(self.origin_path)

    def read_config(self) -> Config:
        """The resolved configuration."""
        return load_config(self.config_path)

    def write_config(self, config: Config) -> None:
        """Replace the resolved configuration; another one that was there goes to `superseded/`.

        Raises:
            RecordError: it cannot be written; what was there before is untouched.
        """
        text = dump_config(config)
        with _writing(self.config_path):
            before = self.config_path.read_bytes() if self.config_path.exists() else None
            if before == text.encode():
                return
            if before is not None:
                # A copy, not a move: a folder without config.yaml holds no run.
                write_atomic(self._superseded("config", ".yaml"), before.decode())
            write_atomic(self.config_path, text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`. Blocks until it is on disk."""
        write_atomic(self.summary_path, dump_json(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, if the run has ended."""
        return _read_json(self.summary_path)

    def write_status(self, status: RunStatus) -> None:
        """Write `status.json`. Blocks; a crash of the machine may lose the newest."""
        head = {"pid": os.getpid(), "host": socket.gethostname(), "updated": time.time()}
        text = dump_json(head)[:-1] + f', "status": {status.to_json()}}}\n'
        write_atomic(self.status_path, text, durable=False)

    def read_status(self) -> LastStatus | None:
        """What the run said of itself last; None if it never did, or the file is none of ours.

        A crash of the machine may leave an empty one: it is not brought to disk each time.
        """
        try:
            found = json.loads(self.status_path.read_text(encoding="utf-8"))
            return LastStatus(
                status=RunStatus.from_json(dump_json(found["status"])),
                updated=float(found["updated"]),
                pid=int(found["pid"]),
                host=str(found["host"]),
            )
        except (FileNotFoundError, ValueError, TypeError, LookupError):
            return None

    def lock_state(self) -> LockState:
        """Whether a process on a machine that shares this file system holds the lock."""
        return lock_state(self.path)

    def num_rows(self) -> dict[str, int]:
        """Complete lines in each of the files, by name."""
        return {name: _count_lines(self.rows_path(name)) for name in ROW_FILES}

    def tidy(self) -> None:
        """Move what the life before left half-written, and its summary, to `superseded/`."""
        for name in ROW_FILES:
            self._cut(name, _end_of_lines(self.rows_path(name)))
        if self.summary_path.exists():
            self.summary_path.replace(self._superseded("summary", ".json"))

    def supersede_checkpoint(self, folder: Path) -> Path:
        """Move a checkpoint's folder to `superseded/`; returns where it lies then."""
        aside = self._superseded(folder.name, "")
        move(folder, aside)
        return aside

    def check_rows(self, num_rows: dict[str, int]) -> None:
        """Check that `cut_back` can be done.

        Raises:
            RecordError: a file has fewer lines than the checkpoint knew.
        """
        for name in CUT_FILES:
            _offset_of_line(self.rows_path(name), num_rows.get(name, 0))

    def cut_back(self, num_rows: dict[str, int]) -> None:
        """Keep the first lines of the files that tell the story, as many as a checkpoint knew.

        Args:
            num_rows: by file name without suffix; a file that is not named is emptied.

        Raises:
            RecordError: a file has fewer lines than the checkpoint knew.
        """
        for name in CUT_FILES:
            wanted = num_rows.get(name, 0)
            self._cut(name, _offset_of_line(self.rows_path(name), wanted))

    def close(self) -> None:
        """Give up the lock. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _cut(self, name: str, offset: int) -> None:
        """Move what is past an offset to `superseded/`: first copied and on disk, then cut off."""
        path = self.rows_path(name)
        if not path.exists() or path.stat().st_size == offset:
            return
        aside = self._superseded(name, ".jsonl")
        temporary = aside.with_suffix(".tmp")
        with path.open("rb") as source, temporary.open("wb") as target:
            source.seek(offset)
            while chunk := source.read(_CHUNK_BYTES):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(aside)
        sync_folder(aside.parent)
        with path.open("r+b") as file:
            file.truncate(offset)
            os.fsync(file.fileno())

    def _superseded(self, name: str, suffix: str) -> Path:
        """The next free name in `superseded/`."""
        folder = self.path / "superseded"
        make_folder(folder)
        number = 1
        while (folder / f"{name}.{number}{suffix}").exists():
            number += 1
        return folder / f"{name}.{number}{suffix}"


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run, begun or ended."""
    return (path / "config.yaml").is_file() and (path / "origin.json").is_file()


def resolve_run_dir(config: Config, *, now: datetime | None = None) -> Path:
    """`trainer.run_dir` with its fields filled in; `{time}` is `20260131-235959`, local time."""
    moment = (now or datetime.now().astimezone()).strftime("%Y%m%d-%H%M%S")
    trainer = config.trainer
    name = trainer.run_dir.format(experiment_name=trainer.experiment_name, time=moment)
    return Path(name).expanduser()


@contextlib.contextmanager
def _writing(path: Path) -> Generator[None]:
    """Name what the disk does not take.

    Raises:
        RecordError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{error.filename or path}: cannot be written: {error.strerror or error}"
        ) from error


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RecordError(f"{path} is not valid JSON: {error}") from error


def _end_of_lines(path: Path) -> int:
    """Offset behind the last complete line."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - _CHUNK_BYTES)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0


def _count_lines(path: Path) -> int:
    if not path.exists():
        return 0
    count = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            count += chunk.count(b"\n")
    return count


def _offset_of_line(path: Path, num_lines: int) -> int:
    """Offset behind so many lines."""
    offset = found = 0
    if path.exists():
        with path.open("rb") as file:
            while found < num_lines and (line := file.readline()).endswith(b"\n"):
                offset += len(line)
                found += 1
    if found < num_lines:
        raise RecordError(f"{path} has {found} lines, but the checkpoint knew {num_lines}")
    return offset
