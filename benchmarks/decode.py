"""Prefill and decode speed: the embedded engine, transformers, vLLM.

Same weights (float32), same prompts, same number of new tokens, sampling at temperature 1 without
filters, no end token. Each engine has a process of its own, since thread settings leak; only one
computes at a time, and they take turns within one run, since machines are noisy. The table shows
medians, and of each round Freewheel's speed over the other's: median (least to most).

    python benchmarks/decode.py --threads 2
    python benchmarks/decode.py --models tiny --engines freewheel generate --batches 32
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from decode_engines import ENGINES, environment
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from freewheel.models import SMOLLM2, resolve_model

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

REST_S = 0.5
"""Before each turn: OpenMP's threads spin on when their work is done, vLLM's for 0.2 s."""


class Engine:
    """An engine in its process; `failure` is why it gives no numbers, if so."""

    def __init__(self, name, folder, args):
        limits = [args.prompt_tokens, args.new_tokens, max(args.batches), args.threads]
        script = Path(__file__).with_name("decode_engines.py")
        self.name, self.failure = name, ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, script, name, folder, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(name, args.threads),
        )
        self._read()

    def measure(self, prompts, new_tokens):
        """Tokens/s of prefill and decode, or None if the engine has failed."""
        if not self.failure:
            line = json.dumps({"prompts": prompts, "new_tokens": new_tokens})
            print(line, file=self._process.stdin, flush=True)
        times = self._read()
        if times is None:
            return None
        rows = len(prompts)
        return (
            rows * len(prompts[0]) / times["prefill_s"],
            rows * (new_tokens - 1) / times["decode_s"],
        )

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait()

    def _read(self):
        line = "" if self.failure else self._process.stdout.readline()
        if line:
            return json.loads(line)
        if not self.failure:
            self._process.wait()
            self._errors.seek(0)
            lines = [line for line in self._errors.read().splitlines() if "Error" in line]
            reason = lines[-1][:100] if lines else "no answer"
            self.failure = f"{reason} (exit status {self._process.returncode})"
            print(f"{self.name}: {self.failure}", file=sys.stderr)
        return None


def model_folder(name, scratch):
    """A folder with weights: of the tiny random model, of SmolLM2, or the one given."""
    if name == "smollm2":
        return resolve_model(f"package:{SMOLLM2}")
    if name != "tiny":
        return Path(name)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY).save_pretrained(scratch)
    return Path(scratch)


def spread(values, digits=2):
    """Median (least to most)."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def compare(name, engines, vocab_size, args):
    """The table's lines of one model."""
    for batch in args.batches:
        generator = np.random.default_rng(batch)
        rounds = {engine.name: [] for engine in engines}
        for turn in range(args.repeats + 1):
            shape = (batch, args.prompt_tokens)
            prompts = generator.integers(3, vocab_size, size=shape).tolist()
            for engine in engines:
                time.sleep(REST_S)  # noqa: TID251 - there is no loop
                speeds = engine.measure(prompts, args.new_tokens if turn else 4)
                if turn:  # the first one warms up
                    rounds[engine.name].append(speeds)
        ours = rounds["freewheel"]
        for engine in engines:
            theirs = rounds[engine.name]
            if None in theirs:
                continue
            prefill, decode = zip(*theirs, strict=True)
            ratios = [
                spread([a[i] / b[i] for a, b in zip(ours, theirs, strict=True)]) for i in (0, 1)
            ]
            if engine.name == "freewheel":
                ratios = ["", ""]
            load = os.getloadavg()[0]
            print(
                f"| {name} | {batch} | {engine.name} | {statistics.median(decode):.0f} "
                f"| {ratios[1]} | {statistics.median(prefill):.0f} | {ratios[0]} | {load:.1f} |",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--models", nargs="+", default=["tiny", "smollm2"], help="tiny, smollm2 or a folder"
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=[*ENGINES],
        default=[name for name in ENGINES if name != "eager"],
        help="freewheel is always in",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    names = list(dict.fromkeys(["freewheel", *args.engines]))
    print(
        f"{args.threads} threads, {args.prompt_tokens} + {args.new_tokens} tokens, "
        f"{args.repeats} rounds; tokens/s, medians; Freewheel's over the other's in each round\n"
    )
    print("| model | batch | engine | decode | ratio | prefill | ratio | load |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for model in args.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(model, scratch)
            vocab_size = AutoConfig.from_pretrained(folder).vocab_size
            engines = [Engine(name, folder, args) for name in names]
            try:
                compare(model, engines, vocab_size, args)
            finally:
                for engine in engines:
                    engine.close()


if __name__ == "__main__":
    main()
