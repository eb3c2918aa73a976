"""Reward functions: by name, or the user's own by `module:function`; and what they may return.

A reward function is `def reward(response, ground_truth, *, prompt, extra, **reward_kwargs)`, sync
or async, and gives a number or a `RewardResult`. It gets only the keyword arguments that it
accepts.
"""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, SupportsFloat, cast

from freewheel.config.sections import Config
from freewheel.data.records import PromptRecord, nearest
from freewheel.errors import ConfigError, FailureClass, RolloutError
from freewheel.rollout import named_rewards
from freewheel.rollout.calls import UserCodeError
from freewheel.rollout.named_rewards import RewardResult as RewardResult
from freewheel.rollout.usercode import UserCode, import_object, is_async

NAMED: dict[str, Callable[..., RewardResult]] = {
    "exact_match": named_rewards.exact_match,
    "numeric_match": named_rewards.numeric_match,
    "regex": named_rewards.regex,
    "reasoning_gym": named_rewards.reasoning_gym,
}

_EXTRACTS = ("tag", "last_line", "last_number", "whole")


class Reward:
    """A reward function, checked against the arguments it will get.

    Args:
        name: as in the configuration.
        function: the function.
        kwargs: `rollout.reward_kwargs`.

    Raises:
        ConfigError: it cannot be called with these.
    """

    def __init__(self, name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.name = name
        self._function = function
        self._kwargs = kwargs
        self._is_async = is_async(function)
        self._passes_prompt, self._passes_extra = _check_signature(name, function, kwargs)

    async def score(
        self, response: str, record: PromptRecord, user_code: UserCode, *, sample_id: str = ""
    ) -> RewardResult:
        """Run the function off the serving loop.

        Args:
            response: what the policy said.
            record: the prompt's row.
            user_code: runs it.
            sample_id: the rollout, for messages.

        Raises:
            RolloutError: it raised, or returned no finite number (class `reward`).
            LoopBlockedError: the loop that it ran on was blocked for too long.
        """
        kwargs = dict(self._kwargs)
        if self._passes_prompt:
            kwargs["prompt"] = record.prompt
        if self._passes_extra:
            kwargs["extra"] = record.extra

        def call() -> Any:  # whatever the user's function returns
            return self._function(response, record.ground_truth, **kwargs)

        try:
            value = await self._run(call, user_code, sample_id)
        except UserCodeError as error:
            raise RolloutError(
                FailureClass.REWARD, f"reward {self.name} raised {error}"
            ) from error.error
        return check_reward(value, f"reward {self.name}")

    async def _run(self, call: Callable[[], Any], user_code: UserCode, sample_id: str) -> object:
        name = f"reward {self.name}"
        if self._is_async:
            return await user_code.run_async(name, call, sample_id=sample_id)
        value = await user_code.run_sync("reward", name, call)
        if inspect.isawaitable(value):
            # Decorators and partial objects hide that a function is async.
            return await user_code.run_async(name, lambda: value, sample_id=sample_id)
        return value


def load_reward(config: Config) -> Reward:
    """The reward function that `rollout.reward` names, with `rollout.reward_kwargs`.

    Raises:
        ConfigError: no such name, module or function, or it does not fit; names the nearest.
    """
    spec = config.rollout.reward
    kwargs: dict[str, Any] = dict(config.rollout.reward_kwargs)
    if ":" in spec:
        function = import_object(spec, "rollout.reward")
        if not callable(function):
            raise ConfigError(
                f"rollout.reward={spec!r}: a function wanted, found {type(function).__name__}"
            )
        return Reward(spec, function, kwargs)
    if spec not in NAMED:
        raise ConfigError(
            f"rollout.reward={spec!r}: {', '.join(NAMED)} or module:function wanted"
            f"{nearest(spec, NAMED)}"
        )
    reward = Reward(spec, NAMED[spec], kwargs)
    _check_named(spec, kwargs)
    return reward


def check_reward(value: object, source: str) -> RewardResult:
    """What a reward function or an environment returned, as a finite reward.

    Raises:
        RolloutError: it is not a number, or not a finite one (class `reward`).
    """
    answer = None
    if isinstance(value, RewardResult):
        value, answer = value.reward, value.answer
    try:
        # float() takes text too, which is nobody's reward.
        reward = math.nan if isinstance(value, str) else float(cast("SupportsFloat", value))
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise RolloutError(
            FailureClass.REWARD,
            f"{source} returned {value!r} ({type(value).__name__}): a finite number wanted",
        )
    return RewardResult(reward=reward, answer=answer)


def _check_signature(
    name: str, function: Callable[..., Any], kwargs: dict[str, Any]
) -> tuple[bool, bool]:
    """Whether the function takes `prompt` and `extra`."""
    signature = inspect.signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    known = list(signature.parameters)
    for key in kwargs:
        if key not in known and not takes_all:
            raise ConfigError(
                f"rollout.reward_kwargs.{key}: reward {name}{signature} does not take it"
                f"{nearest(key, known)}"
            )
    passed = {key: None for key in ("prompt", "extra") if key in known or takes_all}
    try:
        signature.bind("response", "ground truth", **{**passed, **kwargs})
    except TypeError as error:
        raise ConfigError(
            f"rollout.reward={name!r}: cannot be called as reward(response, ground_truth"
            f"{''.join(f', {key}=...' for key in {**passed, **kwargs})}): {error}; "
            f"its signature is {signature}"
        ) from error
    return "prompt" in passed, "extra" in passed


def _check_named(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse at the start what would fail every single reward."""
    if pattern := kwargs.get("pattern"):
        try:
            compiled = re.compile(str(pattern))
        except re.error as error:
            raise ConfigError(f"rollout.reward_kwargs.pattern={pattern!r}: {error}") from error
        _check_group(compiled, kwargs.get("group"))
    if name == "reasoning_gym" and kwargs.get("extract", "tag") not in _EXTRACTS:
        extract = kwargs["extract"]
        raise ConfigError(
            f"rollout.reward_kwargs.extract={extract!r}: {', '.join(_EXTRACTS)} wanted"
            f"{nearest(str(extract), _EXTRACTS)}"
        )


def _check_group(compiled: re.Pattern[str], group: object) -> None:
    known: list[object] = [*range(compiled.groups + 1), *compiled.groupindex]
    if group is not None and group not in known:
        raise ConfigError(
            f"rollout.reward_kwargs.group={group!r}: the pattern {compiled.pattern!r} has only "
            f"{', '.join(map(str, known))}"
        )
