"""A broken checkpoint of a real trainer: refused with path and reason, whatever is broken."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freewheel.checkpoint import (
    FileCheckpointStore,
    find_checkpoint,
    look_at_checkpoints,
    read_checkpoint,
)
from freewheel.checkpoint.control_state import control_problem
from freewheel.checkpoint.safetensors_header import safetensors_problem
from freewheel.errors import CheckpointError
from freewheel.trainer.core import TrainerCore
from tests.unit.checkpoint_state import control_state
from tests.unit.trainer_models import make_groups, save_model
from tests.unit.trainer_runs import make_config, step


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_core(model_path: Path) -> TrainerCore:
    return TrainerCore(make_config(), model_path, total_optimizer_steps=20)


@pytest.fixture(scope="module")
def whole(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's `checkpoints` with steps 1 and 2."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    core = make_core(model_path)
    core.start(None)

    async def write(number: int) -> None:
        store = FileCheckpointStore(root, keep=2)
        core.copy_state(number)
        folder = await store.begin(number)
        core.write_state(number, folder, make_groups(1), {number: core.export_weights()})
        await store.commit(number, control_state(number))

    for number in (1, 2):
        step(core, number, make_groups(seed=number))
        asyncio.run(write(number))
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "checkpoints", symlinks=True)


def files_of(folder: Path) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in paths]


def check_refused(root: Path, name: str) -> str:
    """It is named, the one before it is taken, nothing changes; returns the message."""
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(root / "step_000002")
    message = str(caught.value)
    assert f"step_000002/{name}" in message
    found, problems = find_checkpoint(root)
    assert found is not None
    assert (found.step, problems) == (1, [message])
    assert [row.problem for row in look_at_checkpoints(root, verify=True)] == [None, message]
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    return message


def test_a_checkpoint_has_all_kinds_of_files(root):
    names = files_of(root / "step_000002")
    kinds = {Path(name).name for name in names}
    assert kinds >= {"manifest.json", "control.json", "trajectories.parquet", "state.json"}
    assert kinds >= {"model.safetensors", "optimizer.safetensors", "version_000002.safetensors"}
    assert kinds >= {"config.json", "generation_config.json", "tokenizer.json"}


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_changed_byte_anywhere_is_found(root, data):
    folder = root / "step_000002"
    # The manifest has no checksum of its own: see the next test.
    names = [name for name in files_of(folder) if name != "manifest.json"]
    path = folder / data.draw(st.sampled_from(names))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    path.write_bytes(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
    try:
        assert "SHA-256 differs" in check_refused(root, path.relative_to(folder).as_posix())
    finally:
        path.write_bytes(content)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_changed_byte_in_the_manifest_is_refused_or_harmless(root, data):
    path = root / "step_000002" / "manifest.json"
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    path.write_bytes(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
    checkpoint, problem = None, ""
    try:
        checkpoint = read_checkpoint(path.parent)
    except CheckpointError as error:
        problem = str(error)
    finally:
        path.write_bytes(content)
    if checkpoint is None:
        assert "/step_000002/" in problem
    else:
        # A blank turned into another, say.
        assert (checkpoint.step, checkpoint.control) == (2, control_state(2))


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_every_file_cut_short_is_found(root, part):
    folder = root / "step_000002"
    for name in files_of(folder):
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * part)])
        message = check_refused(root, name)
        assert "has " in message or "not valid JSON" in message
        path.write_bytes(content)


def test_every_missing_file_is_found(root):
    folder = root / "step_000002"
    for name in files_of(folder):
        path = folder / name
        path.rename(root.parent / "away")
        assert "No such file" in check_refused(root, name)
        (root.parent / "away").rename(path)


def rewrite(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and make the manifest agree, as someone who means harm, or a bug, would."""
    path, manifest = folder / name, folder / "manifest.json"
    content = change(path.read_bytes())
    path.write_bytes(content)
    listed = json.loads(manifest.read_text())
    digest = hashlib.sha256(content).hexdigest()
    listed["files"][name] = {"num_bytes": len(content), "sha256": digest}
    manifest.write_text(json.dumps(listed))


