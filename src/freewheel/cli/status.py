"""`freewheel status`: what a run is doing, or how it ended."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from freewheel.files import dump_json
from freewheel.liveness import liveness
from freewheel.progress_text import (
    describe_checkpoint,
    describe_rollouts,
    describe_speed,
    describe_steps,
    describe_summary,
    describe_training,
    describe_validation,
    describe_waits,
    duration,
)
from freewheel.run_folder import LastStatus, RunFolder
from freewheel.status import RunStatus


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "status", help="what a run is doing, or how it ended"
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(command=_status)


def _status(options: argparse.Namespace) -> int:
    folder = RunFolder.look(options.run_dir)
    last, summary = folder.read_status(), folder.read_summary()
    state = _state(folder, last, summary)
    if options.json:
        sys.stdout.write(_as_json(state, last, summary) + "\n")
        return 0
    sys.stdout.write(f"{folder.path}: {state}\n")
    if last is not None and summary is None:
        sys.stdout.write("".join(f"  {line}\n" for line in _lines(last.status)))
    sys.stdout.write("".join(f"  {line}\n" for line in describe_summary(summary)))
    return 0


def _state(folder: RunFolder, last: LastStatus | None, summary: dict[str, Any] | None) -> str:
    """`running`, `completed`, `failed`, `stopped`; `lost` or `unknown`, a colon and why."""
    if summary is not None:
        return str(summary["status"])
    now_s = time.time()
    sign = "" if last is None else f", last sign of life {duration(now_s - last.updated)} ago"
    match liveness(folder, last, now_s=now_s):
        case "live":
            return "running"
        case "dead":
            return f"lost: no process holds it and it has no summary{sign}"
        case "unknown":
            who = "" if last is None else f" from process {last.pid} on {last.host}"
            return f"unknown: its lock cannot be looked at, and it has no summary{sign}{who}"


def _as_json(state: str, last: LastStatus | None, summary: dict[str, Any] | None) -> str:
    status = None if last is None else json.loads(last.status.to_json())
    updated = None if last is None else last.updated
    return dump_json(
        {
            "state": state.partition(":")[0],
            "updated": updated,
            "pid": None if last is None else last.pid,
            "status": status,
            "summary": summary,
        }
    )


def _lines(status: RunStatus) -> list[str]:
    return [
        f"phase       {status.phase}, after {duration(status.wall_s)}",
        f"steps       {describe_steps(status)}",
        f"rollouts    {describe_rollouts(status)}",
        f"speed       {describe_speed(status)}",
        f"training    {describe_training(status)}",
        f"validation  {describe_validation(status)}",
        f"checkpoint  {describe_checkpoint(status)}",
        f"waits       {describe_waits(status)}",
    ]
