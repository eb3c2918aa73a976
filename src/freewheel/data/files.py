"""Parquet and JSONL files, read row by row without holding the rows as Python objects.

A JSONL file is mapped into memory, with the offset of each line in a numpy array. A parquet file
cannot be read by row (a shuffled order would decode a whole row group for each), so it is decoded
once into an Arrow file without a name, which is mapped: its pages can go back to the disk.
"""

import bisect
import hashlib
import json
import mmap
import tempfile
from io import BufferedReader
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from freewheel.data.records import Row
from freewheel.errors import DataError

_CHUNK_BYTES = 1 << 24
_ROWS_PER_BATCH = 1024


class _File:
    """What both kinds share: path, content hash, where a row is."""

    prompt_key: str | None = None
    ground_truth_key: str | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._fingerprint = _hash(file)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error

    @property
    def fingerprint(self) -> str:
        """Hash of the file's content."""
        return self._fingerprint

    def where(self, index: int) -> str:
        """File and row number, from 1."""
        return f"{self._path} row {index + 1}"


class JsonlFile(_File):
    """One JSON object a line. Blank lines do not count as rows.

    Raises:
        DataError: the file cannot be read, has no row, or its first row is not an object.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise DataError(f"{path}: the file is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._lines, self._starts, self._ends = _find_lines(self._map)
        if not len(self._starts):
            raise DataError(f"{path}: the file has blank lines only")
        self._columns = tuple(self.row(0))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names in the first row; later rows may have others."""
        return self._columns

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        """File and line number, from 1."""
        return f"{self._path} line {int(self._lines[index]) + 1}"

    def row(self, index: int) -> Row:
        """The object at a line."""
        line = self._map[int(self._starts[index]) : int(self._ends[index])]
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.where(index)}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)}: an object wanted, found {type(row).__name__}")
        return cast("Row", row)


class ParquetFile(_File):
    """A parquet file.

    Raises:
        DataError: the file cannot be read or has no row.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._reader = _map_parquet(path)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: not a readable parquet file: {error}") from error
        self._columns = tuple(cast("list[str]", self._reader.schema.names))
        ends: list[int] = []
        for number in range(self._reader.num_record_batches):
            rows = self._reader.get_batch(number).num_rows
            ends.append(rows + (ends[-1] if ends else 0))
        self._ends = ends
        if not len(self):
            raise DataError(f"{path}: the file has no rows")

    @property
    def columns(self) -> tuple[str, ...]:
        """Names in the file's schema."""
        return self._columns

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        """The row as Python values."""
        number = bisect.bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        batch = self._reader.get_batch(number)
        return cast("Row", batch.slice(index - before, 1).to_pylist()[0])


def hash_files(paths: list[Path]) -> str:
    """Hash of the contents of files, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            digest.update(_hash(file).encode())
    return digest.hexdigest()


def _hash(file: BufferedReader) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _find_lines(
    data: mmap.mmap,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(line numbers from 0, starts, ends) of the lines that hold more than one byte."""
    breaks: list[npt.NDArray[np.int64]] = []
    for offset in range(0, len(data), _CHUNK_BYTES):
        chunk = np.frombuffer(data[offset : offset + _CHUNK_BYTES], dtype=np.uint8)
        breaks.append(np.flatnonzero(chunk == ord("\n")).astype(np.int64) + offset)
    ends = np.concatenate([*breaks, np.array([len(data)], dtype=np.int64)])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])
    # One byte is no object; it is the carriage return of a blank line.
    kept = np.flatnonzero(ends - starts > 1)
    return kept, starts[kept], ends[kept]


def _map_parquet(path: Path) -> pa.RecordBatchFileReader:
    """A reader over a mapped Arrow file that has no name any more, so nothing is left behind."""
    source = pq.ParquetFile(path)
    with tempfile.NamedTemporaryFile(prefix="freewheel-", suffix=".arrow") as spill:
        with pa.ipc.new_file(spill.name, source.schema_arrow) as writer:
            for batch in source.iter_batches(batch_size=_ROWS_PER_BATCH):
                writer.write_batch(batch)
        source.close()
        return pa.ipc.open_file(pa.memory_map(spill.name, "r"))
