"""A checkpoint's weights as a folder of their own, which transformers and vLLM load."""

import os
from pathlib import Path

from freewheel import files
from freewheel.checkpoint.reader import Manifest, verify_file
from freewheel.errors import CheckpointError, ConfigError

HF = "hf/"


def check_target(target: Path) -> None:
    """Refuse a place where something is already.

    Raises:
        ConfigError: it is a file, or a folder that is not empty.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"{target}: is not a folder; give a new one")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target}: is not empty; give a new folder")


def export_model(checkpoint: Path, target: Path) -> None:
    """Copy model, tokenizer and generation configuration; written beside its place and renamed.

    Args:
        checkpoint: a checkpoint's folder; every file that is copied is verified.
        target: a new folder, or an empty one.

    Raises:
        ConfigError: something is there already.
        CheckpointError: the checkpoint is broken, or the folder cannot be written.
    """
    check_target(target)
    manifest = Manifest.read(checkpoint)
    chosen = {name: entry for name, entry in manifest.files.items() if name.startswith(HF)}
    if not chosen:
        raise CheckpointError(f"{checkpoint}: holds no model ({HF})")
    aside = target.parent / f".{target.name}.{os.getpid()}.writing"
    try:
        files.make_folder(aside)
        for name, entry in chosen.items():
            copy = aside / name.removeprefix(HF)
            files.make_folder(copy.parent)
            files.copy_file(checkpoint / name, copy)
            verify_file(copy, entry, contents=True)
        files.sync_tree(aside)
        files.move(aside, target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: not exported: {error.filename or target}: {error.strerror}"
        ) from error
    finally:
        if aside.exists():
            files.remove(aside)
