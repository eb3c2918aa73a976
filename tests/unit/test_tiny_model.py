"""The shipped tiny model and its prompts are what their README says."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from freewheel.models import resolve_model
from freewheel.shipped import recipes_folder


@pytest.fixture(scope="module")
def maker():
    path = recipes_folder() / "make_tiny_model.py"
    spec = importlib.util.spec_from_file_location("make_tiny_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder():
    return resolve_model("recipes/tiny")


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def read(name):
    lines = (recipes_folder() / "data" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def terms_of(row):
    return [int(term) for term in row["prompt"].removesuffix("=").split("+")]


def test_model_is_small(folder, model):
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
    assert model.config.head_dim == 32
    assert model.config.tie_word_embeddings


def test_tokenizer_is_one_token_a_character_and_adds_nothing(folder, maker):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "7+8+5+9=15+5+9=20+9=29"
    assert tokenizer(text)["input_ids"] == maker.encode(text)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == maker.encode(text)
    assert tokenizer.decode([*maker.encode(text), maker.EOS], skip_special_tokens=True) == text
    assert tokenizer("4 7")["input_ids"][1] == maker.UNK
    assert tokenizer.chat_template is None


def test_special_tokens_agree(folder, model, maker):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder)
    for holder in (tokenizer, generation, model.config):
        ids = (holder.pad_token_id, holder.bos_token_id, holder.eos_token_id)
        assert ids == (maker.PAD, maker.BOS, maker.EOS)


def test_procedures(maker):
    terms = [7, 8, 5, 9]
    assert maker.write_prompt(terms) == "7+8+5+9="
    assert maker.write_working(terms, maker.add_right) == "15+5+9=20+9=29"
    assert maker.write_working(terms, maker.add_sloppy) == "5+5+9=0+9=9"


@pytest.mark.parametrize("name", ["train", "val"])
def test_data_has_its_right_answers_and_no_lucky_ones(name, maker):
    rows = read(name)
    assert rows
    for row in rows:
        terms = terms_of(row)
        assert row["ground_truth"] == str(sum(terms))
        working = maker.write_working(terms, maker.add_sloppy)
        assert working.split("=")[-1] != row["ground_truth"]


def test_held_out_prompts_are_held_out():
    train = {row["prompt"] for row in read("train")}
    val = {row["prompt"] for row in read("val")}
    assert len(train) == len(read("train")) == 3072
    assert len(val) == len(read("val")) == 64
    assert not train & val


def test_data_is_what_the_script_writes(tmp_path, maker):
    maker.write_data(tmp_path)
    for name in ("train.jsonl", "val.jsonl"):
        assert (tmp_path / name).read_text() == (recipes_folder() / "data" / name).read_text()


def test_longest_example_fits_the_recipe(maker):
    terms = [9, 9, 9, 9, 9]
    assert len(maker.write_prompt(terms)) <= 12
    assert len(maker.write_working(terms, maker.add_right)) + 1 <= 24


def test_model_knows_the_right_procedure_and_prefers_the_wrong_one(model, maker):
    problems = [terms_of(row) for row in read("val")]
    right = torch.tensor(
        [maker.answer_probability(model, terms, maker.add_right) for terms in problems]
    )
    sloppy = torch.tensor(
        [maker.answer_probability(model, terms, maker.add_sloppy) for terms in problems]
    )
    assert 0.2 <= right.mean() <= 0.4
    assert (right > sloppy).float().mean() <= 0.1
    assert (right < 0.05).float().mean() <= 0.1
