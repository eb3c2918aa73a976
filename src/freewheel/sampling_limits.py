"""What sampling parameters may be: told to an environment at its call, and refused by engines.

An engine computes for many callers at once, so nothing that one of them sends may fail in a step.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freewheel.types import SamplingParams

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by it leave the range of float32."""

_Rule = tuple[str, Callable[[Any], bool], str]

_RULES: tuple[_Rule, ...] = (
    ("max_tokens", lambda value: _is_int(value) and value >= 1, "a whole number, at least 1"),
    (
        "temperature",
        lambda value: _is_number(value) and (value == 0 or MIN_TEMPERATURE <= value < float("inf")),
        f"0 (greedy), or at least {MIN_TEMPERATURE:g}",
    ),
    ("top_p", lambda value: _is_number(value) and 0 < value <= 1, "above 0, at most 1"),
    ("top_k", lambda value: _is_int(value) and value >= -1, "a whole number, 0 or -1 for off"),
    ("min_p", lambda value: _is_number(value) and 0 <= value <= 1, "from 0 to 1"),
    (
        "stop",
        lambda value: _is_tuple(value) and all(type(text) is str and text for text in value),
        "texts that are not empty",
    ),
    (
        "stop_token_ids",
        lambda value: _is_tuple(value) and all(_is_int(item) for item in value),
        "whole numbers",
    ),
    ("seed", lambda value: value is None or _is_int(value), "a whole number, or None"),
)


def sampling_problem(sampling: "SamplingParams") -> str | None:
    """What is wrong with it: parameter, value and what is allowed; None if nothing is."""
    for name, is_allowed, allowed in _RULES:
        value = getattr(sampling, name)
        if not is_allowed(value):
            return f"{name}={value!r}: allowed is {allowed}"
    return None


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_tuple(value: Any) -> bool:
    return type(value) is tuple
