"""Tiny random models and their folders, for the tests of the engine."""

import warnings
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from freewheel.config.sections import Config, RolloutConfig
from freewheel.engine.loading import load_model
from freewheel.engine.torch_engine import TorchEngine
from freewheel.types import Generation, GenerationRequest, SamplingParams
from freewheel.weights import WeightBundle, pack_weights

VOCAB = 61
EOS = 1

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 2,
    "initializer_range": 0.3,
}

CONFIGS = {
    "llama_tied": LlamaConfig(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "llama_untied": LlamaConfig(**_SHAPE, num_key_value_heads=4, tie_word_embeddings=False),
    "llama3_rope": LlamaConfig(
        **_SHAPE,
        num_key_value_heads=1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**_SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=16),
    "mistral": MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=None),
    "mistral_window": MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=7),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        bos_token_id=0,
        eos_token_id=EOS,
        initializer_range=0.3,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    "neox": GPTNeoXConfig(**_SHAPE, attention_dropout=0.0, hidden_dropout=0.0),
}
FAST = ("llama_tied", "llama_untied", "llama3_rope", "qwen2", "qwen3", "mistral")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ids 0, 1, 2 are special."""
    letters = [chr(ord("!") + i) for i in range(VOCAB - 4)]
    vocab = {"<s>": 0, "</s>": EOS, "<pad>": 2, " ": 3}
    vocab |= {letter: 4 + i for i, letter in enumerate(letters)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_model(name: str, seed: int = 0):
    """A random float32 model of one of CONFIGS, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases too, so that a mistake with them shows
                torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model.eval()


def save(name: str, folder: Path) -> Path:
    """A folder with configuration and tokenizer; the engine needs no weights in it."""
    CONFIGS[name].save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def config(**rollout) -> Config:
    """A configuration with these settings in `rollout`."""
    settings = {"max_prompt_length": 64, "max_response_length": 96, "kv_cache_bytes": 1 << 24}
    return Config(rollout=RolloutConfig(device="cpu", **(settings | rollout)))


def bundle(model) -> WeightBundle:
    return pack_weights(model.named_parameters())


def make_engine(
    name: str,
    folder: Path,
    *,
    fast: bool = True,
    eos: bool = False,
    version: int | None = 0,
    max_prefill_tokens: int | None = None,
    **rollout,
) -> TorchEngine:
    """An engine under the weights of `make_model(name)`; without end tokens unless `eos`."""
    settings = config(**rollout)
    loaded = load_model(settings, save(name, folder), fast=fast)
    if not eos:
        loaded = loaded.without_eos()
    engine = TorchEngine(settings, loaded, max_prefill_tokens=max_prefill_tokens)
    if version is not None:
        engine.update_weights(version, bundle(make_model(name)))
    return engine


def request(request_id: str, prompt, **sampling) -> GenerationRequest:
    settings = {"max_tokens": 12, "seed": 7} | sampling
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        sampling=SamplingParams(**settings),
    )


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of different lengths, without special tokens."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(3, VOCAB, size=int(size)).tolist()
        for size in generator.integers(1, 20, size=count)
    ]


def run(engine: TorchEngine, requests=(), *, max_steps: int = 2000) -> dict[str, Generation]:
    """Step until nothing is left."""
    for item in requests:
        engine.check(item)
        engine.add(item)
    results: dict[str, Generation] = {}
    for _ in range(max_steps):
        if not engine.can_step:
            return results
        for generation in engine.step():
            assert generation.request_id not in results
            results[generation.request_id] = generation
    raise AssertionError("the engine does not come to an end")


def model_logprobs(model, prompt, token_ids, sampling: SamplingParams) -> np.ndarray:
    """Reference: one forward pass over the whole sequence; temperature and filters in float64."""
    sequence = torch.tensor([[*prompt, *token_ids]], dtype=torch.long)
    with torch.inference_mode(), warnings.catch_warnings():
        logits = model(sequence).logits[0, len(prompt) - 1 : -1].double()
    logprobs = []
    for row, token in zip(logits, token_ids, strict=True):
        logprobs.append(float(_distribution(row, sampling)[int(token)]))
    return np.asarray(logprobs)


def _distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    order = logits.argsort(descending=True)
    keep = order.tolist()
    if sampling.min_p > 0:
        floor = float(logits.max()) + float(np.log(sampling.min_p))
        keep = [token for token in keep if logits[token] >= floor]
    if sampling.top_k > 0:
        keep = keep[: sampling.top_k]
    probs = logits[keep].softmax(-1).tolist()
    kept, mass = [], 0.0
    for token, prob in zip(keep, probs, strict=True):
        if kept and mass >= sampling.top_p:
            break
        kept.append(token)
        mass += prob
    filtered = torch.full_like(logits, -torch.inf)
    filtered[kept] = logits[kept]
    return filtered.log_softmax(-1)
