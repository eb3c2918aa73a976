"""`freewheel why`: what a run is doing, what it waits for, why it does not move, what to do."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from freewheel.files import dump_json
from freewheel.run_folder import RunFolder
from freewheel.why import explain

_LABELS = {
    "doing": "doing",
    "waiting_for": "waits for",
    "because": "because",
    "advice": "what to do",
}


def add_commands(commands: Any) -> None:
    """Add this module's command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "why",
        help="why a run does not move, or how it ended",
        description="Explain a live, stuck, killed or finished run from its folder.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(command=_why)


def _why(options: argparse.Namespace) -> int:
    answers = asdict(explain(RunFolder.look(options.run_dir)))
    if options.json:
        sys.stdout.write(dump_json(answers) + "\n")
        return 0
    for name, label in _LABELS.items():
        if answers[name]:
            sys.stdout.write(f"{label + ':':<12} {answers[name]}\n")
    for line in answers["details"]:
        sys.stdout.write(f"  {line}\n")
    return 0
