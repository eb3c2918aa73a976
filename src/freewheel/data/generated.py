"""Prompts that reasoning-gym generates: `reasoning_gym:TASK?size=1000&seed=1&param=value`.

Entry i follows from seed and i alone (reasoning-gym seeds it with `seed + i`), so nothing is
stored. A row keeps the entry and the task's scorer, for the reward `reasoning_gym`.
"""

import importlib.metadata
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qsl

from freewheel.data.records import Row, nearest
from freewheel.errors import ConfigError, DataError

PREFIX = "reasoning_gym:"

Scalar: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """A parsed `reasoning_gym:` source. `params` go to `reasoning_gym.create_dataset`."""

    text: str
    task: str
    params: dict[str, Scalar]


def parse_spec(text: str) -> TaskSpec:
    """Take `reasoning_gym:TASK?param=value&...` apart. `size` is 1000 and `seed` 1 when not given.

    Raises:
        ConfigError: a parameter has no value, or the task has no name.
    """
    task, _, query = text.removeprefix(PREFIX).partition("?")
    if not task:
        raise ConfigError(f"{text!r}: the task's name is missing: reasoning_gym:TASK?size=1000")
    try:
        pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=False) if query else []
    except ValueError as error:
        raise ConfigError(f"{text!r}: parameters are name=value, joined by '&': {error}") from error
    params: dict[str, Scalar] = {"size": 1000, "seed": 1}
    params.update({name: _parse_value(value) for name, value in pairs})
    return TaskSpec(text=text, task=task, params=params)


def _parse_value(value: str) -> Scalar:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


class _Task(Protocol):
    """What we use of a `reasoning_gym.ProceduralDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def score_answer(self, answer: str, entry: dict[str, Any], /) -> float: ...


class GeneratedTask:
    """A reasoning-gym task.

    Raises:
        ConfigError: reasoning-gym is missing, or does not know the task or a parameter.
    """

    prompt_key: str | None = "question"
    ground_truth_key: str | None = "answer"
    columns = ("question", "answer", "reasoning_gym", "score_answer")

    def __init__(self, text: str) -> None:
        self._spec = parse_spec(text)
        self._dataset = _create(self._spec)

    @property
    def fingerprint(self) -> str:
        """Task, parameters and reasoning-gym's version: together they fix the content."""
        version = importlib.metadata.version("reasoning-gym")
        params = ",".join(f"{name}={value!r}" for name, value in sorted(self._spec.params.items()))
        return f"reasoning_gym {version} {self._spec.task} {params}"

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        """The entry's question and answer, the entry itself, and the task's scorer."""
        try:
            entry = self._dataset[index]
        except Exception as error:  # boundary: the tasks raise what they like
            raise DataError(f"{self.where(index)}: not generated: {error!r}") from error
        return {
            "question": entry["question"],
            "answer": entry["answer"],
            "reasoning_gym": entry,
            "score_answer": self._dataset.score_answer,
        }

    def where(self, index: int) -> str:
        """Source and entry number, from 0."""
        return f"{self._spec.text} entry {index}"


def _create(spec: TaskSpec) -> _Task:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{spec.text!r} needs the package `reasoning-gym`: "
            "pip install 'freewheel[reasoning-gym]'"
        ) from error
    if spec.task not in DATASETS:
        raise ConfigError(
            f"{spec.text!r}: reasoning-gym has no task {spec.task!r}{nearest(spec.task, DATASETS)}"
        )
    known = [field.name for field in fields(DATASETS[spec.task][1])]
    for name in spec.params:
        if name not in known:
            raise ConfigError(
                f"{spec.text!r}: task {spec.task} has no parameter {name!r}, "
                f"only {', '.join(known)}{nearest(name, known)}"
            )
    try:
        return reasoning_gym.create_dataset(spec.task, **spec.params)
    except Exception as error:  # boundary: tasks check parameters by assert and more
        raise ConfigError(f"{spec.text!r}: refused by the task: {error!r}") from error
