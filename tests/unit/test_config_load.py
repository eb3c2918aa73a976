import dataclasses
import typing
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from freewheel.config import Config, dump_config, load_config
from freewheel.config.keys import keys, nearest_key, sections
from freewheel.config.reference import render_reference
from freewheel.config.sections import TrainerConfig
from freewheel.errors import ConfigError, FailureClass
from freewheel.sampling_limits import MIN_TEMPERATURE

TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["1e-6", "1", "true", "null", "~", "", "on", "1:30", "2024-01-01", "#a", "-"]),
)


def strategy(annotation):
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return bounded(arguments[0], arguments[1:])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, arguments))
    if origin is dict:
        return st.dictionaries(strategy(arguments[0]), strategy(arguments[1]), max_size=3)
    if arguments:
        return st.one_of(*map(strategy, arguments))
    if annotation is FailureClass:
        return st.sampled_from(FailureClass)
    return {
        str: TEXT,
        int: st.integers(),
        bool: st.booleans(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        type(None): st.none(),
    }[annotation]


def bounded(kind, metadata):
    parts = [
        p for item in metadata for p in (item.metadata if isinstance(item, FieldInfo) else [item])
    ]
    low = next((p.ge if isinstance(p, Ge) else p.gt for p in parts if isinstance(p, Ge | Gt)), None)
    high = next((p.le for p in parts if isinstance(p, Le)), None)
    if kind is int:
        return st.integers(low, high)
    if kind is str:
        return TEXT.filter(bool)  # the one bound of texts: not empty
    if any(isinstance(p, AfterValidator) for p in parts):
        return st.one_of(st.just(0.0), st.floats(MIN_TEMPERATURE, 1e6))
    exclude = any(isinstance(p, Gt) for p in parts)
    return st.floats(low, high, exclude_min=exclude, allow_nan=False, allow_infinity=False)


@st.composite
def configs(draw):
    def build(path):
        section = sections()[path]
        values: dict[str, Any] = {
            key.path[-1]: draw(strategy(key.annotation))
            for key in section.keys
            if draw(st.booleans())
        }
        for child in sections():
            if child and child[:-1] == path:
                values[child[-1]] = build(child)
        return section.config_class(**values)

    return build(())


@given(config=configs())
@settings(max_examples=60, deadline=None)
def test_dumped_configuration_loads_as_the_same(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize("text", ["\x85", "\u2028", "a\nb", "\t", "é\x85", " ", "\x00", "日本"])
def test_a_text_of_any_characters_survives_the_dump(tmp_path, text):
    config = Config(trainer=TrainerConfig(experiment_name=text))
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(tmp_path, text="", overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    return str(caught.value)


def test_no_recipe_gives_the_defaults():
    assert load_config(None) == Config()


def test_nested_and_dotted_keys_and_overrides_meet(tmp_path):
    recipe = write(tmp_path, "rollout: {n: 4}\nactor.optim.lr: 1e-6\ntrainer:\n")
    config = load_config(recipe, ["rollout.n=6", "rollout.n=5", "actor.optim={eps: 1e-3}"])
    assert config.rollout.n == 5
    assert config.actor.optim.lr == 1e-6
    assert config.actor.optim.eps == 1e-3


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("actor.optim.lr=1e-6", lambda c: c.actor.optim.lr, 1e-6),
        ("rollout.temperature=1", lambda c: c.rollout.temperature, 1.0),
        ("rollout.stop=###", lambda c: c.rollout.stop, ("###",)),
        ("rollout.stop=[a, 'b c']", lambda c: c.rollout.stop, ("a", "b c")),
        ("rollout.stop_token_ids=5", lambda c: c.rollout.stop_token_ids, (5,)),
        ("data.train_files=[a, b]", lambda c: c.data.train_files, ("a", "b")),
        ("data.val_files=", lambda c: c.data.val_files, ""),
        ("trainer.experiment_name=42", lambda c: c.trainer.experiment_name, "42"),
        ("trainer.experiment_name=on", lambda c: c.trainer.experiment_name, "on"),
        ("trainer.run_dir={time}", lambda c: c.trainer.run_dir, "{time}"),
        ("data.system_prompt=Say: yes", lambda c: c.data.system_prompt, "Say: yes"),
        (
            "rollout.reward_kwargs.pattern=[a-c]+",
            lambda c: c.rollout.reward_kwargs["pattern"],
            "[a-c]+",
        ),
        ("rollout.reward_kwargs.x=2", lambda c: c.rollout.reward_kwargs["x"], 2),
        ("async_training.max_staleness=null", lambda c: c.async_training.max_staleness, None),
        ("ray.address=", lambda c: c.ray.address, None),
        ("logging.loggers=wandb", lambda c: c.logging.loggers, ("wandb",)),
        ("logging.loggers=[]", lambda c: c.logging.loggers, ()),
        ("actor.optim.betas=[0.9, 0.95]", lambda c: c.actor.optim.betas, (0.9, 0.95)),
    ],
)
def test_values_of_overrides(override, read, expected):
    value = read(load_config(None, [override]))
    assert value == expected
    assert type(value) is type(expected)


def test_one_entry_of_a_map_leaves_the_others():
    retries = load_config(None, ["rollout.retries.engine=5"]).rollout.retries
    assert retries == {**Config().rollout.retries, FailureClass.ENGINE: 5}


def test_a_whole_map_replaces_the_default(tmp_path):
    config = load_config(write(tmp_path, "rollout:\n  retries: {engine: 5}\n"))
    assert config.rollout.retries == {FailureClass.ENGINE: 5}


@pytest.mark.parametrize(
    "override",
    [
        "rollout.n=abc",
        "rollout.n='8'",
        "rollout.n=8.0",
        "rollout.n=true",
        "rollout.n=0",
        "rollout.n=",
        "rollout.n=[1]",
        "rollout.timeout_s=.inf",
        "rollout.timeout_s=.nan",
        "data.shuffle=1",
        "data.shuffle=yes",
        "model.path=null",
        "rollout.engine=sglang",
        "actor.optim.betas=[0.9]",
        "rollout.retries.engine=-1",
        "rollout.retries.engne=1",
        "rollout=5",
        "rollout.n={a: 1}",
    ],
)
def test_refused_overrides_name_key_and_place(override):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    name = override.partition("=")[0]
    assert str(caught.value).startswith(name)
    assert f"(argument {override})" in str(caught.value)


@pytest.mark.parametrize(
    "line", ["rollout.n: '8'", "trainer.run_dir: 5", "rollout.n: true", "rollout.stop: [1]"]
)
def test_refused_values_in_a_file_name_the_line(tmp_path, line):
    assert "recipe.yaml:2" in problems_of(tmp_path, f"# comment\n{line}\n")


def test_every_problem_is_named_at_once(tmp_path):
    text = problems_of(
        tmp_path,
        "rollout:\n  nn: 8\n  n: many\nactor_rollout_ref: {rollout: {n: 5}}\n",
        ["foo", "trainer.test_frq=2"],
    )
    lines = text.splitlines()
    assert lines[0] == "5 problems in the configuration:"
    assert len(lines) == 6
    assert "rollout.nn = 8 (" in text
    assert 'rollout.n = "many"' in text
    assert "allowed: an integer, at least 1" in text
    assert "actor_rollout_ref.rollout.n = 5" in text
    assert "'foo': expected key=value" in text
    assert "nearest valid key: trainer.test_freq" in text


@pytest.mark.parametrize(
    "text",
    [
        "rollout.n: 8\nrollout.n: 9\n",
        "rollout: {n: 8, n: 9}\n",
        "rollout: {n: 8}\nrollout.n: 9\n",
        "rollout: {n: 8}\nrollout: {replicas: 2}\n",
        "rollout:\n  retries: {engine: 1, engine: 2}\n",
    ],
)
def test_a_repeated_key_is_refused(tmp_path, text):
    assert "set twice" in problems_of(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout: [", "recipe.yaml:1: not valid YAML"),
        ("- 1\n", "expected sections and keys"),
        ("5", "expected sections and keys"),
        ("a: &x\n  b: *x\n", "contains itself"),
        ("rollout.n: !!python/name:os.system\n", "recipe.yaml:1: not valid YAML"),
        ("rollout.n: \t\x01\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, expected):
    assert expected in problems_of(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optim.lr"),
        ("actor_rollout_ref.model.path", "model.path"),
        ("data.train_batch_size", "actor.ppo_mini_batch_size"),
        ("data.max_prompt_length", "rollout.max_prompt_length"),
        ("trainer.val_befor_train", "trainer.val_before_train"),
        ("val_before_train", "trainer.val_before_train"),
        ("validation.test_freq", "trainer.test_freq"),
        ("async_training.stalenes_threshold", "async_training.staleness_threshold"),
        ("rollout.retries.engne", "rollout.retries.engine"),
        ("rollout.temprature", "rollout.temperature"),
        ("trainer.logger", "logging.loggers"),
        ("actor.learning_rate", "actor.optim.lr"),
        ("trainer.save-freq", "trainer.save_freq"),
    ],
)
def test_nearest_key(wrong, right):
    assert nearest_key(wrong) == right


def test_spelled_elsewhere_leads_to_keys_that_exist():
    from freewheel.config.keys import _SPELLED_ELSEWHERE

    names = {key.name for key in keys().values()}
    assert set(_SPELLED_ELSEWHERE.values()) <= names
    assert not set(_SPELLED_ELSEWHERE) & names


def test_every_key_has_a_meaning_and_a_default_that_it_allows():
    for key in keys().values():
        assert key.doc, key.name
        assert key.allowed
    assert load_config(None) == Config()


def test_committed_reference_is_current(pytestconfig):
    committed = pytestconfig.rootpath / "docs" / "configuration.md"
    assert committed.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m freewheel.config.reference > docs/configuration.md"
    )


def test_reference_names_every_key():
    text = render_reference()
    assert all(f"| `{key.name}` |" in text for key in keys().values())
    assert dataclasses.fields(Config)
