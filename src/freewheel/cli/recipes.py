"""`freewheel recipes`: the shipped recipes, and how a recipe is named on the command line."""

import argparse
import difflib
import shutil
import sys
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.shipped import recipes_folder


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "recipes", help="list the shipped recipes, or copy one here"
    )
    parser.add_argument("--copy", metavar="NAME", help="copy this recipe into the current folder")
    parser.set_defaults(command=_run)


def find_recipe(name: str) -> Path:
    """The file that a recipe's path, or the name of a shipped one, means.

    Raises:
        ConfigError: there is none; names the nearest shipped one.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    nearest = difflib.get_close_matches(path.stem, shipped, n=1, cutoff=0.5)
    hint = f"; nearest: {nearest[0]}" if nearest else ""
    raise ConfigError(
        f"recipe {name}: no such file, and no shipped recipe of this name (freewheel recipes){hint}"
    )


def shipped_recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"))}


def describe_recipe(path: Path) -> str:
    """The first comment line of a recipe."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.startswith("#") and line.strip("# \n"):
                return line.strip("# \n")
    return ""


def _run(options: argparse.Namespace) -> int:
    if options.copy is not None:
        return _copy(options.copy)
    shipped = shipped_recipes()
    if not shipped:
        raise ConfigError(f"no recipes in {recipes_folder()}")
    width = max(len(name) for name in shipped)
    for name, path in shipped.items():
        sys.stdout.write(f"{name:<{width}}  {describe_recipe(path)}\n{'':<{width}}  {path}\n")
    return 0


def _copy(name: str) -> int:
    shipped = shipped_recipes()
    if name not in shipped:
        raise ConfigError(f"no shipped recipe {name!r}; there are: {', '.join(shipped)}")
    target = Path.cwd() / shipped[name].name
    if target.exists():
        raise ConfigError(f"{target} exists already")
    shutil.copyfile(shipped[name], target)
    sys.stdout.write(f"{target}\n")
    return 0
