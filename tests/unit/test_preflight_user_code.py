"""Reward and environment are imported before anything starts; what is wrong is named at once."""

import os
import sys

import pytest

from freewheel import preflight
from freewheel.config import Config
from freewheel.config.sections import DataConfig, ModelConfig, RolloutConfig
from freewheel.errors import ConfigError
from freewheel.preflight import check_inputs, look
from freewheel.shipped import recipes_folder

RECIPES = recipes_folder()


def config(**rollout):
    return Config(
        data=DataConfig(
            train_files=str(RECIPES / "data/train.jsonl"), val_files=str(RECIPES / "data/val.jsonl")
        ),
        model=ModelConfig(path=str(RECIPES / "tiny")),
        rollout=RolloutConfig(**rollout),
    )


def test_shipped_inputs_have_no_problem():
    findings = look(config())
    assert (findings.missing, findings.problems) == ((), ())
    assert (findings.num_train_prompts, findings.num_val_prompts) == (3072, 64)


@pytest.mark.parametrize(
    ("rollout", "text"),
    [
        ({"reward": "no_such_module:score"}, "module 'no_such_module' cannot be imported"),
        ({"reward": "json:dumpz"}, "dumps"),
        ({"environment": "json:dumps"}, "found function 'dumps' without `run`"),
    ],
)
def test_user_code_that_cannot_be_used_is_a_problem(rollout, text):
    (problem,) = look(config(**rollout)).problems
    assert problem.startswith(f"rollout.{next(iter(rollout))}=")
    assert text in problem


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes the user's module `mine`, which ends with a reward and an environment."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> None:
        ending = (
            "def score(response, ground_truth): return 1.0\n"
            "class Game:\n"
            "    async def run(self, episode): ...\n"
        )
        (tmp_path / "mine.py").write_text(f"import atexit, os, sys, time\n{text}\n{ending}")

    return write


@pytest.mark.parametrize(
    "text",
    [
        "print('loading', end='')",
        "atexit.register(print, 'bye')",
        "os.write(1, b'\\xff from a C library')",
        "atexit.register(os._exit, 3)",
        "sys.stdout.close()",
    ],
)
def test_what_user_code_prints_or_does_at_exit_is_no_answer(module, text):
    module(text)
    mine = config(reward="mine:score", environment="mine:Game")
    assert check_inputs(mine) == look(config())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("sys.exit('no licence')", "ended with exit code 1:\nno licence"),
        ("os.kill(os.getpid(), 9)", "ended with exit code -9"),
    ],
)
def test_user_code_that_ends_the_process_is_named(module, text, told):
    module(text)
    with pytest.raises(ConfigError) as caught:
        check_inputs(config(reward="mine:score"))
    assert str(caught.value).startswith("rollout.reward=mine:score: the process that looked at it")
    assert str(caught.value).endswith(told)


def test_user_code_that_takes_too_long_is_named(module, monkeypatch):
    monkeypatch.setattr(preflight, "TIMEOUT_S", 12.0)
    module("time.sleep(600)")
    with pytest.raises(ConfigError, match=r"^rollout\.environment=mine:Game: .* longer than 12 s$"):
        check_inputs(config(environment="mine:Game"))


def test_an_error_with_half_a_character_is_a_problem_like_others(module):
    module("raise ValueError('bad \\ud83d')")
    (problem,) = check_inputs(config(reward="mine:score")).problems
    assert problem.startswith("rollout.reward='mine:score': module 'mine' cannot be imported")
