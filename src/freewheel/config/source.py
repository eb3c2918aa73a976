"""Reading settings from YAML files and `key=value` arguments, each with the place where it stood.

YAML is read by the rules of version 1.2 where the older ones surprise: `1e-6` is a number, `on`,
`no` and `2024-01-01` are text. A key may be nested or dotted; a repeated key is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from freewheel.config.keys import KeyPath, keys, sections
from freewheel.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value that was set. `raw` is the text of an override's value, None in a file."""

    path: KeyPath
    value: Any
    origin: str
    raw: str | None = None

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # PyYAML's own name


_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_INT = re.compile(r"^(?:0|[-+]?[1-9][0-9_]*|[-+]0|0x[0-9a-fA-F]+)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")

for _tag, _pattern, _first in (
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
    ("null", _NULL, ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text which one of the two versions of YAML reads otherwise."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out each time."""
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        """Quote a text that is not printable in full: plain, its line breaks read as spaces."""
        style = None if data.isprintable() or not data else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


Dumper.add_representer(str, Dumper.represent_text)
Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_file(path: Path) -> tuple[list[Setting], list[str]]:
    """Settings of a YAML file, in its order, and what is wrong with its keys.

    Raises:
        ConfigError: the file cannot be read, or is not a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; a recipe is a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    reader = _Reader(str(path), text)
    return list(reader.settings()), reader.problems


def read_override(text: str) -> Setting:
    """One `key=value` argument.

    Raises:
        ConfigError: it has no `=` or no key.
    """
    name, equals, raw = text.partition("=")
    path = _split(name.strip())
    if not equals or not path:
        raise ConfigError(f"argument {text!r}: expected key=value, as in rollout.n=8")
    try:
        value: Any = _parse_value(raw)
    except yaml.YAMLError:
        value = raw
    return Setting(path=path, value=value, origin=f"argument {text}", raw=raw)


def _split(name: str) -> KeyPath:
    return tuple(part for part in name.split(".") if part)


def _parse_value(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


class _Reader:
    """Walks the nodes of one document, which know their lines."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._seen: dict[KeyPath, tuple[int, int]] = {}
        self.problems: list[str] = []

    def settings(self) -> Iterator[Setting]:
        try:
            self._loader = _Loader(self._text)
            root = self._loader.get_single_node()
            if root is None:
                return
            if not isinstance(root, yaml.MappingNode):
                raise ConfigError(f"{self._name}: expected sections and keys (a YAML mapping)")
            yield from self._walk(root, (), frozenset())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f":{mark.line + 1}" if mark else ""
            what = error.problem or error.context
            raise ConfigError(f"{self._name}{place}: not valid YAML: {what}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{self._name}: not valid YAML: {error}") from error

    def _walk(
        self, node: yaml.MappingNode, above: KeyPath, parents: frozenset[int]
    ) -> Iterator[Setting]:
        for key_node, value_node in node.value:
            path = (*above, *_split(str(key_node.value)))
            origin = f"{self._name}:{key_node.start_mark.line + 1}"
            if not self._is_first(path, key_node):
                continue
            if id(value_node) in parents:
                self.problems.append(f"{'.'.join(path)} ({origin}): contains itself")
            elif self._is_inner(path, value_node):
                yield from self._walk(value_node, path, parents | {id(node), id(value_node)})
            elif not self._is_empty_section(path, value_node):
                self._refuse_repeated(path, value_node)
                value = self._loader.construct_object(value_node, deep=True)
                yield Setting(path=path, value=value, origin=origin)

    def _is_inner(self, path: KeyPath, node: yaml.Node) -> bool:
        """Whether to go on below: a section, or what is below an unknown key."""
        return isinstance(node, yaml.MappingNode) and path not in keys() and bool(node.value)

    def _is_empty_section(self, path: KeyPath, node: yaml.Node) -> bool:
        empty = not node.value or node.tag == "tag:yaml.org,2002:null"
        return path in sections() and empty

    def _is_first(self, path: KeyPath, key_node: yaml.Node) -> bool:
        mark = key_node.start_mark
        first = self._seen.setdefault(path, (mark.line, mark.column))
        if first == (mark.line, mark.column):
            return True
        self.problems.append(
            f"{'.'.join(path)} ({self._name}:{mark.line + 1}): set twice; "
            f"first in line {first[0] + 1}"
        )
        return False

    def _refuse_repeated(self, path: KeyPath, node: yaml.Node) -> None:
        """Find repeated keys inside a value that is a map."""
        if isinstance(node, yaml.MappingNode):
            for key_node, _ in node.value:
                self._is_first((*path, str(key_node.value)), key_node)
