"""What an engine knows of a model: read off the folder once, and never out of date."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from freewheel.engine import known_facts
from freewheel.engine.facts import LlamaShape, ModelFacts
from freewheel.engine.inspection import inspect_folder
from freewheel.engine.known_facts import facts_of
from freewheel.shipped import candidates
from tests.unit.engine_models import CONFIGS, FAST, save


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FREEWHEEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def inspections(monkeypatch) -> list[Path]:
    """The folders that were looked at."""
    seen: list[Path] = []

    def looked_at(folder, **options):
        seen.append(folder)
        return inspect_folder(folder, **options)

    monkeypatch.setattr("freewheel.engine.inspection.inspect_folder", looked_at)
    return seen


def known(folder, trust=False) -> ModelFacts:
    return facts_of(folder, trust_remote_code=trust)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_they_survive_being_kept(name, tmp_path):
    facts = inspect_folder(save(name, tmp_path / "model"), trust_remote_code=False)
    assert ModelFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    assert (facts.llama is not None) == (name in FAST)


@pytest.mark.parametrize("name", FAST)
def test_rotary_table_is_the_model_s_to_the_last_bit(name):
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    shape = LlamaShape.of(model)
    assert shape is not None
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(1000).unsqueeze(0))
    half = shape.head_dim // 2
    table = shape.rotary_table(1000)
    assert torch.equal(table.real, cos[0, :, :half])
    assert torch.equal(table.imag, sin[0, :, :half])


def test_a_folder_is_looked_at_once(inspections, tmp_path):
    folder = save("llama_tied", tmp_path / "model")
    assert known(folder) == known(folder) == inspect_folder(folder, trust_remote_code=False)
    assert inspections == [folder]


def test_a_change_of_the_folder_is_seen(inspections, tmp_path):
    folder = save("llama_tied", tmp_path / "model")
    before = known(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert known(folder).eos_token_ids == before.eos_token_ids | {2, 5}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert not known(folder).has_tokenizer
    assert len(inspections) == 3


def test_a_folder_that_changes_meanwhile_is_not_remembered(cache, tmp_path, monkeypatch):
    folder = save("llama_tied", tmp_path / "model")

    def slowly(folder, **options):
        (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
        return inspect_folder(folder, **options)

    monkeypatch.setattr("freewheel.engine.inspection.inspect_folder", slowly)
    assert 5 in known(folder).eos_token_ids
    assert not cache.exists()


def test_facts_that_are_no_plain_data_are_not_remembered(cache, tmp_path, monkeypatch, caplog):
    folder = save("llama_tied", tmp_path / "model")

    def odd(folder, **options):
        facts = inspect_folder(folder, **options)
        return replace(facts, llama=replace(facts.llama, rope_scale=torch.tensor(1.0)))

    monkeypatch.setattr("freewheel.engine.inspection.inspect_folder", odd)
    assert known(folder).has_tokenizer
    assert "cannot be written" in caplog.text


def test_other_releases_look_anew(inspections, tmp_path, monkeypatch):
    folder = save("llama_tied", tmp_path / "model")
    known(folder)
    monkeypatch.setattr(known_facts.importlib.metadata, "version", lambda name: f"{name} 99")
    known(folder)
    assert len(inspections) == 2


def test_trusted_code_is_never_kept(inspections, cache, tmp_path):
    folder = save("llama_tied", tmp_path / "model")
    for _ in range(2):
        known(folder, trust=True)
    assert len(inspections) == 2
    assert not cache.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"llama": {"inv_freq": 1}}'])
def test_a_damaged_file_is_made_anew(content, inspections, cache, tmp_path, caplog):
    folder = save("llama_tied", tmp_path / "model")
    before = known(folder)
    (kept,) = cache.glob("models/*")
    kept.write_text(content)
    assert known(folder) == known(folder) == before
    assert len(inspections) == 2
    assert "is looked at anew" in caplog.text


def test_it_does_without_a_cache(inspections, cache, tmp_path, monkeypatch, caplog):
    folder = save("llama_tied", tmp_path / "model")
    cache.write_text("a file where the folder should be")
    known(folder)
    assert "cannot be written" in caplog.text

    def homeless():
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(known_facts, "cache_folder", homeless)
    known(folder)
    assert len(inspections) == 2


def test_an_engine_for_a_known_model_imports_no_transformers(tmp_path):
    (folder,) = [path for path in candidates("recipes/tiny") if path.is_dir()][:1]
    known(folder)
    code = (
        "import sys; from pathlib import Path\n"
        "from freewheel.config.sections import Config, RolloutConfig\n"
        "from freewheel.engine.torch_engine import TorchEngine\n"
        "rollout = RolloutConfig(device='cpu', max_prompt_length=16, max_response_length=24)\n"
        f"TorchEngine.from_folder(Config(rollout=rollout), Path({str(folder)!r}))\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
