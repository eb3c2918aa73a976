"""Checkpoints of the trainer: bit-exact resume, loadable by others, errors that name the file."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freewheel.config.sections import OptimConfig
from freewheel.errors import CheckpointError, InvariantError
from freewheel.trainer import state
from freewheel.trainer.core import TrainerCore
from freewheel.trainer.trajectories import read_trajectories, write_trajectories
from freewheel.types import Trajectory
from freewheel.weights import unpack_weights
from tests.unit.bundles import all_bytes, kept
from tests.unit.trainer_models import CONFIGS, make_groups, save_model
from tests.unit.trainer_runs import make_config, step


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_core(model_path: Path, checkpoint: Path | None = None) -> TrainerCore:
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=5, lr_scheduler_type="cosine")
    core = TrainerCore(make_config(optim=optim), model_path, total_optimizer_steps=20)
    core.start(checkpoint)
    return core


def write(core: TrainerCore, number: int, folder: Path) -> Path:
    folder.mkdir()
    core.copy_state(number)
    core.write_state(number, folder, make_groups(2))
    return folder


@pytest.mark.parametrize("name", ["llama", "llama-untied", "mamba"])
def test_resume_is_bit_identical_to_going_on(tmp_path: Path, name: str) -> None:
    model_path = save_model(tmp_path / "model", CONFIGS[name])
    core = make_core(model_path)
    for number in (1, 2):
        step(core, number, make_groups(seed=number))
    folder = write(core, 2, tmp_path / "checkpoint")
    torch.manual_seed(1234)
    resumed = make_core(model_path, folder)
    for number in (3, 4):
        step(resumed, number, make_groups(seed=number))
    step(core, 3, make_groups(seed=3))
    going_on = step(core, 4, make_groups(seed=4))
    assert np.array_equal(all_bytes(core.export_weights()), all_bytes(resumed.export_weights()))
    assert going_on.metrics["actor/lr"] > 0
    copies = []
    for trainer in (core, resumed):
        trainer.copy_state(4)
        copies.append(trainer._copies[4])
    assert copies[0].progress.optimizer_steps == copies[1].progress.optimizer_steps == 8
    for key, tensor in copies[0].moments.items():
        assert torch.equal(tensor, copies[1].moments[key])


@pytest.mark.parametrize("stopped_after", [1, 2, 4])
def test_a_run_in_two_lives_ends_with_the_state_of_one_that_was_never_stopped(
    model_path: Path, tmp_path: Path, stopped_after: int
) -> None:
    def train(core: TrainerCore, numbers: range) -> TrainerCore:
        for number in numbers:
            step(core, number, make_groups(seed=number))
        return core

    def state_of(core: TrainerCore) -> state.StateCopy:
        core.copy_state(5)
        return core._copies[5]

    whole = state_of(train(make_core(model_path), range(1, 6)))
    first = train(make_core(model_path), range(1, stopped_after + 1))
    folder = write(first, stopped_after, tmp_path / "checkpoint")
    torch.manual_seed(1234)
    resumed = state_of(train(make_core(model_path, folder), range(stopped_after + 1, 6)))
    assert whole.progress == resumed.progress
    for mine, theirs in ((whole.model, resumed.model), (whole.moments, resumed.moments)):
        assert list(mine) == list(theirs)
        assert len(mine) > 10
        for name, tensor in mine.items():
            assert tensor.numpy().tobytes() == theirs[name].numpy().tobytes(), name


def test_a_checkpoint_carries_published_versions_beside_the_trainers_weights(
    model_path: Path, tmp_path: Path
) -> None:
    core = make_core(model_path)
    held = {0: kept(core.export_weights())}
    step(core, 1, make_groups(seed=1))
    held[1] = kept(core.export_weights())
    step(core, 2, make_groups(seed=2))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    core.copy_state(2)
    core.write_state(2, folder, [], held)
    files = sorted(path.name for path in (folder / "trainer").glob("version_*"))
    assert files == ["version_000000.safetensors", "version_000001.safetensors"]
    resumed = make_core(model_path, folder)
    for version, published in held.items():
        restored = resumed.restored_weights(version)
        assert {spec.name for spec in restored.specs} == {spec.name for spec in published.specs}
        tensors = unpack_weights(published)
        for name, tensor in unpack_weights(restored).items():
            assert torch.equal(tensor, tensors[name])
        assert not np.array_equal(all_bytes(resumed.export_weights()), all_bytes(restored))


def test_a_checkpoint_of_before_has_one_version_under_another_name(
    model_path: Path, tmp_path: Path
) -> None:
    core = make_core(model_path)
    published = kept(core.export_weights())
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    core.copy_state(1)
    core.write_state(1, folder, [], {3: published})
    (folder / "trainer/version_000003.safetensors").rename(folder / state.OLD_PUBLISHED)
    restored = make_core(model_path, folder).restored_weights(3)
    assert restored.num_bytes == published.num_bytes


def test_a_checkpoint_without_a_published_version_says_so(model_path: Path, tmp_path: Path) -> None:
    folder = write(make_core(model_path), 0, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"version_000002\.safetensors"):
        make_core(model_path, folder).restored_weights(2)


def test_the_model_files_of_a_later_checkpoint_do_not_depend_on_the_one_resumed_from(
    model_path: Path, tmp_path: Path
) -> None:
    first = write(make_core(model_path), 0, tmp_path / "first")
    resumed = make_core(model_path, first)
    shutil.rmtree(first)
    second = write(resumed, 0, tmp_path / "second")
    assert (second / "hf" / "config.json").is_file()
    assert any((second / "hf" / name).is_file() for name in ("tokenizer.json", "config.json"))


def test_random_state_comes_back(model_path: Path, tmp_path: Path) -> None:
    core = make_core(model_path)
    folder = write(core, 0, tmp_path / "checkpoint")
    expected = torch.rand(3)
    torch.manual_seed(99)
    make_core(model_path, folder)
    assert torch.equal(torch.rand(3), expected)


def test_the_copy_is_of_its_step_and_written_beside_training(
    model_path: Path, tmp_path: Path
) -> None:
    core = make_core(model_path)
    step(core, 1, make_groups())
    before = all_bytes(core.export_weights())
    core.copy_state(1)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    errors: list[BaseException] = []

    def write_aside() -> None:
        try:
            core.write_state(1, folder, make_groups(2))
        except BaseException as error:  # noqa: BLE001  # handed to the test
            errors.append(error)

    thread = threading.Thread(target=write_aside)
    thread.start()
    for number in (2, 3, 4):
        step(core, number, make_groups(seed=number))
    thread.join()
    assert not errors
    assert np.array_equal(all_bytes(make_core(model_path, folder).export_weights()), before)
    assert not np.array_equal(all_bytes(core.export_weights()), before)


def test_the_folder_loads_in_transformers(model_path: Path, tmp_path: Path) -> None:
    core = make_core(model_path)
    step(core, 1, make_groups())
    folder = write(core, 1, tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    weights = dict(state.named_weights(core._policy.model))
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, weights[name])
    # Nothing of how this trainer runs the model stays in its configuration.
    assert model.config._attn_implementation == "sdpa"
    assert "freewheel" not in (folder / "hf" / "config.json").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    assert tokenizer.decode([5, 6]) == AutoTokenizer.from_pretrained(model_path).decode([5, 6])
    prompt = torch.tensor([[5, 6]])
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False
    )
    assert generated.shape[0] == 1
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"trainer/optimizer.safetensors", "trainer/state.json", "trajectories.parquet"} <= files
    assert not [name for name in files if Path(name).suffix in {".pt", ".pth", ".bin", ".pkl"}]


def test_a_folder_that_is_not_there_is_not_made(model_path: Path, tmp_path: Path) -> None:
    """It was made elsewhere: what is written here would be in no checkpoint."""
    core = make_core(model_path)
    core.copy_state(1)
    missing = tmp_path / "runs" / "checkpoint"
    with pytest.raises(CheckpointError, match=r"checkpoint: is not there.*same path on all nodes"):
        core.write_state(1, missing, [])
    assert not missing.parent.exists()
    with pytest.raises(FileNotFoundError):
        state.write_copy(core_copy(core), missing, core._policy.model, model_path, {})
    assert not missing.parent.exists()


def core_copy(core: TrainerCore) -> state.StateCopy:
    core.copy_state(2)
    return core._copies[2]


def test_at_most_two_copies_and_each_is_freed(model_path: Path, tmp_path: Path) -> None:
    core = make_core(model_path)
    core.copy_state(1)
    core.copy_state(2)
    with pytest.raises(InvariantError, match=r"step 3: copies of steps \[1, 2\]"):
        core.copy_state(3)
    missing = tmp_path / "file"
    missing.write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"file: step 1 cannot be written"):
        core.write_state(1, missing, [])
    with pytest.raises(InvariantError, match="step 1: no copy"):
        core.write_state(1, tmp_path, [])
    core.copy_state(3)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("trainer/state.json", None),
        ("trainer/state.json", "{"),
        ("trainer/state.json", json.dumps({"step": 1})),
        ("trainer/optimizer.safetensors", None),
        ("trainer/optimizer.safetensors", "x"),
        ("hf/model.safetensors", None),
        ("hf/model.safetensors", "x"),
        ("hf/config.json", None),
    ],
)
def test_a_damaged_checkpoint_is_named(
    model_path: Path, tmp_path: Path, name: str, damage: str | None
) -> None:
    core = make_core(model_path)
    step(core, 1, make_groups())
    folder = write(core, 1, tmp_path / "checkpoint")
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(damage)
    with pytest.raises(CheckpointError, match="checkpoint"):
        make_core(model_path, folder)


def test_trajectories_come_back_bit_for_bit(tmp_path: Path) -> None:
    groups = make_groups(5, 3)
    groups[1][0].rollout_logprobs[-1] = np.float32(-1 / 3)
    path = tmp_path / "trajectories.parquet"
    write_trajectories(path, groups)
    back = read_trajectories(path, [3, 1])
    assert [group[0].group_id for group in back] == [3, 1]
    for found, expected in zip([*back[0], *back[1]], [*groups[3], *groups[1]], strict=True):
        for name in Trajectory.__dataclass_fields__:
            mine, theirs = getattr(found, name), getattr(expected, name)
            assert type(mine) is type(theirs)
            if isinstance(theirs, np.ndarray):
                assert mine.dtype == theirs.dtype
                assert mine.tobytes() == theirs.tobytes()
            else:
                assert mine == theirs
    assert read_trajectories(path, []) == []


def test_unreadable_trajectories_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.parquet"
    with pytest.raises(CheckpointError, match=r"trajectories\.parquet"):
        read_trajectories(path, [1])
    write_trajectories(path, make_groups(2))
    with pytest.raises(CheckpointError, match=r"no trajectories of groups \[7\]"):
        read_trajectories(path, [1, 7])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_trajectories(path, [1])
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_trajectories(tmp_path / "missing" / "file", make_groups(1))


def test_no_groups_is_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.parquet"
    write_trajectories(path, [])
    with pytest.raises(CheckpointError, match=r"\[0\]"):
        read_trajectories(path, [0])
