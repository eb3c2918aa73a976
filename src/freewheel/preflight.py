"""What can be found out about a run's inputs before anything is started.

It happens in a process of its own, which ends with its answer: the libraries that read data are
heavy, and the control plane, which goes on in this process, should not carry them.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from freewheel.backends.vllm.settings import INSTALL
from freewheel.config import Config, dump_config, load_config
from freewheel.config.checks import Purpose
from freewheel.data import check_data
from freewheel.data.dataset import file_names, files_key
from freewheel.data.generated import PREFIX, GeneratedTask
from freewheel.errors import ConfigError, DataError, FreewheelError
from freewheel.files import dump_json, write_atomic
from freewheel.loggers import check_loggers
from freewheel.models import INSTALL_PEFT, locate_model
from freewheel.shipped import locate
from freewheel.types import Split

TIMEOUT_S = 120.0
"""Looking at footers and first lines takes seconds, importing the readers some more."""

_CONFIG = "config.yaml"
_ANSWER = "answer.json"
_STAGE = "stage"
_OUTPUT = "output"
_WARNING = "warning: "
_COUNT_LINES_BELOW_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found.

    Attributes:
        missing: files, folders and packages that are not on this machine; a line each.
        problems: inputs that are here and cannot be used; a line each.
        warnings: what will work, but hardly as meant.
        notes: what the inputs are.
        num_train_prompts, num_val_prompts: None where counting would read too much.
    """

    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    num_train_prompts: int | None = None
    num_val_prompts: int | None = None


_FINDINGS = TypeAdapter(Findings)


