"""Time of a trainer step against a plain Hugging Face loop, in turns on the same data.

The plain loop is the straightforward one: right-padded batch, stock SDPA, logits of every token,
log-softmax, AdamW, micro-batches of 16. CPU seconds, so that other processes do not count; on one
thread they are the wall time of a free core. Prints one line with both medians
and their ratio.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from freewheel.config.sections import ActorConfig, Config, OptimConfig
from freewheel.trainer.core import TrainerCore
from freewheel.trainer.losses import group_advantages
from freewheel.types import TrainRequest, Trajectory

CLIP_LOW, CLIP_HIGH, MAX_RATIO = 0.2, 0.28, 2.0


def make_groups(args: argparse.Namespace) -> list[list[Trajectory]]:
    random = np.random.default_rng(0)
    groups = []
    for group_id in range(args.groups):
        prompt = random.integers(0, args.vocabulary, size=args.prompt)
        group = []
        for member in range(args.group_size):
            length = int(random.integers(args.min_response, args.max_response + 1))
            tokens = np.concatenate([prompt, random.integers(0, args.vocabulary, size=length)])
            mask = np.arange(tokens.size) >= args.prompt
            group.append(
                Trajectory(
                    sample_id=f"{group_id}-{member}",
                    group_id=group_id,
                    reward=float(member % 2),
                    token_ids=tokens.astype(np.int32),
                    loss_mask=mask,
                    rollout_logprobs=np.where(mask, -np.log(args.vocabulary), 0).astype(np.float32),
                    versions=np.where(mask, 0, -1).astype(np.int32),
                )
            )
        groups.append(group)
    return groups


class PlainTrainer:
    """The loop that one writes first."""

    def __init__(self, model_path: Path, args: argparse.Namespace) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.micro_size = args.plain_micro_batch

    def train_step(self, groups: list[list[Trajectory]]) -> None:
        flat = [trajectory for group in groups for trajectory in group]
        advantages = np.concatenate(
            [group_advantages([t.reward for t in g], normalize_by_std=True) for g in groups]
        )
        total = sum(int(t.loss_mask.sum()) for t in flat)
        self.optimizer.zero_grad()
        for start in range(0, len(flat), self.micro_size):
            part = slice(start, start + self.micro_size)
            self._backward(flat[part], advantages[part], total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _backward(self, part: list[Trajectory], advantages: np.ndarray, total: int) -> None:
        longest = max(t.token_ids.size for t in part)
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        attention = torch.zeros_like(ids)
        mask = torch.zeros(len(part), longest)
        rollout = torch.zeros(len(part), longest)
        for row, t in enumerate(part):
            size = t.token_ids.size
            ids[row, :size] = torch.from_numpy(t.token_ids)
            attention[row, :size] = 1
            mask[row, :size] = torch.from_numpy(t.loss_mask)
            rollout[row, :size] = torch.from_numpy(t.rollout_logprobs)
        logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        distribution = torch.log_softmax(logits[:, :-1].float(), -1)
        logprobs = distribution.gather(-1, ids[:, 1:, None]).squeeze(-1)
        entropy = -(distribution.detach().exp() * distribution.detach()).sum(-1)
        (entropy * mask[:, 1:]).sum().item()
        ratio = (logprobs - rollout[:, 1:]).exp().clamp(max=MAX_RATIO)
        advantage = torch.from_numpy(advantages).float()[:, None]
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        losses = torch.maximum(-advantage * ratio, -advantage * clipped)
        (losses * mask[:, 1:]).sum().div(total).backward()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    folder = Path(tempfile.mkdtemp()) / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    actor = ActorConfig(
        ppo_mini_batch_size=args.groups,
        ppo_max_token_len=args.max_tokens,
        optim=OptimConfig(lr=args.lr),
        num_threads=args.threads,
        device="cpu",
    )
    ours = TrainerCore(Config(actor=actor), folder)
    info = ours.start(None)
    plain = PlainTrainer(folder, args)
    groups = make_groups(args)
    request = TrainRequest(
        step=1, policy_version=0, payloads=(), mini_batch_groups=args.groups, num_tokens=0
    )
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(args.turns + 1):
        for name, call in (
            ("ours", lambda: ours.train_step(request, groups)),
            ("plain", lambda: plain.train_step(groups)),
        ):
            started = time.process_time()
            call()
            if turn:
                times[name].append(time.process_time() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = {name: min(values) for name, values in times.items()}
    print(
        f"{info.num_parameters / 1e6:.2f} M parameters, {args.groups * args.group_size} sequences: "
        f"ours {medians['ours']:.3f} s (best {best['ours']:.3f}), "
        f"plain {medians['plain']:.3f} s (best {best['plain']:.3f}), "
        f"ratio {medians['plain'] / medians['ours']:.2f}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time of a trainer step")
    for name, default in {
        "groups": 16,
        "group-size": 8,
        "prompt": 16,
        "min-response": 4,
        "max-response": 48,
        "vocabulary": 512,
        "hidden": 128,
        "layers": 4,
        "max-tokens": 16384,
        "plain-micro-batch": 16,
        "threads": 1,
        "turns": 7,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
