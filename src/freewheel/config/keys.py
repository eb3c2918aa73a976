"""All configuration keys: their types in words, defaults, meanings, and the nearest one to a guess.

Read off the dataclasses of `sections.py`; the loader, the checks and the reference use this.
"""

import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, TypeAdapter
from pydantic.fields import FieldInfo

from freewheel.config.sections import Config
from freewheel.errors import FailureClass

KeyPath = tuple[str, ...]

_SPELLED_ELSEWHERE: dict[str, str] = {
    # Names of verl and others for what Freewheel calls otherwise, where similarity would miss.
    # `*.x` stands for x anywhere.
    "data.train_batch_size": "actor.ppo_mini_batch_size",
    "data.gen_batch_size": "actor.ppo_mini_batch_size",
    "data.reward_fn_key": "data.ground_truth_key",
    "data.seed": "trainer.seed",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.kv_cache_bytes",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "actor_rollout_ref.rollout.agent.num_workers": "rollout.num_workers",
    "actor_rollout_ref.rollout.val_kwargs.n": "validation.n",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "validation.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "validation.top_p",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "validation.top_k",
    "actor_rollout_ref.actor.optim.warmup_style": "actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "algorithm.filter_groups.enable": "algorithm.filter_groups",
    "custom_reward_function.path": "rollout.reward",
    "custom_reward_function.name": "rollout.reward",
    "reward_model.reward_manager": "rollout.reward",
    "rollout.total_rollout_steps": "trainer.total_training_steps",
    "rollout.nnodes": "rollout.replicas",
    "rollout.n_gpus_per_node": "rollout.num_gpus",
    "trainer.n_gpus_per_node": "actor.world_size",
    "trainer.nnodes": "actor.world_size",
    "trainer.logger": "logging.loggers",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "*.learning_rate": "actor.optim.lr",
    "*.train_batch_size": "actor.ppo_mini_batch_size",
    "*.max_tokens": "rollout.max_response_length",
    "*.num_generations": "rollout.n",
    "*.group_size": "rollout.n",
    "trainer.val_only": "trainer.val_before_train",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key. `default` is the default value itself, `doc` its meaning."""

    path: KeyPath
    annotation: Any
    default: Any
    doc: str

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    @property
    def allowed(self) -> str:
        """What the key allows, in words."""
        return describe(self.annotation)

    def validate(self, text: str) -> None:
        """Check a value given as JSON, without conversions between kinds.

        Raises:
            ValidationError: pydantic's, when it is not allowed.
        """
        _adapter(self.path).validate_json(text, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section: its path (empty for the root), its dataclass, its own keys in order."""

    path: KeyPath
    config_class: type[Any]
    keys: tuple[Key, ...]

    @property
    def doc(self) -> str:
        """The docstring of the dataclass."""
        return inspect.getdoc(self.config_class) or ""


@functools.cache
def sections() -> dict[KeyPath, Section]:
    """Every section by path, parents before children, in the order of `sections.py`."""
    found: dict[KeyPath, Section] = {}
    _collect((), Config, found)
    return found


@functools.cache
def keys() -> dict[KeyPath, Key]:
    """Every key by path, in the order of `sections.py`."""
    return {key.path: key for section in sections().values() for key in section.keys}


def nearest_key(name: str) -> str:
    """The valid key most like a dotted name that is none, also when it is in another section."""
    for known in (name, "*." + name.rpartition(".")[2]):
        if known in _SPELLED_ELSEWHERE:
            return _SPELLED_ELSEWHERE[known]
    return max(_names(), key=lambda candidate: _likeness(name, candidate))


def describe(annotation: Any) -> str:
    """A type in words a user understands: "an integer, at least 1"."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Annotated:
        return ", ".join([describe(arguments[0]), *_bounds(arguments[1:])])
    if origin is Literal:
        return _one_of([str(value) for value in arguments])
    if origin in (Union, types.UnionType):
        return _describe_union(arguments)
    if origin is tuple:
        return _describe_tuple(arguments)
    if origin is dict:
        return f"a map from {describe(arguments[0])} to {describe(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _one_of([str(member.value) for member in annotation])
    return _PLAIN[annotation]


_PLAIN: dict[Any, str] = {
    str: "text",
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    type(None): "null",
}


def _one_of(values: list[str]) -> str:
    return values[0] if len(values) == 1 else "one of " + ", ".join(values)


def _describe_union(arguments: tuple[Any, ...]) -> str:
    if str in arguments and tuple[str, ...] in arguments:
        return "text, or a list of texts"
    words = [describe(argument) for argument in arguments if argument is not type(None)]
    if len(words) < len(arguments):
        return f"{' or '.join(words)}; or null"
    return " or ".join(words)


def _describe_tuple(arguments: tuple[Any, ...]) -> str:
    if arguments[-1] is Ellipsis:
        return f"a list, each {describe(arguments[0])}"
    return f"a list of {len(arguments)}, each {describe(arguments[0])}"


def _bounds(metadata: tuple[Any, ...]) -> list[str]:
    words: list[str] = []
    for item in metadata:
        parts = item.metadata if isinstance(item, FieldInfo) else [item]
        for part in parts:
            if isinstance(part, Ge):
                words.append(f"at least {part.ge}")
            elif isinstance(part, Gt):
                words.append(f"above {part.gt}")
            elif isinstance(part, Le):
                words.append(f"at most {part.le}")
            elif isinstance(part, Lt):
                words.append(f"below {part.lt}")
            elif isinstance(part, MinLen):
                words.append(f"of {part.min_length} or more characters")
            elif isinstance(part, AfterValidator):
                words.append(str(part.func.__doc__).rstrip("."))
    return words


@functools.cache
def _adapter(path: KeyPath) -> TypeAdapter[Any]:
    return TypeAdapter(keys()[path].annotation)


def _collect(path: KeyPath, config_class: type[Any], found: dict[KeyPath, Section]) -> None:
    hints = typing.get_type_hints(config_class, include_extras=True)
    docs = _field_docs(config_class)
    children: list[tuple[KeyPath, type[Any]]] = []
    own: list[Key] = []
    for field in dataclasses.fields(config_class):
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            children.append(((*path, field.name), annotation))
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        own.append(
            Key(
                path=(*path, field.name),
                annotation=annotation,
                default=default,
                doc=docs.get(field.name, ""),
            )
        )
    found[path] = Section(path=path, config_class=config_class, keys=tuple(own))
    for child_path, child in children:
        _collect(child_path, child, found)


@functools.cache
def _schema() -> dict[str, Any]:
    return TypeAdapter(Config).json_schema()


def _field_docs(config_class: type[Any]) -> dict[str, str]:
    """Docstrings under the fields, as pydantic collects them."""
    schema = _schema()
    own = schema["$defs"].get(config_class.__name__, schema)
    return {
        name: inspect.cleandoc(entry["description"])
        for name, entry in own["properties"].items()
        if "description" in entry
    }


@functools.cache
def _names() -> tuple[str, ...]:
    """Every dotted key, entries of a map of failure classes included."""
    names = [key.name for key in keys().values()]
    for key in keys().values():
        arguments = typing.get_args(key.annotation)
        if arguments and arguments[0] is FailureClass:
            names += [f"{key.name}.{member.value}" for member in FailureClass]
    return tuple(names)


def _likeness(name: str, candidate: str) -> tuple[float, float]:
    """Likeness of the last words counts most, then that of the whole paths."""
    last = name.rpartition(".")[2]
    candidate_last = candidate.rpartition(".")[2]
    whole = difflib.SequenceMatcher(None, _plain(name), _plain(candidate)).ratio()
    ends = difflib.SequenceMatcher(None, _plain(last), _plain(candidate_last)).ratio()
    same_place = name.rpartition(".")[0] == candidate.rpartition(".")[0]
    same_section = name.partition(".")[0] == candidate.partition(".")[0]
    bonus = 0.1 * same_place + 0.1 * same_section
    if name.endswith("." + candidate):
        bonus += 0.3
    return (0.6 * ends + 0.4 * whole + bonus, whole)


def _plain(name: str) -> str:
    return re.sub(r"[-\s]", "_", name.lower())
