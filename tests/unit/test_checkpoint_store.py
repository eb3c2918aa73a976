"""Checkpoint folders: atomic, verified, and a broken one is refused with what is wrong."""

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from freewheel import files
from freewheel.checkpoint import (
    FileCheckpointStore,
    find_checkpoint,
    list_checkpoints,
    read_checkpoint,
)
from freewheel.errors import CheckpointError
from tests.unit.checkpoint_state import control_state, write_trainer_part


def write(root, step, *, keep=2, leave_out=(), extra=None, events=None, **control):
    """As controller and trainer do it; `events` takes what cannot be removed."""
    events = [] if events is None else events

    async def run():
        store = FileCheckpointStore(
            root, keep=keep, on_not_removed=lambda path, error: events.append((path.name, error))
        )
        folder = await store.begin(step)
        (folder / "hf").mkdir()
        (folder / "hf" / "model.bin").write_bytes(bytes([step]) * 1000)
        write_trainer_part(folder, leave_out=leave_out)
        for name, content in (extra or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        return await store.commit(step, control_state(step, **control))

    return asyncio.run(run())


def test_latest_is_the_newest_and_older_ones_are_dropped(tmp_path):
    for step in (5, 10, 15):
        write(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000015", "step_000010"]
    assert (tmp_path / "latest").resolve().name == "step_000015"
    found, problems = find_checkpoint(tmp_path)
    assert (found.step, found.control, problems) == (15, control_state(15), [])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_one_just_written_is_kept_even_if_its_step_is_older(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 15)
    write(tmp_path, 5, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000005"]


def edit(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "hf/model.bin").write_bytes(b"\0" * 1000), "SHA-256 differs"),
        (lambda f: (f / "hf/model.bin").write_bytes(b"short"), "has 5 bytes"),
        (lambda f: (f / "hf/model.bin").unlink(), "cannot be read"),
        (lambda f: (f / "control.json").write_text("{"), "has 1 bytes"),
        (lambda f: (f / "manifest.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "manifest.json").unlink(), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text(json.dumps({"format": 9})), "format 9"),
        (lambda f: edit(f, files=None), "not the manifest"),
        (lambda f: edit(f, step="ten"), "not the manifest"),
        (lambda f: edit(f, files={"control.json": 5}), "not the manifest"),
        (lambda f: edit(f, files={"../x": {"num_bytes": 1, "sha256": ""}}), "not the manifest"),
        (lambda f: edit(f, files={}), "does not list control.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_found(tmp_path, damage, message):
    write(tmp_path, 5)
    damage(write(tmp_path, 10))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "step_000010")
    found, problems = find_checkpoint(tmp_path)
    assert found.step == 5
    assert len(problems) == 1
    assert "step_000010" in problems[0]


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        write(tmp_path / "file" / "checkpoints", 5)


EMPTY = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without a tensor."""

INDEX = "hf/model.safetensors.index.json"
SHARDS = {f"hf/model-0000{i}-of-00002.safetensors": EMPTY for i in (1, 2)}
WEIGHT_MAP = {f"layer.{i}": name.removeprefix("hf/") for i, name in enumerate(SHARDS)}
SHARDED = {**SHARDS, INDEX: json.dumps({"weight_map": WEIGHT_MAP}).encode()}
ADAPTER = {"adapter/adapter_config.json": b"{}", "adapter/adapter_model.safetensors": EMPTY}
VERSIONS = {"trainer/version_000003.safetensors": EMPTY}
LORA = {"structure": {"model.lora_rank": 8}}
ONE_FILE = "hf/model.safetensors"


@pytest.mark.parametrize(
    ("leave_out", "extra", "control", "missing"),
    [
        (("hf/config.json",), {}, {}, "hf/config.json"),
        ((ONE_FILE,), {}, {}, ONE_FILE),
        (("trainer/optimizer.safetensors",), {}, {}, "trainer/optimizer.safetensors"),
        (("trainer/state.json",), {}, {}, "trainer/state.json"),
        (("trajectories.parquet",), {}, {}, "trajectories.parquet"),
        ((ONE_FILE,), {**SHARDED, min(SHARDS): None}, {}, min(SHARDS)),
        ((ONE_FILE,), {INDEX: b"[]"}, {}, "is not an index of weights"),
        ((), {}, {"held_versions": [3]}, "trainer/version_000003.safetensors"),
        ((), {**ADAPTER, min(ADAPTER): None}, LORA, min(ADAPTER)),
        ((), {**ADAPTER, max(ADAPTER): None}, LORA, max(ADAPTER)),
    ],
)
def test_one_that_lacks_a_part_is_not_committed(tmp_path, leave_out, extra, control, missing):
    write(tmp_path, 5)
    extra = {name: content for name, content in extra.items() if content is not None}
    with pytest.raises(CheckpointError, match=missing):
        write(tmp_path, 10, leave_out=leave_out, extra=extra, **control)
    assert find_checkpoint(tmp_path)[0].step == 5
    assert (tmp_path / "latest").resolve().name == "step_000005"


@pytest.mark.parametrize(
    ("leave_out", "extra", "control"),
    [
        ((ONE_FILE,), SHARDED, {}),
        ((), VERSIONS, {"held_versions": [3]}),
        ((), ADAPTER, LORA),
    ],
)
def test_sharded_weights_versions_and_adapters_are_parts_too(tmp_path, leave_out, extra, control):
    folder = write(tmp_path, 10, leave_out=leave_out, extra=extra, **control)
    assert read_checkpoint(folder).step == 10


def test_nothing_of_the_trainer_at_all_is_refused(tmp_path):
    async def run():
        store = FileCheckpointStore(tmp_path, keep=2)
        await store.begin(5)
        await store.commit(5, control_state(5))

    with pytest.raises(CheckpointError, match=r"has not written hf/config\.json, hf/model"):
        asyncio.run(run())
    assert list_checkpoints(tmp_path) == []


def not_empty(path):
    return OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))


def names_in(root):
    return sorted(path.name for path in root.iterdir())


def test_one_that_cannot_be_removed_costs_room_and_not_the_run(tmp_path, monkeypatch):
    real, events = files.remove, []

    def remove(path):
        raise not_empty(path)

    monkeypatch.setattr(files, "remove", remove)
    for step in (5, 10, 5, 5):  # the last: the same step again, whose old folder stays as well
        write(tmp_path, step, keep=1, events=events)
        assert find_checkpoint(tmp_path)[0].step == step
        assert (tmp_path / "latest").resolve().name == f"step_{step:06d}"
    first = ".writing-old-step_000005.1"
    assert [name for name, _ in events].count(first) >= 3  # tried again each time
    assert len(list(tmp_path.glob(".writing-old-*"))) == 3
    monkeypatch.setattr(files, "remove", real)
    write(tmp_path, 20, keep=1)
    assert names_in(tmp_path) == ["latest", "step_000020"]


def test_one_that_cannot_even_be_renamed_is_tried_again(tmp_path, monkeypatch):
    real, events = files.move, []

    def move(source, target):
        if source.name == "step_000005":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))
        real(source, target)

    monkeypatch.setattr(files, "move", move)
    for step in (5, 10, 15):
        write(tmp_path, step, keep=1, events=events)
    assert [name for name, _ in events] == ["step_000005", "step_000005"]
    assert names_in(tmp_path) == ["latest", "step_000005", "step_000015"]
    monkeypatch.setattr(files, "move", real)
    write(tmp_path, 20, keep=1)
    assert names_in(tmp_path) == ["latest", "step_000020"]


def test_what_a_crash_left_of_the_same_step_need_only_move_out_of_the_way(tmp_path, monkeypatch):
    left_over = tmp_path / ".writing-step_000005"
    left_over.mkdir()
    (left_over / ".nfs0001").write_text("open elsewhere")
    real, events = os.unlink, []

    def unlink(path, **options):
        if Path(path).name == ".nfs0001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    assert read_checkpoint(write(tmp_path, 5, events=events)).step == 5
    assert [name for name, _ in events] == [".writing-old-step_000005.1"]
    assert "busy" in str(events[0][1])
    assert not list((tmp_path / "step_000005").glob(".nfs*"))