def with_value(place: str, value: Any) -> Callable[[bytes], bytes]:
    """Put a value at a dotted place of a JSON file."""

    def change(content: bytes) -> bytes:
        whole = json.loads(content)
        *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
        inner = whole
        for part in parents:
            inner = inner[part]
        inner[last] = value
        return json.dumps(whole).encode()

    return change


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("format", "1"),
        ("structure", None),
        ("train", []),
        ("train.step", "2"),
        ("train.version", -1),
        ("train.version", 1.5),
        ("train.wait_s", {"samples": "long"}),
        ("ledger", None),
        ("ledger.open", {}),
        ("ledger.open.0", 3),
        ("ledger.open.0.attempts", "1"),
        ("ledger.open.0.outcomes", {"zero": {}}),
        ("ledger.prompt_failures", {"x": 1}),
        ("staleness", [0]),
        ("num_rows", {"metrics": None}),
        ("num_rows", {"metrics": -1}),
        ("checkpoints", "none"),
        ("busy_s", [1.0]),
    ],
)
def test_a_control_state_of_another_shape_is_named_by_its_place(root, place, value):
    rewrite(root / "step_000002", "control.json", with_value(place, value))
    message = check_refused(root, "control.json")
    assert place.split(".")[0] in message


@pytest.mark.parametrize("text", ["[]", "null", "3", "{", "", "[" * 100_000])
def test_a_control_state_that_is_no_object_is_refused(root, text):
    rewrite(root / "step_000002", "control.json", lambda _: text.encode())
    check_refused(root, "control.json")


def test_newer_formats_are_refused_as_such(root):
    folder = root / "step_000002"
    rewrite(folder, "control.json", with_value("format", 2))
    assert "format 2, written by a newer version" in check_refused(root, "control.json")
    manifest = folder / "manifest.json"
    manifest.write_bytes(with_value("format", 7)(manifest.read_bytes()))
    assert "format 7, written by a newer version" in check_refused(root, "manifest.json")


@pytest.mark.parametrize("name", ["../step_000001/control.json", "/etc/passwd", "hf/../../x"])
def test_a_manifest_that_leaves_its_folder_is_refused(root, name):
    manifest = root / "step_000002" / "manifest.json"
    listed = json.loads(manifest.read_text())
    listed["files"][name] = {"num_bytes": 1, "sha256": ""}
    manifest.write_text(json.dumps(listed))
    assert "not the manifest" in check_refused(root, "manifest.json")


def test_a_folder_under_the_name_of_another_step_is_refused(root):
    shutil.rmtree(root / "step_000002")
    shutil.copytree(root / "step_000001", root / "step_000002")
    assert "says step 1, control.json step 1" in check_refused(root, "manifest.json")


HEADERS = {
    "a huge header": lambda content: b"\xff" * 7 + b"\x7f" + content[8:],
    "a header beyond the file": lambda content: (len(content)).to_bytes(8, "little") + content[8:],
    "no header": lambda content: b"\0" * 8 + content[8:],
    "too short": lambda content: content[:4],
    "not JSON": lambda content: (5).to_bytes(8, "little") + b"hello",
    "not an object": lambda content: (2).to_bytes(8, "little") + b"[]",
    "offsets of another type": lambda content: with_header({"a": {"data_offsets": "x"}}),
    "an overlap": lambda content: with_header(
        {"a": {"data_offsets": [0, 4]}, "b": {"data_offsets": [2, 4]}}, b"1234"
    ),
    "a hole": lambda content: with_header({"a": {"data_offsets": [2, 4]}}, b"1234"),
    "beyond the end": lambda content: with_header({"a": {"data_offsets": [0, 40]}}, b"1234"),
    "negative": lambda content: with_header({"a": {"data_offsets": [0, -4]}}, b"1234"),
}


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("name", ["hf/model.safetensors", "trainer/optimizer.safetensors"])
@pytest.mark.parametrize("kind", HEADERS)
def test_an_unsafe_header_is_refused_even_if_the_manifest_agrees(root, name, kind):
    rewrite(root / "step_000002", name, HEADERS[kind])
    assert "header" in check_refused(root, name)


def test_the_real_files_pass_the_look_at_headers(root):
    for path in root.rglob("*.safetensors"):
        assert safetensors_problem(path) is None
    assert control_problem(control_state(3)) is None


def test_a_checkpoint_whose_tensors_are_another_models_is_refused_by_the_trainer(
    root, model_path, tmp_path
):
    from safetensors.torch import load_file, save_file

    folder = root / "step_000002"
    name = "trainer/optimizer.safetensors"
    moments = load_file(folder / name)
    moments = {key: tensor[..., :1].contiguous() for key, tensor in moments.items()}
    save_file(moments, folder / name)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors.*the model's parameter"):
        make_core(model_path).start(folder)
    weights = load_file(folder / "hf/model.safetensors")
    del weights[min(weights)]
    save_file(weights, folder / "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weights are missing: \S+weight"):
        make_core(model_path).start(folder)


def test_random_state_of_another_shape_is_refused_by_the_trainer(root, model_path):
    folder = root / "step_000002"
    path = folder / "trainer/state.json"
    path.write_bytes(with_value("rng.cpu", "00ff")(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"state\.json: random state of cpu"):
        make_core(model_path).start(folder)
