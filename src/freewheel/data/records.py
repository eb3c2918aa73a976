"""What a row of the data becomes, and how a column is looked up in it.

`Source` is the seam to the kinds of data: each gives rows by number, knows where a row came from,
and has a fingerprint of its content. Every error names file, row, column, and what is there.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

from freewheel.errors import DataError

Message: TypeAlias = dict[str, Any]
"""One chat message: `role`, `content`."""

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One prompt of the data.

    Attributes:
        prompt: a text, or chat messages.
        ground_truth: what the reward compares with; None when `data.ground_truth_key` is empty.
        extra: the row's other columns, by name.
    """

    prompt: str | list[Message]
    ground_truth: Any = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


class Source(Protocol):
    """Rows by number, of one kind of data."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns (of the first row, where each row has its own)."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the content does."""
        ...

    @property
    def prompt_key(self) -> str | None:
        """Column of the prompt where the kind of data fixes it, else None."""
        ...

    @property
    def ground_truth_key(self) -> str | None:
        """Column of the ground truth where the kind of data fixes it, else None."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """The row. Raises DataError when it cannot be read."""
        ...

    def where(self, index: int) -> str:
        """Where a row is, for messages: file and row number (from 1)."""
        ...


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for messages: `; nearest: 'x'`, or the empty string when nothing is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; nearest: {matches[0]!r}" if matches else ""


def look_up(row: Mapping[str, Any], key: str, where: str) -> object:
    """The value at a dotted path. A column whose own name has the dots goes first.

    Raises:
        DataError: nothing is there; names what is, and the nearest column.
    """
    if key in row:
        return row[key]
    value: object = row
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(value, Mapping):
            at = ".".join(parts[:depth])
            raise DataError(f"{where}: no column {key!r}: {at!r} holds a {type(value).__name__}")
        columns = [str(column) for column in cast("Mapping[str, Any]", value)]
        if part not in value:
            raise DataError(
                f"{where}: no column {'.'.join(parts[: depth + 1])!r}, "
                f"only {', '.join(columns) or 'nothing'}{nearest(part, columns)}"
            )
        value = value[part]
    return value


def check_prompt(value: object, column: str, where: str) -> str | list[Message]:
    """The value as a prompt.

    Raises:
        DataError: it is neither a text nor a list of chat messages with text in them.
    """
    if isinstance(value, str):
        if not value:
            raise DataError(f"{where}, column {column!r}: the prompt is empty")
        return value
    if isinstance(value, list) and value:
        messages = cast("list[Any]", value)
        return [_check_message(message, column, where) for message in messages]
    raise DataError(
        f"{where}, column {column!r}: a text or a list of chat messages wanted, "
        f"found {_shown(value)}"
    )


def _check_message(value: object, column: str, where: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(
            f"{where}, column {column!r}: a chat message is a mapping with 'role' and 'content', "
            f"found {_shown(value)}"
        )
    message = cast("Message", value)
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise DataError(
                f"{where}, column {column!r}: {name!r} of a chat message is a text, "
                f"found {_shown(message.get(name))}"
            )
    # Arrow fills the fields that a message lacks with nulls, which chat templates take for values.
    return {key: item for key, item in message.items() if item is not None}


def _shown(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{type(value).__name__} {text}"
