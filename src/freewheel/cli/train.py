"""`freewheel train` and `freewheel resume`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from freewheel.cli.recipes import find_recipe
from freewheel.config import Config, check_config, load_config
from freewheel.config.checks import Purpose
from freewheel.config.load import raise_problems
from freewheel.config.schedule import schedule_steps
from freewheel.plan import build_plan, render_plan
from freewheel.preflight import Findings, check_inputs
from freewheel.run_folder import RunFolder, holds_run, resolve_run_dir
from freewheel.shipped import with_absolute_paths


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    train: argparse.ArgumentParser = commands.add_parser(
        "train", help="train by a recipe", description="Train by a recipe."
    )
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, or a shipped recipe's name")
    _add_overrides(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that can be checked, print the plan, start nothing",
    )
    train.set_defaults(command=_train)
    resume: argparse.ArgumentParser = commands.add_parser(
        "resume",
        help="go on with a run",
        description=(
            "Go on from a run's newest whole checkpoint, or from that of a step. What the run "
            "recorded after it, newer checkpoints included, is moved to RUN_DIR/superseded; "
            "nothing is deleted."
        ),
    )
    resume.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run")
    resume.add_argument(
        "--from",
        dest="from_step",
        metavar="STEP",
        type=int,
        help="from the checkpoint of this step (freewheel checkpoints RUN_DIR lists them)",
    )
    _add_overrides(resume)
    resume.set_defaults(command=_resume)


def report_findings(config: Config, *, purpose: Purpose = "train") -> Findings:
    """Check the inputs and say what is odd about them.

    Raises:
        ConfigError: an input is missing or cannot be used.
    """
    findings = check_inputs(config, purpose=purpose)
    raise_problems([*findings.missing, *findings.problems])
    for warning in findings.warnings:
        sys.stderr.write(f"{warning}\n")
    return findings


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="settings on top (docs/configuration.md)"
    )


def _train(options: argparse.Namespace) -> int:
    config = load_config(find_recipe(options.recipe), options.overrides)
    check_config(config)
    config = with_absolute_paths(config)
    if options.dry_run:
        return _dry_run(config)
    run_dir = resolve_run_dir(config)
    resume = config.trainer.resume_mode == "auto" and holds_run(run_dir)
    if not resume:
        RunFolder.check_free(run_dir)
    return _start(config, run_dir, resume=resume)


def _resume(options: argparse.Namespace) -> int:
    RunFolder.check_resumable(options.run_dir)
    folder = RunFolder.look(options.run_dir)
    config = load_config(folder.config_path, options.overrides)
    check_config(config)
    config = with_absolute_paths(config)
    return _start(config, options.run_dir, resume=True, from_step=options.from_step)


def _start(config: Config, run_dir: Path, *, resume: bool, from_step: int | None = None) -> int:
    if resume and (reason := _nothing_left(config, run_dir, from_step)) is not None:
        sys.stdout.write(f"{run_dir}: {reason}\n")
        return 0
    findings = report_findings(config)
    steps = schedule_steps(config, num_prompts=findings.num_train_prompts)
    # Here, so that commands which start nothing load nothing.
    from freewheel.app import run_training

    return run_training(config, run_dir, resume=resume, from_step=from_step, schedule_steps=steps)


def _nothing_left(config: Config, run_dir: Path, from_step: int | None) -> str | None:
    from freewheel.resuming import nothing_left

    RunFolder.check_resumable(run_dir)
    return nothing_left(RunFolder.look(run_dir), config, from_step)


def _dry_run(config: Config) -> int:
    findings = check_inputs(config)
    raise_problems(findings.problems)
    if not findings.missing:
        schedule_steps(config, num_prompts=findings.num_train_prompts)
    plan = build_plan(
        config,
        num_train_prompts=findings.num_train_prompts,
        num_val_prompts=findings.num_val_prompts,
    )
    sys.stdout.write(render_plan(plan))
    if findings.notes:
        sys.stdout.write("inputs\n" + "".join(f"  {note}\n" for note in findings.notes))
    for text in findings.missing:
        sys.stdout.write(f"warning: not on this machine, needed to train: {text}\n")
    for text in findings.warnings:
        sys.stdout.write(f"{text}\n")
    for text in plan.warnings:
        sys.stdout.write(f"warning: {text}\n")
    if findings.missing:
        sys.stdout.write(
            f"The configuration is valid, but cannot run here: {len(findings.missing)} things that "
            "it needs are missing (see above). Nothing was started.\n"
        )
        return 0
    sys.stdout.write("The configuration is valid; nothing was started.\n")
    return 0
