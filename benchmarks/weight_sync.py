"""Weight sync over the real Ray path: publish once, load into each replica, against a copy.

A trainer process publishes the model's weights into Ray's object store, and the replicas, each a
process with the embedded engine, load them. In between, in this process, the same number of bytes
is copied from one buffer to another. The table shows medians (least to most) of the rounds, and
both steps as multiples of that copy in the same round. "sync" is from the trainer's start of
publishing to the last replica's answer, which samples under the new weights from then on; "per
replica" is that divided by the number of replicas. Replicas pack the weights afterwards, so the
next round begins when the machine has been left alone for a while.

    python benchmarks/weight_sync.py                     # SmolLM2-135M, two replicas
    python benchmarks/weight_sync.py --model recipes/tiny
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from freewheel.backends.ray import RayBackend
from freewheel.config.sections import (
    ActorConfig,
    Config,
    ModelConfig,
    RayConfig,
    RolloutConfig,
    TrainerConfig,
)

PAUSE_S = 1.5
"""Between two rounds; steps of a run are further apart."""

LIKE_SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


def time_copy(source, target):
    """Seconds to copy one buffer into another, both touched before."""
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


async def sync_once(trainer, replicas, version):
    """Seconds of publishing, of loading in all replicas at once, and the bytes."""
    start = time.perf_counter()
    weights = await trainer.publish(version)
    middle = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for replica in replicas:
            group.create_task(replica.update_weights(weights))
    return middle - start, time.perf_counter() - middle, weights.num_bytes


async def measure(folder, args):
    """The rounds: (copy, publish, load) in seconds, and the bytes of the weights."""
    config = Config(
        model=ModelConfig(path=str(folder)),
        rollout=RolloutConfig(
            replicas=args.replicas,
            max_prompt_length=64,
            max_response_length=64,
            device="cpu",
            dtype="float32",
            num_threads=1,
        ),
        actor=ActorConfig(num_threads=1),
        trainer=TrainerConfig(total_training_steps=1),
        ray=RayConfig(num_cpus=8, object_store_bytes=4 << 30),
    )
    backend = RayBackend(config, folder)
    try:
        await backend.start()
        replicas = [backend.replica(i) for i in range(args.replicas)]
        trainer = backend.trainer()
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.start(None))
            for replica in replicas:
                group.create_task(replica.start())
        _, _, num_bytes = await sync_once(trainer, replicas, 0)
        source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        rounds = []
        for version in range(1, args.repeats + 1):
            await asyncio.sleep(PAUSE_S)
            copy_s = time_copy(source, target)
            publish_s, load_s, _ = await sync_once(trainer, replicas, version)
            rounds.append((copy_s, publish_s, load_s))
        return rounds, num_bytes
    finally:
        await backend.aclose()


def spread(values):
    """Median (least to most)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="folder; unset: random weights of SmolLM2-135M's shape")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.model or scratch)
        if args.model is None:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(LIKE_SMOLLM2).save_pretrained(folder)
        rounds, num_bytes = asyncio.run(measure(folder, args))
    copies, publishes, loads = zip(*rounds, strict=True)
    totals = [p + load for p, load in zip(publishes, loads, strict=True)]
    print(
        f"{num_bytes / 1e6:.0f} MB, {args.replicas} replicas, {args.repeats} rounds, "
        f"load {os.getloadavg()[0]:.1f}\n\n| | seconds | GB/s | times the copy |\n|---|---|---|---|"
    )
    for name, times in (
        ("copy", copies),
        ("publish", publishes),
        ("load, all replicas at once", loads),
        ("sync", totals),
        ("sync per replica", [t / args.replicas for t in totals]),
    ):
        ratios = [t / copy for t, copy in zip(times, copies, strict=True)]
        speed = num_bytes / statistics.median(times) / 1e9
        print(f"| {name} | {spread(times)} | {speed:.2f} | {spread(ratios)} |")


if __name__ == "__main__":
    main()
