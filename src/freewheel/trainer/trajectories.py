"""Trajectories as a parquet file: one row each, every field a column, arrays as lists. Bit-exact.

A checkpoint keeps in it the groups that were finished and not yet trained.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freewheel.errors import CheckpointError
from freewheel.types import Trajectory

_ARRAYS = {
    "token_ids": (pa.int32(), np.int32),
    "loss_mask": (pa.bool_(), np.bool_),
    "rollout_logprobs": (pa.float32(), np.float32),
    "versions": (pa.int32(), np.int32),
}
_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        *(pa.field(name, pa.list_(kind), nullable=False) for name, (kind, _) in _ARRAYS.items()),
    ]
)


def write_trajectories(path: Path, groups: Iterable[list[Trajectory]]) -> None:
    """Write the trajectories of these groups, in order; a group's row group is its own.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
            for group in groups:
                if group:
                    writer.write_table(_table(group))
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"{path}: trajectories cannot be written: {error}") from error


def read_trajectories(path: Path, group_ids: Sequence[int]) -> list[list[Trajectory]]:
    """Trajectories of these groups, in the order of `group_ids`; within a group as written.

    Raises:
        CheckpointError: the file is missing or damaged, or has no trajectory of one of the groups.
    """
    found: dict[int, list[Trajectory]] = {group_id: [] for group_id in group_ids}
    try:
        if found:
            table = pq.read_table(path, filters=[("group_id", "in", list(found))])
            for trajectory in _rows(table):
                found[trajectory.group_id].append(trajectory)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: trajectories cannot be read: {error}") from error
    missing = [group_id for group_id, group in found.items() if not group]
    if missing:
        raise CheckpointError(f"{path}: no trajectories of groups {missing}")
    return [found[group_id] for group_id in group_ids]


def _table(group: Sequence[Trajectory]) -> pa.Table:
    columns: list[pa.Array] = [
        pa.array([t.sample_id for t in group], pa.string()),
        pa.array([t.group_id for t in group], pa.int64()),
        pa.array([t.reward for t in group], pa.float64()),
    ]
    for name, (kind, dtype) in _ARRAYS.items():
        arrays = [np.asarray(getattr(t, name), dtype=dtype) for t in group]
        offsets = np.cumsum([0, *(a.size for a in arrays)]).astype(np.int32)
        values = pa.array(np.concatenate(arrays), kind)
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), values))
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _rows(table: pa.Table) -> Iterable[Trajectory]:
    columns = [table.column(name).to_pylist() for name in ("sample_id", "group_id", "reward")]
    columns += [_arrays(table, name) for name in _ARRAYS]
    for row in zip(*columns, strict=True):
        yield Trajectory(**dict(zip(_SCHEMA.names, row, strict=True)))


def _arrays(table: pa.Table, name: str) -> list[np.ndarray]:
    """The rows of a list column, as copies, so that none holds on to the whole table."""
    column = table.column(name).combine_chunks()
    values = column.flatten().to_numpy(zero_copy_only=False).astype(_ARRAYS[name][1], copy=False)
    ends = np.cumsum(column.value_lengths().to_numpy())
    return [part.copy() for part in np.split(values, ends)[:-1]]
