import functools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.config.sections import Config, RolloutConfig
from freewheel.errors import ConfigError, FailureClass, RolloutError
from freewheel.rollout.named_rewards import (
    RewardResult,
    exact_match,
    last_number,
    numeric_match,
    reasoning_gym,
    regex,
)
from freewheel.rollout.rewards import Reward, check_reward, load_reward
from freewheel.rollout.usercode import import_object, is_async
from tests.unit import rollout_usercode as user

HERE = "tests.unit.rollout_usercode"


def load(reward: str, **kwargs) -> Reward:
    return load_reward(Config(rollout=RolloutConfig(reward=reward, reward_kwargs=kwargs)))


@pytest.mark.parametrize(
    ("response", "truth", "kwargs", "reward"),
    [
        (" yes\n", "yes", {}, 1),
        ("Yes", "yes", {}, 0),
        ("Yes", "yes", {"ignore_case": True}, 1),
        ("4", 4, {}, 1),
        ("b", ["a", "b"], {}, 1),
        ("", "a", {}, 0),
    ],
)
def test_exact_match(response, truth, kwargs, reward):
    assert exact_match(response, truth, **kwargs).reward == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 42.", 42),
        ("5-3", 3),
        ("5 - -3", -3),
        ("(-7)", -7),
        ("x = \u22128", -8),
        ("$1,234,567.50 in all", 1234567.5),
        ("1,2,3", 3),
        (".5", 0.5),
        ("3.14e-2!", 0.0314),
        ("x42", 42),
        ("12kg", 12),
        ("1e999", None),
        ("none", None),
        ("", None),
        ("10\n", 10),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@given(st.integers(-(10**12), 10**12), st.text(alphabet="abc =$\n", max_size=10))
def test_any_integer_is_found_behind_any_words(value, words):
    assert last_number(f"1 {words} {value} {words}") == value
    assert last_number(f"{value:,}") == value


def test_numeric_match():
    assert numeric_match("so 42.0", "#### 42") == RewardResult(reward=1.0, answer="42")
    assert numeric_match("1,000", 1000).reward == 1
    assert numeric_match("3.1", 3.14159).reward == 0
    assert numeric_match("3.1", 3.14159, tolerance=0.02).reward == 1
    assert numeric_match("no idea", 3) == RewardResult(reward=0.0)
    with pytest.raises(ValueError, match="no number in the ground truth 'x'"):
        numeric_match("3", "x")


def test_regex():
    boxed = r"\\boxed\{(.*?)\}"
    assert regex(r"\boxed{1} then \boxed{ 2 }", 2, pattern=boxed) == RewardResult(
        reward=1.0, answer="2"
    )
    assert regex("yes", "yes", pattern="y.s").reward == 1
    assert regex("a=1 b=2", "2", pattern=r"a=(\d) b=(?P<b>\d)", group="b").reward == 1
    assert regex("nothing", "2", pattern=boxed) == RewardResult(reward=0.0)


def test_reasoning_gym_s_own_scorer():
    package = pytest.importorskip("reasoning_gym")
    task = package.create_dataset("chain_sum", size=5, seed=1)
    entry = task[0]
    extra = {"reasoning_gym": entry, "score_answer": task.score_answer}
    answer = entry["answer"]
    for response, kwargs, reward in (
        (f"hm <answer>0</answer> <answer> {answer} </answer>", {}, 1),
        (answer, {}, 1),
        (f"thinking\n{answer}\n", {"extract": "last_line"}, 1),
        (f"it is {answer}, I think", {"extract": "last_number"}, 1),
        (f"# {answer} #", {"pattern": "# (.*?) #"}, 1),
        ("no", {"pattern": "# (.*?) #"}, 0),
        ("wrong", {"extract": "whole"}, 0),
    ):
        result = reasoning_gym(response, None, extra=extra, **kwargs)
        assert result.reward == pytest.approx(reward, abs=0.05), (response, kwargs)
    dumped = {"metadata": entry["metadata"]}
    assert reasoning_gym(answer, answer, extra=dumped).reward == 1
    with pytest.raises(ValueError, match="no 'metadata' with 'source_dataset', only level"):
        reasoning_gym(answer, answer, extra={"level": 1})


@pytest.mark.parametrize("value", [1, 0.5, True, RewardResult(reward=2.0, answer="a")])
def test_a_number_is_a_reward(value):
    result = check_reward(value, "reward f")
    assert result.reward == float(getattr(value, "reward", value))


@pytest.mark.parametrize(
    "value",
    [None, "1.0", float("nan"), float("inf"), [1], {"score": 1}, RewardResult(reward=float("nan"))],
)
def test_anything_else_is_not(value):
    with pytest.raises(RolloutError, match="reward f returned") as caught:
        check_reward(value, "reward f")
    assert caught.value.failure is FailureClass.REWARD


def test_scalars_of_arrays_are_numbers():
    np = pytest.importorskip("numpy")
    for value in (np.float32(0.5), np.int64(2), np.bool_(True), np.array(1.5)):
        assert check_reward(value, "reward f").reward == float(value)
    with pytest.raises(RolloutError):
        check_reward(np.zeros(2), "reward f")


@pytest.mark.parametrize(
    ("reward", "kwargs", "message"),
    [
        ("exact_mach", {}, "module:function wanted; nearest: 'exact_match'"),
        ("numeric_match", {"tolerence": 1}, "tolerence.*nearest: 'tolerance'"),
        ("regex", {}, "cannot be called as reward.*missing a required"),
        ("regex", {"pattern": "("}, r"pattern='\(': missing \)"),
        ("regex", {"pattern": "(a)", "group": 2}, "has only 0, 1"),
        ("reasoning_gym", {"extract": "tagg"}, "nearest: 'tag'"),
        (f"{HERE}:plain_rewrad", {}, "has no 'plain_rewrad'.*nearest: 'plain_reward'"),
        (f"{HERE}:NOT_CALLABLE", {}, "a function wanted, found int"),
        (f"{HERE}:needs_more", {}, "missing a required argument: 'tests'.*its signature is"),
        (f"{HERE}:plain_reward", {"bonus": 1}, "rollout.reward_kwargs.bonus.*does not take it"),
        ("no_such_module:f", {}, "'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("module:", {}, "not of the form module:name"),
    ],
)
def test_what_is_refused_at_the_start(reward, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        load(reward, **kwargs)


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_fresh_rewards.py").write_text("def f(response, ground_truth):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert import_object("my_fresh_rewards:f", "rollout.reward")("", "") == 1
    (tmp_path / "my_broken_rewards.py").write_text("import nothing_like_this\n")
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError: No module"):
        import_object("my_broken_rewards:f", "rollout.reward")


def test_is_async():
    class Callable:
        async def __call__(self):
            pass

    async def coroutine():
        pass

    @functools.wraps(coroutine)
    def wrapped():
        return coroutine()

    assert all(map(is_async, (coroutine, wrapped, Callable(), user.async_reward)))
    assert not any(map(is_async, (user.plain_reward, Callable, 5, print)))


def test_the_names_for_users_are_exported():
    import freewheel.data
    import freewheel.rollout

    for package in (freewheel.data, freewheel.rollout):
        assert all(hasattr(package, name) for name in package.__all__)
    assert freewheel.rollout.RewardResult is RewardResult