def check_inputs(config: Config, *, purpose: Purpose = "train") -> Findings:
    """Look at data, model, loggers and the user's code.

    Raises:
        ConfigError: the look itself failed, or took longer than `TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory(prefix="freewheel-preflight-") as name:
        folder = Path(name)
        (folder / _CONFIG).write_text(dump_config(config), encoding="utf-8")
        end = _run_look(folder, purpose)
        if (folder / _ANSWER).exists():
            # However the process ended after it: user code may hold it, or break its exit.
            # Not the validator's own parser of JSON, which refuses lone surrogates.
            return _FINDINGS.validate_python(json.loads((folder / _ANSWER).read_bytes()))
        raise ConfigError(_no_answer(folder, end))


def _run_look(folder: Path, purpose: Purpose) -> int | None:
    """Run `main` in a process of its own; returns its exit code, None if it had to be killed.

    No pipes: what user code prints is no answer, and what it starts would hold them open.
    """
    command = [sys.executable, "-m", "freewheel.preflight", purpose, str(folder)]
    with (folder / _OUTPUT).open("wb") as output:
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def _no_answer(folder: Path, exit_code: int | None) -> str:
    """What to tell the user of a look that gave no answer."""
    stage = folder / _STAGE
    key = stage.read_text(encoding="utf-8") if stage.exists() else "the configuration"
    if exit_code is None:
        return f"{key}: looking at it took longer than {TIMEOUT_S:g} s"
    output = (folder / _OUTPUT).read_text(encoding="utf-8", errors="replace").strip()
    ended = f"{key}: the process that looked at it ended with exit code {exit_code}"
    return f"{ended}:\n{output}" if output else ended


def look(
    config: Config,
    *,
    purpose: Purpose = "train",
    begin: Callable[[str], object] = lambda key: None,
) -> Findings:
    """As `check_inputs`, in this process.

    Args:
        config: checked configuration.
        purpose: what the inputs are for.
        begin: is told the keys of what is looked at next, before it is.
    """
    splits = tuple(Split) if purpose == "train" else (Split.VALIDATION,)
    begin("logging.loggers, rollout.engine")
    missing = [*check_loggers(config), *_missing_engine(config)]
    missing += [*_missing_lora(config, purpose), *_missing_files(config, splits)]
    problems: list[str] = []
    lines: list[str] = []
    files = ", ".join(files_key(split) for split in splits)
    if not _missing_files(config, splits):
        begin(files)
        lines += _try(partial(_look_at_data, config, purpose), problems)
    begin(f"model.path={config.model.path}")
    lines += _try(partial(_look_at_model, config), problems if _is_model_here(config) else missing)
    _try(partial(_look_at_user_code, config, begin), problems)
    begin(files)
    counts = {split: _count(config, split) for split in splits}
    return Findings(
        missing=tuple(missing),
        problems=tuple(problems),
        warnings=tuple(line for line in lines if line.startswith(_WARNING)),
        notes=tuple(line for line in lines if not line.startswith(_WARNING)),
        num_train_prompts=counts.get(Split.TRAIN),
        num_val_prompts=counts.get(Split.VALIDATION),
    )


def _try(check: Callable[[], list[str]], failures: list[str]) -> list[str]:
    try:
        return check()
    except (ConfigError, DataError) as error:
        failures.append(str(error))
        return []


def _missing_files(config: Config, splits: Sequence[Split]) -> list[str]:
    return [
        f"{files_key(split)}: {name} does not exist"
        for split in splits
        for name in file_names(config, split)
        if not name.startswith(PREFIX) and not Path(name).expanduser().exists()
    ]


def _look_at_data(config: Config, purpose: Purpose) -> list[str]:
    if purpose == "train":
        return check_data(config)
    held_out = replace(config.data, train_files=config.data.val_files)
    lines = check_data(replace(config, data=held_out))
    return [line for line in lines if line.startswith("data.val_files")]


def _is_model_here(config: Config) -> bool:
    return locate(config.model.path).is_dir()


def _look_at_model(config: Config) -> list[str]:
    return [f"model.path: {config.model.path}: {locate_model(config.model.path)}"]


def _look_at_user_code(config: Config, begin: Callable[[str], object]) -> list[str]:
    """Import reward and environment, as the rollout workers will."""
    from freewheel.rollout.environment import load_environment
    from freewheel.rollout.rewards import load_reward

    begin(f"rollout.reward={config.rollout.reward}")
    load_reward(config)
    begin(f"rollout.environment={config.rollout.environment}")
    load_environment(config.rollout.environment)
    return []


def _missing_engine(config: Config) -> list[str]:
    """The engine, if it is not installed here; other nodes say so when their replicas start."""
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        return [f"rollout.engine=vllm: vLLM is not installed; {INSTALL}"]
    return []


def _missing_lora(config: Config, purpose: Purpose) -> list[str]:
    """What trains an adapter, if it is not installed here; a checkpoint is scored without it."""
    if purpose == "train" and config.model.lora_rank and importlib.util.find_spec("peft") is None:
        rank = config.model.lora_rank
        return [f"model.lora_rank={rank}: peft is not installed; type: {INSTALL_PEFT}"]
    return []


def _count(config: Config, split: Split) -> int | None:
    """Prompts of a split, where that is cheap to know."""
    limit = config.data.train_max_samples if split is Split.TRAIN else config.data.val_max_samples
    counts = [_count_source(name, split) for name in file_names(config, split)]
    known = [count for count in counts if count is not None]
    if not counts or len(known) < len(counts):
        return None
    return min(sum(known), limit) if limit else sum(known)


def _count_source(name: str, split: Split) -> int | None:
    path = Path(name).expanduser()
    try:
        if name.startswith(PREFIX):
            return len(GeneratedTask(name))
        if path.is_dir():
            from freewheel.data.hf_folder import load_split

            return len(load_split(path, split)[1])
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_metadata(path).num_rows
        if path.stat().st_size < _COUNT_LINES_BELOW_BYTES:
            with path.open("rb") as file:
                return sum(1 for line in file if line.strip())
    except (FreewheelError, OSError, ValueError):
        # Only a count for the plan; what is wrong with the source is reported by its check.
        return None
    return None


def main() -> None:
    """Read the configuration in a folder and write the findings there."""
    purpose: Purpose = "validate" if sys.argv[1] == "validate" else "train"
    folder = Path(sys.argv[2])
    stage = folder / _STAGE
    config = load_config(folder / _CONFIG)
    findings = look(
        config,
        purpose=purpose,
        begin=lambda key: stage.write_text(key, encoding="utf-8", errors="replace"),
    )
    write_atomic(folder / _ANSWER, dump_json(findings), durable=False)


if __name__ == "__main__":
    main()
