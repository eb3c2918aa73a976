"""A Hugging Face dataset folder saved on disk (`Dataset.save_to_disk`), by the `datasets` extra."""

from pathlib import Path
from types import ModuleType
from typing import Any, cast

from freewheel.data.files import hash_files
from freewheel.data.records import Row, nearest
from freewheel.errors import ConfigError, DataError
from freewheel.types import Split

_SPLIT_NAMES = {Split.TRAIN: ("train",), Split.VALIDATION: ("validation", "val", "valid", "test")}


def import_datasets() -> ModuleType:
    """The `datasets` package.

    Raises:
        ConfigError: it is not installed; names the extra.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a Hugging Face dataset folder needs the package `datasets`: "
            "pip install 'freewheel[datasets]'"
        ) from error
    return datasets


def load_split(path: Path, split: Split) -> tuple[Path, Any]:
    """The folder and the `datasets.Dataset` of a split.

    Raises:
        ConfigError: `datasets` is missing, or the folder has several splits and none of these.
        DataError: the folder cannot be read or has no row.
    """
    datasets = import_datasets()
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # boundary: `datasets` raises what it likes
        raise DataError(f"{path}: not a readable dataset folder: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        name = _choose_split([str(key) for key in loaded], split, path)
        path, loaded = path / name, loaded[name]
    if not len(loaded):
        raise DataError(f"{path}: the dataset has no rows")
    return path, loaded


class HfFolder:
    """One split of a dataset folder; its Arrow files are mapped, not read.

    Args:
        path: folder of a Dataset, or of a DatasetDict.
        split: of a DatasetDict: `train`; `validation`, `val`, `valid` or `test`, the first there
            is; or the only split, whatever its name.

    Raises:
        ConfigError: `datasets` is missing, or the folder has several splits and none of these.
        DataError: the folder cannot be read or has no row.
    """

    prompt_key: str | None = None
    ground_truth_key: str | None = None

    def __init__(self, path: Path, split: Split) -> None:
        self._path, self._dataset = load_split(path, split)
        files = [Path(cached["filename"]) for cached in self._dataset.cache_files]
        self._fingerprint = hash_files(files)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the dataset's columns."""
        return tuple(cast("list[str]", self._dataset.column_names))

    @property
    def fingerprint(self) -> str:
        """Hash of the dataset's Arrow files."""
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        """The row as Python values."""
        return cast("Row", self._dataset[index])

    def where(self, index: int) -> str:
        """Folder and row number, from 1."""
        return f"{self._path} row {index + 1}"


def _choose_split(names: list[str], split: Split, path: Path) -> str:
    if len(names) == 1:
        return names[0]
    for name in _SPLIT_NAMES[split]:
        if name in names:
            return name
    wanted = _SPLIT_NAMES[split]
    raise ConfigError(
        f"{path}: no split for {split.value}: one of {', '.join(wanted)} wanted, "
        f"found {', '.join(names)}{nearest(wanted[0], names)}"
    )
