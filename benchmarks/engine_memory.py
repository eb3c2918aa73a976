"""Memory of the embedded engine alone: new weights and requests of all lengths, again and again.

Each round takes some groups of requests into the shipped tiny model, changes the weights in the
middle, and runs until all are done. Printed are the process's anonymous memory and the cells that
the keys and values have: what is leaked grows with the rounds, what cells take comes and goes.

    python benchmarks/engine_memory.py [--rounds 3000]
"""

import argparse
import itertools
import os
from pathlib import Path

import numpy as np
import torch
from memory import resident
from transformers import AutoModelForCausalLM

from freewheel.config.sections import Config, RolloutConfig
from freewheel.engine.torch_engine import TorchEngine
from freewheel.types import GenerationRequest, SamplingParams
from freewheel.weights import pack_weights

TINY = Path(__file__).parents[1] / "recipes/tiny"
GROUP = 8


def add_groups(engine, generator, ids):
    """Some groups: equal prompts, limits of all lengths."""
    for _ in range(int(generator.integers(4, 16))):
        length = int(generator.integers(4, 14))
        prompt = generator.integers(5, 15, size=length).astype(np.int32)
        for _ in range(GROUP):
            number = next(ids)
            tokens = int(generator.integers(1, 24))
            engine.add(
                GenerationRequest(
                    request_id=str(number),
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=tokens, seed=number),
                )
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rollout = RolloutConfig(max_prompt_length=32, max_response_length=32, max_num_seqs=128)
    engine = TorchEngine.from_folder(Config(rollout=rollout), TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    weights = pack_weights(model.named_parameters())
    generator, ids = np.random.default_rng(0), itertools.count()
    engine.update_weights(0, weights)
    print("| round | steps | anonymous MB | cells of keys and values |\n|---|---|---|---|")
    for number in range(args.rounds + 1):
        add_groups(engine, generator, ids)
        for step in itertools.count():
            if not engine.can_step:
                break
            engine.step()
            if step == 4:
                engine.update_weights(number, weights)
        if number % max(args.rounds // 10, 1) == 0:
            extra = engine.stats().extra
            anonymous_kb, _ = resident(os.getpid())
            print(
                f"| {number} | {extra['num_steps']:.0f} | {anonymous_kb / 1024:.0f} "
                f"| {extra['kv_cells']:.0f} |"
            )


if __name__ == "__main__":
    main()
