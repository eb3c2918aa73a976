"""Checkpoint folders: atomic, verified, and a broken one is refused with what is wrong."""

import asyncio
import json

import pytest

from freewheel.checkpoint import (
    FileCheckpointStore,
    find_checkpoint,
    list_checkpoints,
    read_checkpoint,
)
from freewheel.errors import CheckpointError
from tests.unit.checkpoint_state import control_state


def write(root, step, *, keep=2):
    async def run():
        store = FileCheckpointStore(root, keep=keep)
        folder = await store.begin(step)
        (folder / "hf").mkdir()
        (folder / "hf" / "model.bin").write_bytes(bytes([step]) * 1000)
        return await store.commit(step, control_state(step))

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
