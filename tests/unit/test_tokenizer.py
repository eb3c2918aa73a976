"""The tokenizer is the one that `AutoTokenizer` gives, and comes without torch where it can."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from freewheel.shipped import candidates
from freewheel.tokenizer import load_tokenizer
from tests.unit.engine_models import save

TEXT = "a b1+2= <s>x"


def _settings(folder, name, **changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("stated", ["PreTrainedTokenizerFast", "TokenizersBackend", None])
def test_it_is_the_one_of_auto_tokenizer(name, stated, tmp_path):
    folder = save(name, tmp_path)
    _settings(folder, "tokenizer_config.json", tokenizer_class=stated)
    ours = load_tokenizer(folder, trust_remote_code=False)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.eos_token_id, ours.chat_template) == (theirs.eos_token_id, theirs.chat_template)


def test_rollout_workers_import_no_torch():
    (folder,) = [path for path in candidates("recipes/tiny") if path.is_dir()][:1]
    code = (
        "import sys; from pathlib import Path; import freewheel.rollout.host\n"
        "from freewheel.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(Path({str(folder)!r}), trust_remote_code=False)\n"
        "assert tokenizer('1')['input_ids']\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_code_of_the_folder_s_own_is_left_to_auto_tokenizer(tmp_path):
    folder = save("llama_tied", tmp_path)
    _settings(
        folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own_tokenizer.Own", None]}
    )
    (folder / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    assert type(load_tokenizer(folder, trust_remote_code=True)).__name__ == "Own"


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_file_is_transformers_to_tell(content, tmp_path):
    folder = save("llama_tied", tmp_path)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(Exception):  # noqa: B017  # whatever it raises
        load_tokenizer(folder, trust_remote_code=False)
