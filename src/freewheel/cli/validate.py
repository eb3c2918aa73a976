"""`freewheel validate`: score a checkpoint or a model on held-out prompts."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from freewheel.cli.recipes import find_recipe
from freewheel.cli.train import report_findings
from freewheel.config import Config, check_config, load_config
from freewheel.errors import ConfigError
from freewheel.run_folder import RunFolder, holds_run, resolve_run_dir
from freewheel.shipped import with_absolute_paths


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "validate",
        help="score a checkpoint or a model",
        description=(
            "Score a checkpoint or a model on the held-out prompts of a recipe, or of the run "
            "given by --run. For a checkpoint that lies in its run folder neither is needed."
        ),
    )
    parser.add_argument("target", metavar="CHECKPOINT_OR_MODEL", help="a folder")
    parser.add_argument(
        "overrides",
        metavar="[RECIPE] key=value",
        nargs="*",
        help="a YAML file or a shipped recipe's name; settings on top",
    )
    parser.add_argument("--run", metavar="RUN_DIR", type=Path, help="take this run's configuration")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="folder for the result (default: beside the runs)"
    )
    parser.set_defaults(command=_validate)


def _validate(options: argparse.Namespace) -> int:
    recipe, overrides = _split(options.overrides)
    config = load_config(_find_config(options.target, recipe, options.run), overrides)
    if not config.model.path:
        config = replace(config, model=replace(config.model, path=options.target))
    check_config(config, purpose="validate")
    config = with_absolute_paths(config)
    target = Path(options.target).expanduser()
    if not target.is_dir() and not options.target.startswith("package:"):
        raise ConfigError(f"{options.target}: no such folder; give a checkpoint's or a model's")
    report_findings(config, purpose="validate")
    from freewheel.app import run_validation

    return run_validation(config, options.target, options.out or _default_folder(config))


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Tell the recipe from the overrides."""
    recipes = [text for text in arguments if "=" not in text]
    if len(recipes) > 1:
        raise ConfigError(f"more than one recipe: {', '.join(recipes)}")
    return (recipes[0] if recipes else None), [text for text in arguments if "=" in text]


def _find_config(target: str, recipe: str | None, run_dir: Path | None) -> Path:
    if recipe is not None and run_dir is not None:
        raise ConfigError(f"recipe {recipe} and --run {run_dir}: give one of them")
    if recipe is not None:
        return find_recipe(recipe)
    if run_dir is not None:
        return RunFolder.look(run_dir).config_path
    for parent in Path(target).expanduser().resolve().parents[:2]:
        if holds_run(parent):
            return RunFolder.look(parent).config_path
    raise ConfigError(f"{target} does not lie in a run folder: give a recipe, or --run RUN_DIR")


def _default_folder(config: Config) -> Path:
    trainer = replace(config.trainer, run_dir="runs/validate-{experiment_name}-{time}")
    return resolve_run_dir(replace(config, trainer=trainer))
