"""AdamW and its learning rate, by optimizer steps."""

import math

import torch
from torch.distributed.tensor import DTensor

from freewheel.config.schedule import configured_steps, optimizer_steps
from freewheel.config.sections import Config, OptimConfig
from freewheel.errors import ConfigError


def make_optimizer(model: torch.nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; vectors (norms, biases) do not decay.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    sharded = any(isinstance(p, DTensor) for p in trainable)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        # One kernel for all tensors; over sharded ones only the per-list form is general.
        fused=not sharded,
        foreach=sharded,
    )


def total_optimizer_steps(config: Config) -> int | None:
    """Optimizer steps of the schedule if a key says so; see `config.schedule`."""
    steps = configured_steps(config)
    return None if steps is None else optimizer_steps(config, steps)


def check_schedule(config: OptimConfig, total_steps: int | None) -> None:
    """Refuse a schedule that has no end to run to.

    Raises:
        ConfigError: `linear` or `cosine` without a number of optimizer steps.
    """
    if config.lr_scheduler_type != "constant" and total_steps is None:
        raise ConfigError(
            f"actor.optim.lr_scheduler_type={config.lr_scheduler_type} needs the number of steps: "
            "set trainer.total_training_steps or actor.optim.total_training_steps"
        )


def learning_rate(config: OptimConfig, step: int, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up reaches `lr` at step `lr_warmup_steps - 1` (the first step already moves); then
    constant, or linear or cosine towards `min_lr_ratio * lr`, which step `total_steps` would have.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_scheduler_type == "constant" or total_steps is None:
        return config.lr
    length = max(1, total_steps - config.lr_warmup_steps)
    progress = min(1.0, (step - config.lr_warmup_steps) / length)
    left = 1 - progress
    if config.lr_scheduler_type == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use this learning rate from now on."""
    for group in optimizer.param_groups:
        group["lr"] = value
