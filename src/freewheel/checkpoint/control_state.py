"""The shape of `control.json`: what a resume reads of it, checked before anything is touched.

A file of another shape than this version of Freewheel writes is refused by the first place that is
wrong, not by whatever trips over it later. Keys beyond these are let through.
"""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from freewheel.files import dump_json

CONTROL_FORMAT = 1

_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[str, Field(pattern=r"^-?\d+$")]
"""JSON has no other keys than texts."""


class _Train(TypedDict):
    step: _Count
    version: _Count
    steps_since_publish: _Count
    validation_requested_at: int
    wait_s: dict[str, float]


class _Outcome(TypedDict):
    sample_id: str
    attempt: _Count
    failure: str | None
    version_spans: list[tuple[int, int]]


class _Group(TypedDict, total=False):
    group_id: Annotated[int, Field(ge=0)]
    epoch: _Count
    prompt_index: _Count
    num_prompt_tokens: _Count
    start_version: int
    max_staleness: _Count
    ready: bool
    attempts: list[_Count]
    outcomes: dict[_Number, _Outcome]
    times_s: dict[_Number, tuple[float, float]]


class _Ledger(TypedDict):
    next_group_id: _Count
    num_trained_groups: _Count
    issued: _Count
    fates: dict[str, _Count]
    failures: dict[str, _Count]
    prompt_failures: dict[_Number, _Count]
    dropped_prompts: list[_Count]
    open: list[_Group]


class _Progress(TypedDict):
    trials: dict[str, Any]
    started_s: float
    elapsed_s: float
    replica_s: float
    done: list[tuple[_Count, _Count, _Outcome]]
    failed: list[tuple[_Count, _Count, str]]
    failed_attempts: list[tuple[_Count, _Count, str, _Count]]


class _Due(TypedDict):
    step: _Count
    version: _Count
    requested_s: float
    progress: _Progress | None


class _Control(TypedDict):
    format: int
    structure: dict[str, Any]
    data_fingerprint: str | None
    train: _Train
    ledger: _Ledger
    staleness: dict[_Number, int]
    validations: list[_Due]
    held_versions: list[_Count]
    num_rows: dict[str, _Count]
    num_validations: _Count
    checkpoints: list[_Count]
    run_s: float
    busy_s: tuple[float, float]


_SHAPE: TypeAdapter[_Control] = TypeAdapter(_Control)


def control_problem(control: Any) -> str | None:
    """What is wrong with the content of a `control.json`, in words; None if nothing is.

    Args:
        control: as Python's own parser reads it. Text that is not well-formed Unicode is let
            through: the file says what user code said.
    """
    try:
        _SHAPE.validate_json(dump_json(control), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "content"
        return f"{place}: {first['msg']} ({error.error_count()} wrong)"
    return None
