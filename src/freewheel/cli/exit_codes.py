"""`freewheel exit-codes`: what each exit code means."""

import argparse
import sys
from typing import Any

from freewheel import errors
from freewheel.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, FreewheelError


def add_commands(commands: Any) -> None:
    """Add this module's command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "exit-codes", help="what each exit code means", description="What each exit code means."
    )
    parser.set_defaults(command=_run)


def exit_codes() -> dict[int, str]:
    """Meaning by exit code; the names of errors first."""
    found = {0: "completed", 1: "an unexpected error; the traceback is printed"}
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, FreewheelError):
            if "exit_code" not in vars(error) or error is FreewheelError:
                continue
            first_line = (error.__doc__ or "").strip().partition("\n")[0]
            found[error.exit_code] = f"{error.__name__}: {first_line}"
    found[EXIT_INTERRUPTED] = "stopped by SIGINT (Ctrl-C)"
    found[EXIT_TERMINATED] = "stopped by SIGTERM"
    return dict(sorted(found.items()))


def _run(_options: argparse.Namespace) -> int:
    for code, meaning in exit_codes().items():
        sys.stdout.write(f"{code:>4}  {meaning}\n")
    return 0
