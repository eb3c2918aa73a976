"""Cheap checks of the data before anything is started: for `--dry-run` and the start of a run.

Files are looked at, not read: a parquet file's footer, a JSONL file's first line, a dataset
folder's first row. What only reading shows is found by `open_dataset`, in the rollout workers.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from freewheel.config.sections import Config, DataConfig
from freewheel.data.dataset import check_path, file_names, files_key
from freewheel.data.generated import PREFIX, GeneratedTask, parse_spec
from freewheel.data.records import look_up
from freewheel.errors import ConfigError, DataError
from freewheel.types import Split


def check_data(config: Config) -> list[str]:
    """Check the sources of both splits.

    Returns:
        One line for each source, saying what it is; and one that begins with `warning:` where
        generated training and validation prompts overlap.

    Raises:
        ConfigError: a source is missing, of an unknown kind, unreadable at first sight, or lacks a
            column.
    """
    if not file_names(config, Split.TRAIN):
        raise ConfigError(
            f"{files_key(Split.TRAIN)} is required: parquet or JSONL files, a dataset "
            "folder or reasoning_gym:TASK"
        )
    lines: list[str] = []
    for split in Split:
        for name in file_names(config, split):
            try:
                found = _check_source(name, config.data, split)
            except DataError as error:
                raise ConfigError(f"{files_key(split)}: {error}") from error
            lines.append(f"{files_key(split)}: {name}: {found}")
    return lines + _overlaps(config)


def _check_source(name: str, data: DataConfig, split: Split) -> str:
    if name.startswith(PREFIX):
        return f"{len(GeneratedTask(name))} generated prompts"
    path = check_path(name, files_key(split))
    if path.is_dir():
        return _check_folder(path, split, data)
    if path.suffix == ".parquet":
        return _check_parquet(path, data)
    return _check_jsonl(path, data)


def _check_parquet(path: Path, data: DataConfig) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        meta = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
    _check_keys(_schema_tree(meta.schema.to_arrow_schema()), data, str(path))
    if not meta.num_rows:
        raise DataError(f"{path}: the file has no rows")
    return f"{meta.num_rows} rows"


def _schema_tree(columns: Iterable[Any]) -> dict[str, Any]:
    """Columns by name; a struct is a mapping again, so dotted paths are looked up as in rows."""
    import pyarrow as pa

    return {
        column.name: _schema_tree(column.type) if pa.types.is_struct(column.type) else None
        for column in columns
    }


def _check_jsonl(path: Path, data: DataConfig) -> str:
    try:
        with path.open("rb") as file:
            number, line = next(
                ((number, line) for number, line in enumerate(file, 1) if line.strip()), (0, b"")
            )
        if not line:
            raise DataError(f"{path}: the file has no rows")
        row = json.loads(line)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the first row cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path} line {number}: an object wanted, found {type(row).__name__}")
    _check_keys(row, data, f"{path} line {number}")
    return f"JSONL, {path.stat().st_size} bytes"


def _check_folder(path: Path, split: Split, data: DataConfig) -> str:
    # Opening maps the files and reads none of them; it also finds that the extra is missing.
    from freewheel.data.hf_folder import load_split

    folder, dataset = load_split(path, split)
    _check_keys(dataset[0], data, f"{folder} row 1")
    return f"{len(dataset)} rows"


def _check_keys(row: dict[str, Any], data: DataConfig, where: str) -> None:
    for key in (data.prompt_key, data.ground_truth_key):
        if key:
            look_up(row, key, where)


def _overlaps(config: Config) -> list[str]:
    """Generated entries are the same where task, parameters and seed + index are."""
    train, held_out = (
        [parse_spec(name) for name in file_names(config, split) if name.startswith(PREFIX)]
        for split in (Split.TRAIN, Split.VALIDATION)
    )
    lines: list[str] = []
    for ours in train:
        for theirs in held_out:
            shared = _shared(ours.params, theirs.params) if ours.task == theirs.task else 0
            if shared:
                lines.append(
                    f"warning: {shared} prompts of {theirs.text} are also in {ours.text}: entry i "
                    "is seeded with seed + i, so keep the two seeds further apart than the size"
                )
    return lines


def _shared(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    span = ("seed", "size")
    if {k: v for k, v in ours.items() if k not in span} != {
        k: v for k, v in theirs.items() if k not in span
    }:
        return 0
    first = max(ours["seed"], theirs["seed"])
    last = min(ours["seed"] + ours["size"], theirs["seed"] + theirs["size"])
    return max(0, last - first)
