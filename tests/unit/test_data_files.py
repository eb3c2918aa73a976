import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.config.sections import Config, DataConfig
from freewheel.data import check_data, open_dataset
from freewheel.errors import ConfigError, DataError
from freewheel.types import Split

ROWS = [{"prompt": f"question {i}", "ground_truth": str(i), "level": i % 3} for i in range(2500)]


def config_of(*files, **fields) -> Config:
    return Config(data=DataConfig(train_files=tuple(map(str, files)), **fields))


def open_train(*files, **fields):
    return open_dataset(config_of(*files, **fields), Split.TRAIN)


def write_jsonl(path, rows, *, separator="\n"):
    path.write_text(separator.join(json.dumps(row) for row in rows))
    return path


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", ROWS)


@pytest.fixture
def parquet(tmp_path):
    return write_parquet(tmp_path / "b.parquet", ROWS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_by_number(kind, request):
    dataset = open_train(request.getfixturevalue(kind))
    assert len(dataset) == 2500
    for index in (0, 1, 1023, 1024, 2499):
        record = dataset.record(index)
        assert record.prompt == f"question {index}"
        assert record.ground_truth == str(index)
        assert record.extra == {"level": index % 3}
    with pytest.raises(IndexError):
        dataset.record(2500)


def test_files_are_concatenated_and_cut(jsonl, parquet):
    dataset = open_train(jsonl, parquet, train_max_samples=2600)
    assert len(dataset) == 2600
    assert dataset.record(2499).prompt == "question 2499"
    assert dataset.record(2500).prompt == "question 0"
    assert dataset.where(2599) == f"{parquet} row 100"


@given(
    rows=st.lists(st.text(min_size=1), min_size=1, max_size=20),
    blanks=st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n\r\n"]), min_size=1),
)
def test_blank_lines_are_no_rows(rows, blanks, tmp_path_factory):
    path = tmp_path_factory.mktemp("blank") / "a.jsonl"
    text = "".join(
        json.dumps({"prompt": row, "ground_truth": "x"}) + blanks[i % len(blanks)]
        for i, row in enumerate(rows)
    )
    path.write_bytes(text.encode())
    dataset = open_train(path)
    assert [dataset.record(i).prompt for i in range(len(dataset))] == rows


def test_line_numbers_count_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"prompt": "p", "ground_truth": "x"})
    path.write_text(f"\n{good}\n\n{{broken\n")
    with pytest.raises(DataError, match=r"a\.jsonl line 4: not JSON"):
        open_train(path).record(1)


def test_dotted_ground_truth(tmp_path):
    rows = [{"prompt": "p", "reward_model": {"style": "rule", "ground_truth": 7}}]
    for path in (
        write_jsonl(tmp_path / "a.jsonl", rows),
        write_parquet(tmp_path / "a.parquet", rows),
    ):
        record = open_train(path, ground_truth_key="reward_model.ground_truth").record(0)
        assert record.ground_truth == 7
        assert check_data(config_of(path, ground_truth_key="reward_model.ground_truth"))
        for check in (check_data, lambda config: open_dataset(config, Split.TRAIN)):
            with pytest.raises(
                (ConfigError, DataError), match=r"ground_truht.*nearest: 'ground_tr"
            ):
                check(config_of(path, ground_truth_key="reward_model.ground_truht"))


def test_no_ground_truth_key_gives_none(jsonl):
    assert open_train(jsonl, ground_truth_key="").record(3).ground_truth is None


def test_chat_messages_lose_the_fields_that_arrow_filled_in(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "x"}], "ground_truth": "1"},
        {"prompt": [{"role": "user", "content": "b"}], "ground_truth": "1"},
    ]
    dataset = open_train(write_parquet(tmp_path / "a.parquet", rows))
    assert dataset.record(1).prompt == [{"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "", "ground_truth": "x"}, "column 'prompt': the prompt is empty"),
        ({"prompt": 5, "ground_truth": "x"}, "column 'prompt': a text or .* found int 5"),
        ({"prompt": [], "ground_truth": "x"}, r"found list \[\]"),
        ({"prompt": [{"role": "user"}], "ground_truth": "x"}, "'content' .* found NoneType"),
        ({"prompt": ["hi"], "ground_truth": "x"}, "a chat message is a mapping .* found str 'hi'"),
        ({"prompt": "p", "ground_truth": None}, "column 'ground_truth': the ground truth is null"),
        ({"promt": "p", "ground_truth": "x"}, "no column 'prompt', only promt.*nearest: 'promt'"),
        (["p"], "an object wanted, found list"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "ground_truth": "x"}, row])
    dataset = open_train(path)
    assert dataset.record(0).prompt == "p"
    with pytest.raises(DataError, match=rf"a\.jsonl line 2.*{message}"):
        dataset.record(1)


def test_what_is_missing_is_named_with_the_nearest(tmp_path, jsonl, parquet):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").write_text("prompt\n")
    cases = [
        (config_of(tmp_path / "a.jsonI"), r"data.train_files: .*a.jsonI does not exist.*'a.jsonl'"),
        (config_of(tmp_path / "a.csv"), "unknown kind '.csv': .parquet or .jsonl"),
        (config_of(tmp_path / "folder"), "not one that datasets' save_to_disk wrote"),
        (config_of(tmp_path / "no" / "a.jsonl"), "nor the folder"),
        (config_of(parquet, prompt_key="promt"), "no column 'promt'.*nearest: 'prompt'"),
        (config_of(jsonl, prompt_key="promt"), "no column 'promt'.*nearest: 'prompt'"),
        (Config(), "data.train_files is required"),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_data(config)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_empty_and_damaged_files(tmp_path, name):
    for content in (b"", b"PAR1garbage"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            open_train(tmp_path / name)
        with pytest.raises(ConfigError, match=name):
            check_data(config_of(tmp_path / name))


def test_the_fingerprint_follows_the_content(tmp_path):
    one = write_jsonl(tmp_path / "a.jsonl", ROWS[:10])
    first = open_train(one)
    copy = write_jsonl(tmp_path / "copy.jsonl", ROWS[:10])
    other = write_jsonl(tmp_path / "b.jsonl", [*ROWS[:9], {**ROWS[9], "level": 9}])
    assert open_train(copy).fingerprint == first.fingerprint
    assert open_train(other).fingerprint != first.fingerprint
    assert open_train(one, train_max_samples=9).fingerprint != first.fingerprint
    assert open_train(one, prompt_key="ground_truth").fingerprint != first.fingerprint


def test_check_data_says_what_there_is(jsonl, parquet):
    lines = check_data(config_of(jsonl, parquet))
    assert lines[0].startswith(f"data.train_files: {jsonl}: JSONL")
    assert lines[1] == f"data.train_files: {parquet}: 2500 rows"


def test_parquet_leaves_no_file_behind(parquet, tmp_path, monkeypatch):
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spill))
    dataset = open_train(parquet)
    assert dataset.record(2000).prompt == "question 2000"
    assert os.listdir(spill) == []


def test_the_order_and_the_package_load_no_heavy_library():
    code = (
        "import sys, freewheel.data.order, freewheel.data\n"
        "heavy = {'torch', 'ray', 'transformers', 'pyarrow', 'datasets', 'reasoning_gym'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.stdout.strip() == "[]"
