"""What a single value of the configuration may be, for all sections."""

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field

from freewheel.sampling_limits import MIN_TEMPERATURE


def _usable_temperature(value: float) -> float:
    """0 (greedy) or at least 0.001."""
    if value == 0 or value >= MIN_TEMPERATURE:
        return value
    raise ValueError


STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)

Count: TypeAlias = Annotated[int, Field(ge=1)]
CountOrZero: TypeAlias = Annotated[int, Field(ge=0)]
Seconds: TypeAlias = Annotated[float, Field(gt=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0)]
Temperature: TypeAlias = Annotated[float, AfterValidator(_usable_temperature)]
"""0 is greedy."""
Text: TypeAlias = Annotated[str, Field(min_length=1)]
