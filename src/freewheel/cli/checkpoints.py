"""`freewheel checkpoints`: list, verify and export the checkpoints of a run."""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from freewheel.checkpoint import (
    Checkpoint,
    Listed,
    check_target,
    export_model,
    find_checkpoint,
    look_at_checkpoints,
    read_checkpoint,
)
from freewheel.errors import CheckpointError, ConfigError
from freewheel.files import dump_json
from freewheel.progress_text import duration
from freewheel.run_folder import RunFolder

_EPILOG = """\
exit codes: 0 all are as they should be, 2 wrong argument, 7 one is broken
"""


def add_commands(commands: Any) -> None:
    """Add this module's command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "checkpoints",
        help="list, verify and export a run's checkpoints",
        description=(
            "Lists the checkpoints of a run and what is wrong with any. Without --verify only "
            "the files' sizes are compared with the manifest. Changes nothing in the run folder."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    parser.add_argument("--verify", action="store_true", help="read and check every file")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument(
        "--export",
        metavar="DIR",
        type=Path,
        help="copy the newest whole one's model into this new folder, for transformers and vLLM",
    )
    parser.add_argument("--step", metavar="N", type=int, help="with --export: the one of this step")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    root = RunFolder.look(options.run_dir).checkpoints_path
    if options.export is not None:
        return _export(root, options.export, options.step)
    if options.step is not None:
        raise ConfigError("checkpoints: --step belongs to --export")
    found = look_at_checkpoints(root, verify=options.verify)
    if options.json:
        rows = [{**asdict(row), "path": str(row.path)} for row in found]
        sys.stdout.write(dump_json({"run_dir": str(options.run_dir), "checkpoints": rows}) + "\n")
    else:
        sys.stdout.write(_as_text(root, found))
    return CheckpointError.exit_code if any(row.problem for row in found) else 0


def _export(root: Path, target: Path, step: int | None) -> int:
    target = target.expanduser().absolute()
    check_target(target)
    checkpoint = _newest(root) if step is None else _of_step(root, step)
    export_model(checkpoint.folder, target)
    sys.stdout.write(f"{target}: model of step {checkpoint.step}\n")
    return 0


def _newest(root: Path) -> Checkpoint:
    checkpoint, problems = find_checkpoint(root)
    for problem in problems:
        sys.stderr.write(f"passed over a broken checkpoint: {problem}\n")
    if checkpoint is None:
        raise CheckpointError(f"{root}: there is no whole checkpoint to export")
    return checkpoint


def _of_step(root: Path, step: int) -> Checkpoint:
    found = {row.step: row.path for row in look_at_checkpoints(root, verify=False)}
    if step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise ConfigError(f"{root}: no checkpoint of step {step}; there are: {there}")
    return read_checkpoint(found[step])


def _as_text(root: Path, found: list[Listed]) -> str:
    if not found:
        return f"{root}: no checkpoint yet\n"
    rows = [("step", "version", "size", "written", "state"), *map(_columns, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "".join(
        "  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), row[4]])
        + "\n"
        for row in rows
    )


def _columns(row: Listed) -> tuple[str, str, str, str, str]:
    state = row.problem or ("whole" if row.verified else "sizes are right")
    return (
        str(row.step),
        "?" if row.policy_version is None else str(row.policy_version),
        "?" if row.num_bytes is None else _size(row.num_bytes),
        "?" if row.written is None else f"{duration(max(0.0, time.time() - row.written))} ago",
        f"latest, {state}" if row.is_latest else state,
    )


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"
