"""For each change to the disk that a checkpoint makes: a crash there, and a failure there."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

import pytest

from freewheel.checkpoint import (
    FileCheckpointStore,
    find_checkpoint,
    list_checkpoints,
    read_checkpoint,
    restore_replaced,
)
from freewheel.errors import CheckpointError
from freewheel.trainer.core import TrainerCore
from tests.unit.checkpoint_state import control_state
from tests.unit.disk_crashes import CrashError, Disk, disk_full
from tests.unit.trainer_models import make_groups, save_model
from tests.unit.trainer_runs import make_config, step


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> TrainerCore:
    core = TrainerCore(
        make_config(), save_model(tmp_path_factory.mktemp("model")), total_optimizer_steps=20
    )
    core.start(None)
    step(core, 1, make_groups())
    return core


def write(
    core: TrainerCore,
    root: Path,
    number: int,
    *,
    keep: int = 2,
    not_removed: list[Path] | None = None,
) -> Path:
    """As the controller and the trainer do it together."""
    stays = [] if not_removed is None else not_removed

    async def run() -> Path:
        store = FileCheckpointStore(
            root, keep=keep, on_not_removed=lambda path, _error: stays.append(path)
        )
        core.copy_state(number)
        folder = await store.begin(number)
        core.write_state(number, folder, make_groups(1), {number: core.export_weights()})
        return await store.commit(number, control_state(number))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def template(core: TrainerCore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 5 and 10."""
    root = tmp_path_factory.mktemp("template") / "checkpoints"
    write(core, root, 5)
    write(core, root, 10)
    return root


def copy_of(template: Path, place: Path) -> Path:
    shutil.copytree(template, place, symlinks=True)
    return place


def latest(root: Path) -> str:
    return (root / "latest").readlink().name


def num_changes(core: TrainerCore, root: Path, disk: Disk, number: int, **options: int) -> int:
    """How many changes writing one checkpoint makes, when nothing fails."""
    disk.arm(0)
    write(core, root, number, **options)
    return len(disk.trace)


def check_goes_on(core: TrainerCore, root: Path, disk: Disk) -> None:
    """The next checkpoint is written as if nothing had been."""
    disk.arm(0)
    final = write(core, root, 20)
    found, problems = find_checkpoint(root)
    assert found is not None
    assert (found.step, problems, latest(root)) == (20, [], final.name)
    assert len(list_checkpoints(root)) == 2
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
@pytest.mark.parametrize("error", [CrashError, disk_full])
def test_at_every_change_of_a_new_checkpoint(core, template, tmp_path, monkeypatch, error):
    disk = Disk(monkeypatch)
    total = num_changes(core, copy_of(template, tmp_path / "whole"), disk, 15)
    in_place, latest_moved = (
        max(
            number
            for number, (name, path) in enumerate(disk.trace, start=1)
            if name == "replace" and str(path).endswith(source)
        )
        for source in (".writing-step_000015", ".writing-latest")
    )
    assert total > latest_moved + 10 > in_place > 30
    whole_trace = list(disk.trace)
    outcomes = set()
    for fail_at in range(1, total + 1):
        disk.arm(0)
        root = copy_of(template, tmp_path / str(fail_at))
        disk.arm(fail_at, error)
        # A full disk has a name; a crash has none, since nobody is left to give it one.
        expected = CrashError if error is CrashError else CheckpointError
        names = [(what, str(where)) for what, where in whole_trace[:fail_at]]
        if error is disk_full and names[-1][0] == "mkdir" and names[-1] in names[:-1]:
            # transformers makes it again, and minds no failure as long as it is there.
            expected = ()
        if error is disk_full and fail_at > latest_moved + 1:
            # It is whole and found: what is old and stays costs room alone.
            expected = ()
        not_removed: list[Path] = []
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            write(core, root, 15, not_removed=not_removed)
        disk.arm(0)
        found, problems = find_checkpoint(root)
        assert found is not None
        assert problems == []
        is_there = fail_at > in_place or not expected
        assert len(not_removed) == (error is disk_full and fail_at > latest_moved + 1)
        assert found.step == (15 if is_there else 10), whole_trace[fail_at - 1]
        assert read_checkpoint((root / "latest").resolve()).step in {10, found.step}
        outcomes.add((found.step, latest(root)))
        if error is CrashError or not_removed:
            check_goes_on(core, root, disk)
        shutil.rmtree(root)
    assert outcomes == {
        (10, "step_000010"),
        (15, "step_000010"),
        (15, "step_000015"),
    }


def test_at_every_change_when_the_same_step_is_written_again(core, template, tmp_path, monkeypatch):
    """The one that is replaced is the only one there is, and may not be missing for a moment."""
    disk = Disk(monkeypatch)
    alone = copy_of(template, tmp_path / "alone")
    shutil.rmtree(alone / "step_000005")
    total = num_changes(core, copy_of(alone, tmp_path / "whole"), disk, 10, keep=1)
    # What comes before is the same as for a new step.
    first = next(
        number
        for number, (_, path) in enumerate(disk.trace, start=1)
        if str(path).endswith("/control.json")
    )
    assert total - first > 10
    replaced = 0
    for fail_at in range(first, total + 1):
        disk.arm(0)
        root = copy_of(alone, tmp_path / str(fail_at))
        disk.arm(fail_at)
        with pytest.raises(CrashError):
            write(core, root, 10, keep=1)
        disk.arm(0)
        replaced += not (root / "step_000010").exists()
        restore_replaced(root)
        found, problems = find_checkpoint(root)
        assert found is not None
        assert (found.step, problems, latest(root)) == (10, [], "step_000010")
        assert write(core, root, 11, keep=1).name == latest(root)
        assert [path.name for path in list_checkpoints(root)] == ["step_000011"]
        shutil.rmtree(root)
    assert replaced


def test_every_file_is_on_disk_before_the_folder_gets_its_name(
    core, template, tmp_path, monkeypatch
):
    root = copy_of(template, tmp_path / "checkpoints")
    synced: list[tuple[str, Path]] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        synced.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        synced.append(("move", Path(source)))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    folder = write(core, root, 15)
    aside = root / ".writing-step_000015"
    moved = synced.index(("move", aside))
    before = {path for what, path in synced[:moved] if what == "sync"}
    names = [path.relative_to(folder) for path in folder.rglob("*")]
    assert {aside, *(aside / name for name in names)} <= before
    assert synced[moved + 1] == ("sync", root)
    link = synced.index(("move", root / ".writing-latest"))
    assert link > moved + 1
    assert synced[link + 1] == ("sync", root)
