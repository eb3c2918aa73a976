"""Tiny random models and trajectories for the trainer's tests."""

import copy
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from freewheel.types import Trajectory

VOCABULARY = 61
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **SPECIAL,
}


def llama_config(**changes: object) -> LlamaConfig:
    return LlamaConfig(**{**SMALL, "tie_word_embeddings": True, **changes})


CONFIGS = {
    "llama": llama_config(),
    "llama-untied": llama_config(tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "mistral-window": MistralConfig(**SMALL, sliding_window=6),
    # These take the padded fallback or the model's own logits.
    "gemma2-softcap": Gemma2Config(**SMALL, head_dim=8, sliding_window=64),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mamba": MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
}


def make_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random model whose distributions are far from uniform, so that errors show."""
    torch.manual_seed(seed)
    # A model keeps its configuration, and the way it attends is written there.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    return model.eval()


def save_model(folder: Path, config: PreTrainedConfig | None = None) -> Path:
    make_model(config or llama_config()).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")),
        bos_token="w0",
        eos_token="w1",
        pad_token="w2",
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_groups(
    num_groups: int = 4,
    group_size: int = 4,
    *,
    seed: int = 0,
    prompt: tuple[int, int] = (2, 9),
    response: tuple[int, int] = (1, 12),
    vocabulary: int = VOCABULARY,
) -> list[list[Trajectory]]:
    """Groups with random tokens, lengths, rewards and rollout logprobs."""
    random = np.random.default_rng(seed)
    groups: list[list[Trajectory]] = []
    for group_id in range(num_groups):
        prompt_tokens = random.integers(0, vocabulary, size=random.integers(*prompt))
        group: list[Trajectory] = []
        for member in range(group_size):
            length = int(random.integers(*response))
            token_ids = np.concatenate([prompt_tokens, random.integers(0, vocabulary, size=length)])
            mask = np.arange(token_ids.size) >= prompt_tokens.size
            group.append(
                Trajectory(
                    sample_id=f"s{group_id}-{member}",
                    group_id=group_id,
                    reward=float(random.integers(0, 3)),
                    token_ids=token_ids.astype(np.int32),
                    loss_mask=mask,
                    rollout_logprobs=np.where(mask, -4 * random.random(mask.size), 0).astype(
                        np.float32
                    ),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                )
            )
        groups.append(group)
    return groups
