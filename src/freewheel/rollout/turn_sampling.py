"""The sampling parameters of one turn: those of the run, and what the environment asks for."""

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

from freewheel.data.records import nearest
from freewheel.errors import FailureClass, RolloutError
from freewheel.sampling_limits import sampling_problem
from freewheel.types import SamplingParams

_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")


def turn_sampling(
    base: SamplingParams, overrides: dict[str, Any], *, seed: int, num_tokens_left: int
) -> SamplingParams:
    """Parameters of a turn.

    Args:
        base: of the run.
        overrides: arguments that the environment gave, of whatever type it had at hand.
        seed: of this turn, unless the environment gives one.
        num_tokens_left: most tokens that the rollout may still have; at least 1.

    Raises:
        RolloutError: class `environment`; names the argument, its value and what is allowed.
    """
    values: dict[str, Any] = {"seed": seed}
    for name, value in overrides.items():
        if name not in _NAMES:
            raise _refused(
                f"no argument {name!r}, only {', '.join(_NAMES)}{nearest(name, list(_NAMES))}"
            )
        try:
            values[name] = _CONVERTERS[name](value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _refused(f"{name}={value!r}: {error}") from error
    sampling = dataclasses.replace(base, **values)
    problem = sampling_problem(sampling)
    if problem is not None:
        raise _refused(problem)
    return dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, num_tokens_left))


def same_distribution(one: SamplingParams, other: SamplingParams) -> bool:
    """Whether logprobs of the two can be compared."""
    return _distribution(one) == _distribution(other)


def _distribution(sampling: SamplingParams) -> tuple[float, ...]:
    values = {name: getattr(sampling, name) for name in _DISTRIBUTION}
    values["top_k"] = max(sampling.top_k, 0)  # 0 and -1 both mean off
    return tuple(values.values())


def _refused(problem: str) -> RolloutError:
    return RolloutError(FailureClass.ENVIRONMENT, f"generate: {problem}")


def _optional_index(value: Any) -> int | None:
    return None if value is None else operator.index(value)


def _texts(value: Any) -> tuple[str, ...]:
    items: Iterable[Any] = (value,) if isinstance(value, str) else value
    return tuple(_text(item) for item in items)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return str(value)


def _indices(value: Any) -> tuple[int, ...]:
    items: Iterable[Any] = value if isinstance(value, Iterable) else (value,)
    return tuple(operator.index(item) for item in items)


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": operator.index,
    "temperature": float,
    "top_p": float,
    "top_k": operator.index,
    "min_p": float,
    "stop": _texts,
    "stop_token_ids": _indices,
    "seed": _optional_index,
}
