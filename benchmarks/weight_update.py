"""New weights while requests run: packed at once, or piece by piece with the steps that follow.

One embedded engine gets new weights when all its rows have some tokens, and goes on. Rounds
alternate between the engine as it is, which samples first and packs meanwhile, and one that packs
everything before its next token. The table shows medians (least to most): until the update
returned, until all rows had a token after it (their keys and values are computed anew), and until
their last.

    python benchmarks/weight_update.py          # the shape of SmolLM2-135M, 32 rows, 24 tokens
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from weight_sync import LIKE_SMOLLM2

from freewheel.config.sections import Config, RolloutConfig
from freewheel.engine.loading import load_model
from freewheel.engine.torch_engine import TorchEngine
from freewheel.types import GenerationRequest, SamplingParams
from freewheel.weights import pack_weights

PROMPT_TOKENS = 64
TOKENS_BEFORE = 8


def make_engine(folder, args):
    """An engine, and weights for it."""
    config = Config(
        rollout=RolloutConfig(
            max_prompt_length=PROMPT_TOKENS,
            max_response_length=TOKENS_BEFORE + args.tokens,
            max_num_seqs=args.rows,
            kv_cache_bytes=2 << 30,
            device="cpu",
            dtype="float32",
        )
    )
    loaded = load_model(config, folder)
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return TorchEngine(config, loaded.without_eos()), pack_weights(model.named_parameters())


def begin(engine, rows, max_tokens):
    """New requests, with their first tokens, under weights that are packed."""
    for row in range(rows):
        engine.add(
            GenerationRequest(
                request_id=str(row),
                prompt_token_ids=np.full(PROMPT_TOKENS, 5 + row, dtype=np.int32),
                sampling=SamplingParams(max_tokens=max_tokens, seed=row),
            )
        )
    go_on(engine, TOKENS_BEFORE)
    while not engine.is_settled:
        engine.settle()


def go_on(engine, tokens):
    """Step until all rows have a token, then until they have all; both times in seconds."""
    start = time.perf_counter()
    while engine.has_prefills:
        engine.step()
    first = time.perf_counter() - start
    for _ in range(tokens - 1):
        engine.step()
    return first, time.perf_counter() - start


def update(engine, version, weights, *, at_once):
    """Seconds until the engine goes on."""
    start = time.perf_counter()
    engine.update_weights(version, weights)
    while at_once and not engine.is_settled:
        engine.settle()
    return time.perf_counter() - start


def spread(values):
    """Median (least to most)."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = {"with the steps": [], "at once": []}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LIKE_SMOLLM2).save_pretrained(folder)
        engine, weights = make_engine(Path(folder), args)
    engine.update_weights(0, weights)
    for version in range(1, 2 * args.repeats + 1):
        name = list(rows)[version % 2]
        begin(engine, args.rows, TOKENS_BEFORE + args.tokens)
        updated = update(engine, version, weights, at_once=name == "at once")
        first, last = go_on(engine, args.tokens)
        rows[name].append((updated, updated + first, updated + last))
    print(
        f"{args.rows} rows, {args.tokens} tokens after each of {args.repeats} updates, "
        f"{args.threads} threads, load {os.getloadavg()[0]:.1f}\n\n"
        "| packed | update, s | first token, s | last token, s |\n|---|---|---|---|"
    )
    for name, times in rows.items():
        print(f"| {name} | " + " | ".join(map(spread, zip(*times, strict=True))) + " |")


if __name__ == "__main__":
    main()
