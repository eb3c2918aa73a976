"""Parses the command line, runs a command, and turns every named error into its exit code."""

import argparse
import sys
from collections.abc import Callable, Sequence

from freewheel import __version__
from freewheel.cli import checkpoints, doctor, exit_codes, recipes, status, train, validate, why
from freewheel.errors import EXIT_INTERRUPTED, FreewheelError

Command = Callable[[argparse.Namespace], int]

_EPILOG = """\
exit codes: 0 done, 1 unexpected error, 2 wrong configuration or input, 3 a worker did not start,
4 a stage stopped, 5 a worker was lost, 6 training diverged, 7 checkpoint, 8 bug in Freewheel,
9 data, 10 a loop ended early, 11 records, 12 no score, 13 engine mismatch, 130 Ctrl-C, 143 SIGTERM
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _make_parser()
    try:
        options = _parse(parser, sys.argv[1:] if arguments is None else arguments)
        command: Command = options.command
        return command(options)
    except FreewheelError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); closing keeps Python from saying so at exit.
        sys.stderr.close()
        return 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="freewheel",
        description="Fully asynchronous reinforcement-learning post-training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"freewheel {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (train, validate, checkpoints, status, doctor, recipes, exit_codes, why):
        module.add_commands(commands)
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; `key=value` may stand anywhere, also behind options."""
    options, rest = parser.parse_known_args(arguments)
    overrides = getattr(options, "overrides", None)
    if overrides is None or any(text.startswith("-") for text in rest):
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:
        overrides += rest
    return options
