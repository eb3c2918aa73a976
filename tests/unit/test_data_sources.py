import builtins

import pytest

from freewheel.config.sections import Config, DataConfig
from freewheel.data import check_data, open_dataset
from freewheel.data.generated import parse_spec
from freewheel.errors import ConfigError, DataError
from freewheel.types import Split

ROWS = {"prompt": ["a", "b"], "ground_truth": ["1", "2"]}


def config_of(train, val="", **fields) -> Config:
    return Config(data=DataConfig(train_files=str(train), val_files=str(val), **fields))


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


def test_a_dataset_folder(tmp_path, datasets):
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "d")
    config = config_of(tmp_path / "d")
    dataset = open_dataset(config, Split.TRAIN)
    assert [dataset.record(i).prompt for i in range(len(dataset))] == ["a", "b"]
    assert dataset.record(1).ground_truth == "2"
    assert dataset.where(1).endswith("d row 2")
    assert check_data(config) == [f"data.train_files: {tmp_path / 'd'}: 2 rows"]


@pytest.mark.parametrize(
    ("names", "split", "wanted"),
    [
        (["train", "test"], Split.TRAIN, "train"),
        (["train", "test"], Split.VALIDATION, "test"),
        (["train", "validation", "test"], Split.VALIDATION, "validation"),
        (["all"], Split.VALIDATION, "all"),
    ],
)
def test_the_split_of_a_folder(tmp_path, datasets, names, split, wanted):
    parts = {
        name: datasets.Dataset.from_dict({"prompt": [name], "ground_truth": ["x"]})
        for name in names
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    dataset = open_dataset(config_of(tmp_path / "d", tmp_path / "d"), split)
    assert dataset.record(0).prompt == wanted


def test_a_folder_without_the_split(tmp_path, datasets):
    part = datasets.Dataset.from_dict(ROWS)
    datasets.DatasetDict({"trian": part, "dev": part}).save_to_disk(tmp_path / "d")
    with pytest.raises(ConfigError, match="found trian, dev; nearest: 'trian'"):
        open_dataset(config_of(tmp_path / "d"), Split.TRAIN)


def test_fingerprint_of_a_folder(tmp_path, datasets):
    prints = []
    for name, values in (("a", ["1", "2"]), ("b", ["1", "2"]), ("c", ["1", "3"])):
        rows = {"prompt": ["a", "b"], "ground_truth": values}
        datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / name)
        prints.append(open_dataset(config_of(tmp_path / name), Split.TRAIN).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_a_damaged_folder(tmp_path, datasets):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable dataset folder"):
        open_dataset(config_of(tmp_path), Split.TRAIN)


def test_missing_packages_name_their_extra(tmp_path, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] in ("datasets", "reasoning_gym"):
            raise ModuleNotFoundError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for source, extra in ((tmp_path, "datasets"), ("reasoning_gym:chain_sum", "reasoning-gym")):
        with pytest.raises(ConfigError, match=rf"pip install 'freewheel\[{extra}\]'"):
            check_data(config_of(source))


def test_parameters_get_their_types():
    spec = parse_spec("reasoning_gym:some_task?size=5&rate=0.5&flag=true&word=abc&seed=-3")
    assert spec.task == "some_task"
    assert spec.params == {"size": 5, "rate": 0.5, "flag": True, "word": "abc", "seed": -3}
    assert parse_spec("reasoning_gym:t").params == {"size": 1000, "seed": 1}


def test_generated_prompts_are_seeded_and_keep_their_entry():
    pytest.importorskip("reasoning_gym")
    config = config_of("reasoning_gym:chain_sum?size=20&seed=5&max_terms=3")
    one, two = (open_dataset(config, Split.TRAIN) for _ in range(2))
    assert len(one) == 20
    assert one.fingerprint == two.fingerprint
    for index in (19, 3):
        record = one.record(index)
        assert record.prompt == two.record(index).prompt
        assert record.ground_truth == record.extra["reasoning_gym"]["answer"]
        assert record.extra["score_answer"](record.ground_truth, record.extra["reasoning_gym"]) == 1
    other = open_dataset(
        config_of("reasoning_gym:chain_sum?size=20&seed=6&max_terms=3"), Split.TRAIN
    )
    assert other.fingerprint != one.fingerprint
    assert other.record(0).prompt == one.record(1).prompt  # which is why overlaps are reported


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reasoning_gym:chain_sums", "no task 'chain_sums'; nearest: 'chain_sum'"),
        ("reasoning_gym:chain_sum?max_term=3", "no parameter 'max_term'.*nearest: 'max_terms'"),
        ("reasoning_gym:chain_sum?max_terms=x", "refused by the task"),
        ("reasoning_gym:chain_sum?max_terms", "parameters are name=value"),
        ("reasoning_gym:", "the task's name is missing"),
    ],
)
def test_what_a_task_refuses(source, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        check_data(config_of(source))


@pytest.mark.parametrize(
    ("train", "val", "shared"),
    [
        ("chain_sum?size=100&seed=1", "chain_sum?size=10&seed=2", 10),
        ("chain_sum?size=100&seed=1", "chain_sum?size=10&seed=96", 5),
        ("chain_sum?size=100&seed=1", "chain_sum?size=10&seed=101", 0),
        ("chain_sum?size=100&seed=1", "chain_sum?size=10&seed=1&max_terms=3", 0),
        ("chain_sum?size=100&seed=1", "letter_counting?size=10&seed=1", 0),
    ],
)
def test_overlap_of_generated_splits_is_reported(train, val, shared):
    pytest.importorskip("reasoning_gym")
    lines = check_data(config_of(f"reasoning_gym:{train}", f"reasoning_gym:{val}"))
    warnings = [line for line in lines if line.startswith("warning:")]
    assert len(warnings) == bool(shared)
    if shared:
        assert f"{shared} prompts" in warnings[0]
