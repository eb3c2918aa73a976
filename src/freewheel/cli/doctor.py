"""`freewheel doctor`: why a Python process is stuck, or that it is not."""

import argparse
import sys
from pathlib import Path
from typing import Any

from freewheel.doctor import (
    Examination,
    Sampling,
    as_data,
    as_text,
    examine,
    judge,
    ray_processes,
    read_dump,
)
from freewheel.doctor.sources import annotate
from freewheel.errors import ConfigError
from freewheel.files import dump_json

_EPILOG = """\
exit codes: 0 nothing wrong, 1 something was found, 2 a process could not be examined
"""


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="why any Python process is stuck, or that it is not",
        description="Examines processes of any Python program with py-spy, from outside.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pid", type=int, action="append", default=[], help="may be repeated")
    parser.add_argument(
        "--all-ray", action="store_true", help="all Ray workers and drivers of this machine"
    )
    parser.add_argument(
        "--dump", type=Path, metavar="FILE", help="a saved `py-spy dump`, as text or --json"
    )
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="looks (default 3)")
    parser.add_argument(
        "--interval", type=float, default=0.4, metavar="S", help="seconds between (default 0.4)"
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="limit of a look (default 10)"
    )
    parser.add_argument("--stacks", action="store_true", help="print the stacks of all threads too")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    examination = _examine(options)
    if options.json:
        sys.stdout.write(dump_json(as_data(examination)) + "\n")
    else:
        sys.stdout.write(as_text(examination, stacks=options.stacks))
    if examination.findings:
        return 1
    return 2 if examination.failures else 0


def _examine(options: argparse.Namespace) -> Examination:
    wants_live = bool(options.pid) or options.all_ray
    if (options.dump is not None) == wants_live:
        raise ConfigError("doctor: give --pid, --all-ray or both, or else --dump FILE")
    if options.dump is not None:
        return judge([annotate(process) for process in read_dump(options.dump)])
    if options.samples < 1 or options.interval < 0 or options.timeout <= 0:
        raise ConfigError("doctor: --samples from 1, --interval from 0, --timeout above 0")
    found = ray_processes() if options.all_ray else []
    if options.all_ray and not found and not options.pid:
        raise ConfigError("doctor: no Ray worker or driver runs on this machine")
    sampling = Sampling(
        num_samples=options.samples, interval_s=options.interval, timeout_s=options.timeout
    )
    return examine([*options.pid, *found], sampling)
