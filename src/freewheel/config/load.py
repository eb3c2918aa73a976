"""From a recipe and `key=value` arguments to a `Config`, and back to YAML.

Every problem is found before the first is reported: one ConfigError has a line for each, with the
key, the value, where it stood and what is allowed.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from freewheel.config.keys import Key, KeyPath, keys, nearest_key, sections
from freewheel.config.sections import Config
from freewheel.config.source import Dumper, Setting, read_file, read_override
from freewheel.errors import ConfigError


def load_config(recipe: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and put overrides on top; what neither sets has its default.

    Args:
        recipe: a YAML file; None: defaults and overrides alone.
        overrides: `key=value` each; the value is YAML, or the text itself where the key takes text
            and the YAML reading is not allowed. Later ones win.

    Raises:
        ConfigError: with all problems of types, ranges and keys. Combinations are not checked here.
    """
    settings, problems = read_file(recipe) if recipe else ([], [])
    for override in overrides:
        try:
            settings.append(read_override(override))
        except ConfigError as error:
            problems.append(str(error))
    values: dict[KeyPath, Any] = {}
    last = {setting.path: index for index, setting in enumerate(settings)}
    for index, setting in enumerate(settings):
        if last[setting.path] == index:
            problems += _apply(setting, values)
    raise_problems(problems)
    return _build(values)


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads as the same configuration."""
    return yaml.dump(_plain(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ConfigError with a line for each problem, if there is any."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in the configuration:{lines}")


def show(value: Any, *, max_length: int = 80) -> str:
    """A value on one line, cut when it is long."""
    text = json.dumps(_plain(value), ensure_ascii=False, default=str)
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _apply(setting: Setting, values: dict[KeyPath, Any]) -> list[str]:
    """Put one setting among the values; says what is wrong with it."""
    key = keys().get(setting.path)
    if key is not None:
        return _set(key, setting, values)
    owner = keys().get(setting.path[:-1])
    if owner is not None and isinstance(owner.default, dict):
        return _set_entry(owner, setting, values)
    if setting.path in sections():
        return _set_section(setting, values)
    nearest = nearest_key(setting.name)
    return [
        f"{setting.name} = {show(setting.value)} ({setting.origin}): unknown key; "
        f"nearest valid key: {nearest}"
    ]


def _set(key: Key, setting: Setting, values: dict[KeyPath, Any]) -> list[str]:
    for candidate in _readings(setting):
        if _is_allowed(key, candidate):
            values[key.path] = candidate
            return []
    shown = show(setting.value)
    return [f"{key.name} = {shown} ({setting.origin}): allowed: {key.allowed}"]


def _set_entry(owner: Key, setting: Setting, values: dict[KeyPath, Any]) -> list[str]:
    """One entry of a map (`rollout.retries.engine=5`): the other entries stay as they are."""
    before = dict(values.get(owner.path, owner.default))
    entry = setting.path[-1]
    for candidate in _readings(setting):
        if _is_allowed(owner, {**before, entry: candidate}):
            values[owner.path] = {**before, entry: candidate}
            return []
    shown = show(setting.value)
    return [f"{setting.name} = {shown} ({setting.origin}): {owner.name} is {owner.allowed}"]


def _set_section(setting: Setting, values: dict[KeyPath, Any]) -> list[str]:
    """A whole section as an argument (`actor.optim={lr: 1e-4}`), or something that is none."""
    if isinstance(setting.value, dict) and setting.value:
        problems: list[str] = []
        for name, value in setting.value.items():
            path = (*setting.path, *str(name).split("."))
            inner = dataclasses.replace(setting, path=path, value=value, raw=None)
            problems += _apply(inner, values)
        return problems
    names = [path[-1] for path in (*keys(), *sections()) if path[:-1] == setting.path and path]
    return [
        f"{setting.name} = {show(setting.value)} ({setting.origin}): a section; "
        f"its keys: {', '.join(names)}"
    ]


def _readings(setting: Setting) -> Iterable[Any]:
    """How the value may be meant, the first allowed one counts.

    An argument is YAML, or else its own text: no quotes survive a shell, and `#` begins a comment.
    """
    yield setting.value
    if isinstance(setting.value, str | int) and not isinstance(setting.value, bool):
        yield [setting.value]
    is_null = setting.value is None and setting.raw in ("~", "null", "Null", "NULL")
    if setting.raw is not None and not is_null:
        yield setting.raw
        yield [setting.raw]


def _is_allowed(key: Key, value: Any) -> bool:
    try:
        key.validate(json.dumps(value, default=_refuse))
    except (ValidationError, TypeError):
        return False
    return all(math.isfinite(number) for number in _floats(value))


def _refuse(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} is not allowed")


def _floats(value: Any) -> Iterable[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, list):
        for item in value:
            yield from _floats(item)


def _build(values: dict[KeyPath, Any]) -> Config:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        section = tree
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
    # JSON in strict mode: no text for a number, no true for 1, but lists where tuples are meant.
    return _validator().validate_json(json.dumps(tree, default=_refuse), strict=True)


@functools.cache
def _validator() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
