"""One split of the data: its sources, one after the other, as prompt records by number.

Used in rollout workers (the control plane knows only size, fingerprint and prompt numbers). Reading
a row is synchronous and may touch the disk: callers keep it off their event loop.
"""

import bisect
import hashlib
from pathlib import Path

from freewheel.config.sections import Config, DataConfig
from freewheel.data.generated import PREFIX, GeneratedTask
from freewheel.data.records import PromptRecord, Source, check_prompt, look_up, nearest
from freewheel.errors import ConfigError, DataError
from freewheel.types import Split

SUFFIXES = (".parquet", ".jsonl")


class PromptDataset:
    """The prompts of one split.

    Args:
        sources: in order.
        data: columns by name.
        max_samples: use the first so many; 0: all.

    Raises:
        DataError: a source lacks a column, or there is no row.
    """

    def __init__(self, sources: list[Source], data: DataConfig, *, max_samples: int = 0) -> None:
        self._sources = sources
        self._data = data
        self._ends: list[int] = []
        for source in sources:
            self._ends.append(len(source) + (self._ends[-1] if self._ends else 0))
            _check_columns(source, data)
        total = self._ends[-1] if self._ends else 0
        self._size = min(total, max_samples) if max_samples else total

    @property
    def fingerprint(self) -> str:
        """Hash over the sources' contents, the columns in use and the number of prompts."""
        digest = hashlib.blake2b(digest_size=16)
        parts = [source.fingerprint for source in self._sources]
        for part in [*parts, self._data.prompt_key, self._data.ground_truth_key, str(self._size)]:
            digest.update(f"{len(part)}:{part}".encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._size

    def where(self, index: int) -> str:
        """Where a prompt comes from, for messages: file and row."""
        source, row = self._locate(index)
        return source.where(row)

    def record(self, index: int) -> PromptRecord:
        """The prompt at a number from 0.

        Raises:
            DataError: the row cannot be used; names file, row, column, and what is there.
            IndexError: there is no such row.
        """
        source, number = self._locate(index)
        row = source.row(number)
        where = source.where(number)
        prompt_key = source.prompt_key or self._data.prompt_key
        truth_key = source.ground_truth_key or self._data.ground_truth_key
        prompt = check_prompt(look_up(row, prompt_key, where), prompt_key, where)
        truth = look_up(row, truth_key, where) if truth_key else None
        if truth_key and truth is None:
            raise DataError(f"{where}, column {truth_key!r}: the ground truth is null")
        extra = {name: row[name] for name in row if name not in (prompt_key, truth_key)}
        return PromptRecord(prompt=prompt, ground_truth=truth, extra=extra)

    def _locate(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < self._size:
            raise IndexError(f"prompt {index} of {self._size}")
        number = bisect.bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number - 1] if number else 0)


def open_dataset(config: Config, split: Split) -> PromptDataset:
    """Open the files of a split.

    Raises:
        ConfigError: a file is missing, its kind is unknown, or an optional package is missing.
        DataError: a file cannot be read, has no rows, or lacks a column.
    """
    key = files_key(split)
    names = file_names(config, split)
    if not names:
        raise ConfigError(f"{key} is empty: files, a dataset folder or reasoning_gym:TASK wanted")
    data = config.data
    limit = data.train_max_samples if split is Split.TRAIN else data.val_max_samples
    sources = [_open_source(name, split) for name in names]
    return PromptDataset(sources, data, max_samples=limit)


def files_key(split: Split) -> str:
    """Configuration key of a split's files."""
    return "data.train_files" if split is Split.TRAIN else "data.val_files"


def file_names(config: Config, split: Split) -> tuple[str, ...]:
    """The sources of a split as the configuration names them."""
    value = config.data.train_files if split is Split.TRAIN else config.data.val_files
    names = (value,) if isinstance(value, str) else value
    return tuple(name for name in names if name)


def check_path(name: str, key: str) -> Path:
    """The path of a source on disk, if there is one and its kind is known.

    Raises:
        ConfigError: names the path and what is there instead.
    """
    path = Path(name).expanduser()
    if not path.exists():
        parent = path.parent
        beside = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
        missing = "" if parent.is_dir() else f" (nor the folder {parent})"
        raise ConfigError(f"{key}: {path} does not exist{missing}{nearest(path.name, beside)}")
    if path.is_dir():
        if not ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
            raise ConfigError(
                f"{key}: {path} is a folder, but not one that datasets' save_to_disk wrote: "
                "it has neither state.json nor dataset_dict.json"
            )
    elif path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{key}: {path}: unknown kind {path.suffix!r}: {' or '.join(SUFFIXES)}, "
            "a dataset folder, or reasoning_gym:TASK wanted"
        )
    return path


def _open_source(name: str, split: Split) -> Source:
    if name.startswith(PREFIX):
        return GeneratedTask(name)
    path = check_path(name, files_key(split))
    # Here and not above, so that the control plane, which needs only the order of the prompts, does
    # not carry Arrow.
    if path.is_dir():
        from freewheel.data.hf_folder import HfFolder

        return HfFolder(path, split)
    from freewheel.data.files import JsonlFile, ParquetFile

    return ParquetFile(path) if path.suffix == ".parquet" else JsonlFile(path)


def _check_columns(source: Source, data: DataConfig) -> None:
    """Refuse a misspelt column at once, instead of as one bad prompt after the other."""
    row = source.row(0)
    for key in (
        source.prompt_key or data.prompt_key,
        source.ground_truth_key or data.ground_truth_key,
    ):
        if key:
            look_up(row, key, source.where(0))
