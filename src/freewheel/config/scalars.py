"""What a single value of the configuration may be, for all sections."""

from typing import Annotated, TypeAlias

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)

Count: TypeAlias = Annotated[int, Field(ge=1)]
CountOrZero: TypeAlias = Annotated[int, Field(ge=0)]
Seconds: TypeAlias = Annotated[float, Field(gt=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0)]
