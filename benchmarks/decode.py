"""Decoding speed: the embedded engine against transformers' `generate`.

Same weights (float32), same prompts, same number of new tokens, sampling at temperature 1 without
filters, no end token. Prefill is not timed. The two alternate within one run, since machines are
noisy; the table shows medians.

    python benchmarks/decode.py --model random-tiny --threads 1
    python benchmarks/decode.py --model path/to/folder --batches 8 32 --new-tokens 64
"""

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from freewheel.config.sections import Config, RolloutConfig
from freewheel.engine.loading import load_model
from freewheel.engine.torch_engine import TorchEngine
from freewheel.types import GenerationRequest, SamplingParams
from freewheel.weights import pack_weights

CLOCK = time.perf_counter

TINY = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


class FirstToken(StoppingCriteria):
    """Notes when the first token was there."""

    def __init__(self):
        self.time_s = None

    def __call__(self, input_ids, scores, **kwargs):
        self.time_s = self.time_s or CLOCK()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def time_generate(model, prompts_BT, new_tokens):
    """Tokens/s after the first token of each row."""
    first = FirstToken()
    with torch.inference_mode():
        model.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([first]),
        )
    return len(prompts_BT) * (new_tokens - 1) / (CLOCK() - first.time_s)


def time_engine(engine, prompts_BT, new_tokens):
    """Tokens/s after all rows have been prefilled."""
    for row, prompt in enumerate(prompts_BT.numpy()):
        engine.add(
            GenerationRequest(
                request_id=str(row),
                prompt_token_ids=prompt.astype(np.int32),
                sampling=SamplingParams(max_tokens=new_tokens, seed=row),
            )
        )
    while engine.has_prefills:
        engine.step()
    before, start = engine.stats().num_generated_tokens, CLOCK()
    while engine.can_step:
        engine.step()
    return (engine.stats().num_generated_tokens - before) / (CLOCK() - start)


def build(model_name, settings):
    """The Hugging Face model and an engine with the same weights."""
    if model_name == "random-tiny":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(TINY)
        with tempfile.TemporaryDirectory() as folder:
            TINY.save_pretrained(folder)
            loaded = load_model(settings, Path(folder))
    else:
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
        loaded = load_model(settings, Path(model_name))
    engine = TorchEngine(settings, loaded.without_eos())
    engine.update_weights(0, pack_weights(model.named_parameters()))
    return model.eval(), engine


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="random-tiny", help="folder, or random-tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="divide by CPU time, with one thread: steadier where other processes compute too",
    )
    args = parser.parse_args()
    if args.cpu_time:
        global CLOCK
        CLOCK = time.process_time
    torch.set_num_threads(args.threads)
    settings = Config(
        rollout=RolloutConfig(
            max_prompt_length=args.prompt_tokens,
            max_response_length=args.new_tokens,
            max_num_seqs=max(args.batches),
            kv_cache_bytes=4 << 30,
            device="cpu",
            dtype="float32",
        )
    )
    model, engine = build(args.model, settings)
    print(
        f"{args.model}, {args.threads} threads, {args.prompt_tokens} + {args.new_tokens} tokens, "
        f"{args.repeats} repeats; decoded tokens/s, medians"
    )
    print(f"{'batch':>5} {'generate':>10} {'freewheel':>10} {'ratio':>6}   ratios")
    for batch in args.batches:
        generator = np.random.default_rng(batch)
        shape = (batch, args.prompt_tokens)
        prompts_BT = torch.from_numpy(generator.integers(3, model.config.vocab_size, size=shape))
        pairs = []
        time_generate(model, prompts_BT, 4)
        time_engine(engine, prompts_BT, 4)
        for _ in range(args.repeats):
            theirs = time_generate(model, prompts_BT, args.new_tokens)
            pairs.append((theirs, time_engine(engine, prompts_BT, args.new_tokens)))
        theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = sorted(ours / theirs for theirs, ours in pairs)
        print(
            f"{batch:>5} {theirs:>10.1f} {ours:>10.1f} {statistics.median(ratios):>6.2f}   "
            + " ".join(f"{ratio:.2f}" for ratio in ratios),
            flush=True,
        )


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about sampling settings it is given
        main()
