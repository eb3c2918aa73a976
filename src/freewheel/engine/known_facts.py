"""What is known of a model from an earlier start, so that a replica needs no transformers to start.

Kept in the cache folder, in a file whose name is a digest of all that the facts come from: the
small files of the model's folder, the releases of the libraries, and the code that reads them. So a
change of one of these is seen; what is damaged is read anew.
"""

import hashlib
import importlib.metadata
import json
import logging
from pathlib import Path

from freewheel.engine.facts import ModelFacts
from freewheel.files import make_folder, write_atomic
from freewheel.models import cache_folder

logger = logging.getLogger(__name__)

_SMALL_FILES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Endings of the files of a model's folder that decide what is in `ModelFacts`: configurations and
all kinds of tokenizers."""
_LIBRARIES = ("freewheel", "torch", "transformers", "tokenizers")
_CODE = ("facts.py", "inspection.py", "known_facts.py", "../tokenizer.py")


def facts_of(model_path: Path, *, trust_remote_code: bool) -> ModelFacts:
    """The facts of the model in a folder; no weights are read.

    A folder whose own code is trusted is read each time: its code may look anywhere.

    Raises:
        ConfigError: no causal LM can be built from the folder.
    """
    kept = None if trust_remote_code else _place(model_path)
    if kept is not None and (known := _read(kept)) is not None:
        return known
    from freewheel.engine.inspection import inspect_folder  # imports transformers' models

    facts = inspect_folder(model_path, trust_remote_code=trust_remote_code)
    if kept is not None and kept == _place(model_path):  # else the folder changed meanwhile
        _keep(kept, facts)
    return facts


def _place(model_path: Path) -> Path | None:
    """Where the facts of a folder are kept; None if there is no home folder or no such folder."""
    digest = hashlib.sha256()
    try:
        folder = cache_folder() / "models"
        parts = [f"{name} {importlib.metadata.version(name)}".encode() for name in _LIBRARIES]
        parts += [(Path(__file__).parent / name).read_bytes() for name in _CODE]
        for path in sorted(model_path.iterdir()):
            if path.suffix in _SMALL_FILES and path.is_file():
                parts += [path.name.encode(), path.read_bytes()]
    except (OSError, RuntimeError, importlib.metadata.PackageNotFoundError):
        return None
    for part in parts:
        digest.update(len(part).to_bytes(8) + part)
    return folder / f"{digest.hexdigest()[:32]}.json"


def _read(path: Path) -> ModelFacts | None:
    try:
        return ModelFacts.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s: cannot be read, the model is looked at anew: %s", path, error)
        return None


def _keep(path: Path, facts: ModelFacts) -> None:
    """Write the facts; a start that cannot goes on, the next one is as slow."""
    try:
        make_folder(path.parent)
        write_atomic(path, json.dumps(facts.to_json()), durable=False)
    except (OSError, TypeError, ValueError) as error:  # or a model's facts are no plain data
        logger.warning("%s: cannot be written, each start will be slower: %s", path, error)
