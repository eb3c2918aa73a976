"""Reward and environment are imported before anything starts; what is wrong is named at once."""

import pytest

from freewheel.config import Config
from freewheel.config.sections import DataConfig, ModelConfig, RolloutConfig
from freewheel.preflight import look
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
