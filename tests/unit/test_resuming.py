"""Taking up a run: the right checkpoint, nothing newer left in the story, nothing deleted."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from freewheel.checkpoint import FileCheckpointStore, list_checkpoints, read_checkpoint
from freewheel.config import Config
from freewheel.control.run_state import structure
from freewheel.errors import CheckpointError, ConfigError, RecordError
from freewheel.resuming import _check_fits, nothing_left, take_up
from freewheel.run_folder import CUT_FILES, RunFolder
from tests.unit.checkpoint_state import control_state, write_trainer_part
from tests.unit.disk_crashes import CrashError, Disk, disk_full

CONFIG_JSON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "eos_token_id": 2,
}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}


def make_model(folder: Path, *, tokenizer=TOKENIZER, **changes) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG_JSON, **changes}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def write_checkpoint(root: Path, step: int, *, keep: int = 9, **control) -> Path:
    async def run() -> Path:
        store = FileCheckpointStore(root, keep=keep)
        folder = await store.begin(step)
        make_model(folder / "hf")
        write_trainer_part(folder)
        return await store.commit(step, control_state(step, **control))

    return asyncio.run(run())


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def run_dir(tmp_path):
    """A run that was at step 17, with checkpoints of steps 5, 10 and 15."""
    folder = RunFolder.create(tmp_path / "run", Config())
    for name in CUT_FILES:
        rows = {"metrics": 17, "validations": 2, "samples": 70}[name]
        folder.rows_path(name).write_text("".join(f'{{"row": {i}}}\n' for i in range(rows)))
    for step in (5, 10, 15):
        write_checkpoint(folder.checkpoints_path, step)
    folder.write_summary({"status": "stopped"})
    folder.close()
    return folder.path


def resume(run_dir, model, step=None, config=None):
    folder = RunFolder.resume(run_dir)
    try:
        return take_up(folder, config or Config(), model, step)
    finally:
        folder.close()


def snapshot(run_dir: Path) -> dict[str, bytes | str | None]:
    """Everything in the folder but the lock."""
    return {
        path.relative_to(run_dir).as_posix(): (
            str(path.readlink())
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
        )
        for path in run_dir.rglob("*")
        if path.name != ".lock"
    }


def steps(run_dir: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run_dir / "checkpoints")]


def num_rows(run_dir: Path) -> dict[str, int]:
    return {name: RunFolder.look(run_dir).num_rows()[name] for name in CUT_FILES}


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_the_newest_is_taken_by_itself(run_dir, model):
    point = resume(run_dir, model)
    assert point.folder == run_dir / "checkpoints" / "step_000015"
    assert point.control == control_state(15)
    assert num_rows(run_dir) == {"metrics": 15, "validations": 0, "samples": 60}
    assert steps(run_dir) == ["step_000015", "step_000010", "step_000005"]
    superseded = {path.name for path in (run_dir / "superseded").iterdir()}
    assert superseded == {
        "metrics.1.jsonl",
        "validations.1.jsonl",
        "samples.1.jsonl",
        "summary.1.json",
    }


def test_a_named_one_is_taken_and_what_is_newer_moves_out_of_the_story(run_dir, model, capsys):
    before = {name: (run_dir / f"{name}.jsonl").read_text() for name in CUT_FILES}
    point = resume(run_dir, model, step=5)
    assert point.folder == run_dir / "checkpoints" / "step_000005"
    assert steps(run_dir) == ["step_000005"]
    assert (run_dir / "checkpoints" / "latest").resolve().name == "step_000005"
    assert num_rows(run_dir) == {"metrics": 5, "validations": 0, "samples": 20}
    superseded = run_dir / "superseded"
    for name in CUT_FILES:
        rest = (superseded / f"{name}.1.jsonl").read_text()
        assert (run_dir / f"{name}.jsonl").read_text() + rest == before[name]
    # They are whole still: moved back, they can be resumed from.
    for step in (10, 15):
        moved = superseded / f"step_{step:06d}.1"
        moved.rename(superseded / f"step_{step:06d}")
        assert read_checkpoint(superseded / f"step_{step:06d}").step == step
    err = capsys.readouterr().err
    assert "step_000015 is newer; it lies in" in err
    # The same steps, reached again, supersede nothing that lies there.
    write_checkpoint(run_dir / "checkpoints", 10)
    assert resume(run_dir, model, step=5) is not None
    assert (superseded / "step_000010.1").is_dir()


def test_a_step_without_checkpoint_is_told_which_there_are(run_dir, model):
    before = snapshot(run_dir)
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; there are: 5, 10, 15$"):
        resume(run_dir, model, step=7)
    assert snapshot(run_dir) == before


def test_a_broken_named_one_is_an_error_that_offers_another(run_dir, model):
    flip(run_dir / "checkpoints/step_000010/hf/config.json")
    before = snapshot(run_dir)
    expected = r"step_000010/hf/config\.json.*SHA-256 differs.*is of step 15 \(--from 15\)"
    with pytest.raises(CheckpointError, match=expected):
        resume(run_dir, model, step=10)
    assert snapshot(run_dir) == before


def test_by_itself_the_previous_good_one_is_taken_and_said(run_dir, model, capsys):
    flip(run_dir / "checkpoints/step_000015/control.json")
    assert resume(run_dir, model).folder.name == "step_000010"
    err = capsys.readouterr().err
    assert "passed over a broken checkpoint" in err
    assert "step_000015/control.json" in err
    assert "going on from the previous good one: step 10" in err
    assert steps(run_dir) == ["step_000010", "step_000005"]
    assert (run_dir / "superseded/step_000015.1/control.json").is_file()


def test_if_none_is_whole_nothing_is_touched(run_dir, model):
    for step in (5, 10, 15):
        flip(run_dir / f"checkpoints/step_{step:06d}/control.json")
    before = snapshot(run_dir)
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        resume(run_dir, model)
    with pytest.raises(CheckpointError, match="no other is whole"):
        resume(run_dir, model, step=5)
    assert snapshot(run_dir) == before


def test_without_any_checkpoint_the_run_begins_again(run_dir, model, capsys):
    for path in list_checkpoints(run_dir / "checkpoints"):
        path.rename(run_dir / path.name)
    assert resume(run_dir, model) is None
    assert num_rows(run_dir) == dict.fromkeys(CUT_FILES, 0)
    assert "starts from the beginning" in capsys.readouterr().err


def test_a_structural_key_cannot_change(run_dir, model):
    before = snapshot(run_dir)
    config = replace(Config(), rollout=replace(Config().rollout, n=Config().rollout.n + 1))
    with pytest.raises(CheckpointError, match=r"cannot change rollout\.n="):
        resume(run_dir, model, config=config)
    assert snapshot(run_dir) == before
    assert structure(config) != structure(Config())


def test_the_configuration_of_before_is_kept_when_a_resume_changes_it(run_dir, model):
    changed = replace(Config(), trainer=replace(Config().trainer, save_freq=7))
    resume(run_dir, model, step=10)
    assert not list((run_dir / "superseded").glob("config.*"))
    for number, config in ((1, changed), (2, Config())):
        before = (run_dir / "config.yaml").read_bytes()
        resume(run_dir, model, config=config)
        assert RunFolder.look(run_dir).read_config() == config
        assert (run_dir / f"superseded/config.{number}.yaml").read_bytes() == before


def test_a_changed_configuration_on_a_full_disk_is_a_named_error(run_dir, model, monkeypatch):
    changed = replace(Config(), trainer=replace(Config().trainer, save_freq=7))
    resume(run_dir, model)
    disk = Disk(monkeypatch)
    disk.arm(0)
    whole = run_dir.parent / "whole"
    shutil.copytree(run_dir, whole, symlinks=True)
    disk.arm(0)
    resume(run_dir, model, config=changed)
    trace = [(name, str(path)) for name, path in disk.trace]
    at = [number for number, (_, path) in enumerate(trace, start=1) if ".config" in path]
    assert len(at) >= 4  # the copy and the new one, each opened and moved
    for fail_at in at:
        disk.arm(0)
        shutil.rmtree(run_dir)
        shutil.copytree(whole, run_dir, symlinks=True)
        disk.arm(fail_at, disk_full)
        with pytest.raises(RecordError, match=r"config.*cannot be written: No space left"):
            resume(run_dir, model, config=changed)
        disk.arm(0)
        assert RunFolder.look(run_dir).read_config() in (Config(), changed)


def test_a_run_cannot_begin_or_end_an_adapter(run_dir, model):
    config = replace(Config(), model=replace(Config().model, lora_rank=8))
    with pytest.raises(CheckpointError, match=r"model\.lora_rank=8, but the run has 0"):
        resume(run_dir, model, config=config)


def test_a_checkpoint_of_before_adapters_is_of_the_weights(run_dir, model):
    checkpoint = read_checkpoint(run_dir / "checkpoints/step_000015")
    del checkpoint.control["structure"]["model.lora_rank"]
    _check_fits(checkpoint, Config(), model)
    adapter = replace(Config(), model=replace(Config().model, lora_rank=8))
    with pytest.raises(CheckpointError, match=r"model\.lora_rank=8, but the run has 0"):
        _check_fits(checkpoint, adapter, model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 128, not 64"),
        ({"num_hidden_layers": 4}, "num_hidden_layers 3, not 4"),
        ({"vocab_size": 17}, "vocab_size 16, not 17"),
        ({"model_type": "qwen2"}, "model_type 'llama', not 'qwen2'"),
        ({"tokenizer": {**TOKENIZER, "model": {"vocab": {"b": 0, "a": 1}}}}, "another vocabulary"),
    ],
)
def test_another_model_is_refused(run_dir, tmp_path, changes, message):
    other = make_model(tmp_path / "other", **changes)
    before = snapshot(run_dir)
    with pytest.raises(CheckpointError, match=message) as caught:
        resume(run_dir, other)
    assert "step_000015: is of another model than model.path" in str(caught.value)
    assert snapshot(run_dir) == before


def test_the_same_model_elsewhere_is_not_another(run_dir, tmp_path):
    tokenizer = {**TOKENIZER, "truncation": None}
    moved = make_model(tmp_path / "moved", tokenizer=tokenizer, eos_token_id=[2, 3], use_cache=True)
    assert resume(run_dir, moved) is not None


def test_missing_rows_are_found_before_anything_moves(run_dir, model):
    (run_dir / "samples.jsonl").write_text('{"row": 0}\n')
    before = snapshot(run_dir)
    with pytest.raises(RecordError, match="has 1 lines, but the checkpoint knew 20"):
        resume(run_dir, model, step=5)
    assert snapshot(run_dir) == before


def test_a_resume_that_is_cut_off_can_be_done_again(run_dir, model, monkeypatch):
    whole = run_dir.parent / "whole"
    shutil.copytree(run_dir, whole, symlinks=True)
    disk = Disk(monkeypatch)
    disk.arm(0)
    resume(run_dir, model, step=5)
    total = len(disk.trace)
    assert total > 10
    for fail_at in range(1, total + 1):
        disk.arm(0)
        shutil.rmtree(run_dir)
        shutil.copytree(whole, run_dir, symlinks=True)
        disk.arm(fail_at, CrashError)
        with pytest.raises(CrashError):
            resume(run_dir, model, step=5)
        disk.arm(0)
        assert resume(run_dir, model, step=5).control["train"]["step"] == 5
        assert steps(run_dir) == ["step_000005"]
        assert num_rows(run_dir) == {"metrics": 5, "validations": 0, "samples": 20}
        moved = sorted(path.name for path in (run_dir / "superseded").glob("step_*"))
        assert moved == ["step_000010.1", "step_000015.1"]
        # By itself, too, whatever was moved already.
        shutil.rmtree(run_dir)
        shutil.copytree(whole, run_dir, symlinks=True)
        disk.arm(fail_at, CrashError)
        with pytest.raises(CrashError):
            resume(run_dir, model, step=5)
        disk.arm(0)
        step = resume(run_dir, model).control["train"]["step"]
        assert num_rows(run_dir)["metrics"] == step


def settings(total=None, epochs=1, **data) -> Config:
    config = Config()
    trainer = replace(config.trainer, total_training_steps=total, total_epochs=epochs)
    return replace(config, trainer=trainer, data=replace(config.data, **data))


def complete(run_dir, config, *, status="completed", steps=15) -> RunFolder:
    folder = RunFolder.look(run_dir)
    folder.write_config(config)
    folder.write_summary({"status": status, "steps": steps})
    return folder


def test_a_run_whose_steps_are_done_is_complete(run_dir):
    folder = complete(run_dir, settings(15))
    before = snapshot(run_dir)
    reason = nothing_left(folder, settings(15), None)
    assert reason == (
        "the run is complete (15 of 15 steps); raise trainer.total_training_steps to go on"
    )
    assert nothing_left(folder, settings(15), 15) == reason
    assert snapshot(run_dir) == before


def test_a_run_whose_epochs_are_done_is_complete(run_dir):
    folder = complete(run_dir, settings(epochs=2))
    assert nothing_left(folder, settings(epochs=2), None) == (
        "the run is complete (15 steps, 2 epochs); raise trainer.total_epochs to go on"
    )


@pytest.mark.parametrize(
    ("before", "now", "step"),
    [
        (settings(15), settings(16), None),
        (settings(15), settings(None), None),
        (settings(15), settings(15), 10),
        (settings(epochs=2), settings(epochs=3), None),
        (settings(epochs=2), settings(16, epochs=2), None),
        # It has not been validated at its end.
        (settings(15), settings(15, val_files="val.jsonl"), None),
    ],
)
def test_a_run_with_something_left_is_not_complete(run_dir, before, now, step):
    assert nothing_left(complete(run_dir, before), now, step) is None


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_did_not_complete_is_taken_up(run_dir, status):
    folder = complete(run_dir, settings(15), status=status)
    assert nothing_left(folder, settings(15), None) is None


def test_a_killed_run_is_taken_up(run_dir):
    folder = complete(run_dir, settings(15))
    folder.summary_path.unlink()
    assert nothing_left(folder, settings(15), None) is None


def test_a_complete_run_whose_newest_checkpoint_is_broken_is_taken_up(run_dir):
    folder = complete(run_dir, settings(15))
    flip(run_dir / "checkpoints/step_000015/control.json")
    assert nothing_left(folder, settings(15), None) is None


def test_a_complete_run_without_checkpoints_does_not_start_over(run_dir):
    folder = complete(run_dir, settings(15))
    shutil.rmtree(run_dir / "checkpoints")
    assert "the run is complete" in str(nothing_left(folder, settings(15), None))
