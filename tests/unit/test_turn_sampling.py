"""What environments ask for in a turn, and what engines refuse, lest it fail in a step."""

import dataclasses

import numpy as np
import pytest

from freewheel.errors import ConfigError, FailureClass, RolloutError
from freewheel.rollout.turn_sampling import same_distribution, turn_sampling
from freewheel.sampling_limits import sampling_problem
from freewheel.types import SamplingParams
from tests.unit.engine_models import make_engine, request

BASE = SamplingParams(max_tokens=8, temperature=0.7, seed=1)


def turn(**overrides):
    return turn_sampling(BASE, overrides, seed=5, num_tokens_left=6)


def test_values_are_brought_to_the_types_that_engines_take():
    sampling = turn(
        seed=np.int64(7),
        max_tokens=np.int32(3),
        temperature=np.float32(0.5),
        top_p=1,
        top_k=np.int64(4),
        stop="x",
        stop_token_ids=np.int64(9),
    )
    assert sampling == SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        stop=("x",),
        stop_token_ids=(9,),
        seed=7,
    )
    assert sampling_problem(sampling) is None
    assert turn(stop=["a", "b"], stop_token_ids=[1, 2]).stop == ("a", "b")


def test_a_turn_has_its_own_seed_and_no_more_tokens_than_are_left():
    assert (turn().seed, turn().max_tokens, turn().temperature) == (5, 6, 0.7)
    assert turn(seed=None).seed is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"seed": 1.5}, r"seed=1\.5"),
        ({"top_k": 20.0}, r"top_k=20\.0"),
        ({"top_k": -2}, "top_k=-2: allowed is a whole number, 0 or -1 for off"),
        ({"stop": 5}, "stop=5"),
        ({"stop": ("a", "")}, "allowed is texts that are not empty"),
        ({"stop": ["a", 3]}, "3 is no text"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids="),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": float("nan")}, r"allowed is 0 \(greedy\), or at least 0\.001"),
        ({"temperature": 1e-45}, r"at least 0\.001"),
        ({"temperature": -1}, r"at least 0\.001"),
        ({"top_p": 0}, "above 0, at most 1"),
        ({"min_p": 1.5}, "from 0 to 1"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_token": 3}, "no argument 'max_token'.*max_tokens"),
    ],
)
def test_what_cannot_be_sampled_is_the_environments_error(overrides, message):
    with pytest.raises(RolloutError, match=message) as raised:
        turn(**overrides)
    assert raised.value.failure is FailureClass.ENVIRONMENT


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": np.int64(7)},
        {"seed": 1.5},
        {"top_k": 20.0},
        {"stop": (5,)},
        {"stop": ("",)},
        {"stop_token_ids": ("a",)},
        {"temperature": float("inf")},
    ],
)
def test_an_engine_refuses_what_would_fail_in_a_step(changes, tmp_path):
    engine = make_engine("llama_tied", tmp_path)
    item = request("r", [5])
    bad = dataclasses.replace(item, sampling=dataclasses.replace(item.sampling, **changes))
    with pytest.raises(ConfigError, match=f"request r: sampling .* {next(iter(changes))}="):
        engine.check(bad)


def test_filters_that_are_off_are_the_same_distribution():
    off = dataclasses.replace(BASE, top_k=-1)
    assert same_distribution(BASE, off)
    assert not same_distribution(BASE, dataclasses.replace(BASE, top_k=1))
    assert not same_distribution(BASE, dataclasses.replace(BASE, temperature=1.0))
