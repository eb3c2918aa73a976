"""Combinations of settings that cannot work, found before any process starts.

What a single key allows stands in its type. Each check is a plain function from the configuration
to lines, each of which names the keys concerned, their values, and what is allowed.
"""

import math
import re
import string
from collections.abc import Callable, Iterator
from typing import Any, Literal

from freewheel.config.load import raise_problems, show
from freewheel.config.schedule import configured_steps, warm_up_problem
from freewheel.config.sections import Config
from freewheel.errors import FailureClass

Purpose = Literal["train", "validate"]

BUILTIN_REWARDS = ("exact_match", "numeric_match", "regex", "reasoning_gym")
BUILTIN_ENVIRONMENTS = ("single_turn",)
RUN_DIR_FIELDS = ("experiment_name", "time")

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_DETERMINISTIC_FAILURES = (FailureClass.OVER_LONG_PROMPT, FailureClass.BAD_PROMPT)


def check_config(config: Config, *, purpose: Purpose = "train") -> None:
    """Refuse impossible combinations, all of them at once.

    Args:
        config: what `load_config` gave.
        purpose: `validate` needs held-out prompts, and nothing that only training needs.

    Raises:
        ConfigError: with a line for each problem.
    """
    problems = list(_check_required(config, purpose))
    for check in _CHECKS:
        if purpose == "train" or check not in _TRAINING_CHECKS:
            problems += check(config)
    raise_problems(problems)


def greedy_reason(*, temperature: float, top_k: int, min_p: float = 0.0) -> str | None:
    """Which setting makes sampling greedy, if one does: `temperature = 0`, ..."""
    if temperature == 0:
        return "temperature = 0"
    if top_k == 1:
        return "top_k = 1"
    return "min_p = 1" if min_p == 1 else None


def _values(config: Config, *names: str) -> str:
    """`key = value, key = value` of dotted keys."""
    parts: list[str] = []
    for name in names:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        parts.append(f"{name} = {show(value)}")
    return ", ".join(parts)


def _check_required(config: Config, purpose: Purpose) -> Iterator[str]:
    key = "train_files" if purpose == "train" else "val_files"
    if not getattr(config.data, key):
        yield f"data.{key} is not set: required, files or a task to take prompts from"
    if not config.model.path:
        yield "model.path is not set: required, the folder of the model to train"
    for name in ("train_files", "val_files"):
        files = getattr(config.data, name)
        if isinstance(files, tuple) and not all(files):
            yield f"{_values(config, f'data.{name}')}: an empty name in the list"
    if not config.data.prompt_key:
        yield 'data.prompt_key = "": the name of a column is required'


def _check_adapter(config: Config) -> Iterator[str]:
    targets = config.model.target_modules
    if config.model.lora_rank and (not targets or not all(targets)):
        names = _values(config, "model.target_modules", "model.lora_rank")
        yield f"{names}: an adapter needs layers; allowed: all-linear, or names such as [q_proj]"


def _check_groups(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.n == 1:
        names = _values(config, "rollout.n", "algorithm.adv_estimator")
        yield f"{names}: advantages are relative to the group, so rollout.n must be at least 2"
    if rollout.min_group_size > rollout.n:
        names = _values(config, "rollout.min_group_size", "rollout.n")
        yield f"{names}: no group has so many members; at most rollout.n"
    elif rollout.min_group_size == 1 and rollout.n > 1:
        names = _values(config, "rollout.min_group_size")
        yield f"{names}: a group of one has no advantage; allowed: 0 (all members) or at least 2"
    for failure in _DETERMINISTIC_FAILURES:
        if rollout.retries.get(failure, 0):
            value = rollout.retries[failure]
            yield f"rollout.retries.{failure} = {value}: it would fail the same way; allowed: 0"


def _check_sampling(config: Config) -> Iterator[str]:
    rollout, validation = config.rollout, config.validation
    reason = greedy_reason(
        temperature=rollout.temperature, top_k=rollout.top_k, min_p=rollout.min_p
    )
    if reason and rollout.n > 1:
        yield (
            f"rollout.{reason}, {_values(config, 'rollout.n')}: greedy sampling gives a group of "
            "equal responses, from which nothing is learnt"
        )
    reason = greedy_reason(temperature=validation.temperature, top_k=validation.top_k)
    if reason and validation.n > 1 and rollout.environment == "single_turn":
        yield (
            f"validation.{reason}, {_values(config, 'validation.n')}: greedy trials of a prompt "
            "are all equal; set validation.n = 1 or sample"
        )


def _check_user_code(config: Config) -> Iterator[str]:
    for key, builtin, what in (
        ("environment", BUILTIN_ENVIRONMENTS, "module:Class"),
        ("reward", BUILTIN_REWARDS, "module:function"),
    ):
        value = getattr(config.rollout, key)
        if value not in builtin and not _IMPORT_PATH.fullmatch(value):
            names = _values(config, f"rollout.{key}")
            yield f"{names}: allowed: one of {', '.join(builtin)}, or {what}"


def _check_engine(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.tensor_parallel_size > 1 and rollout.engine == "torch":
        names = _values(config, "rollout.tensor_parallel_size", "rollout.engine")
        yield f"{names}: the torch engine does not split a model; use engine vllm, or size 1"
    if not rollout.reset_prefix_cache and rollout.engine == "torch":
        names = _values(config, "rollout.reset_prefix_cache", "rollout.engine")
        yield f"{names}: the torch engine computes keys and values anew in any case"
    if rollout.weight_transfer == "nixl" and rollout.engine == "torch":
        names = _values(config, "rollout.weight_transfer", "rollout.engine")
        yield f"{names}: the torch engine takes weights from the object store"
    if rollout.weight_transfer == "nixl" and config.model.lora_rank:
        names = _values(config, "rollout.weight_transfer", "model.lora_rank")
        yield f"{names}: an adapter goes through the object store, to be merged by each replica"
    if rollout.device != "cpu":
        yield from _check_replica_gpus(config)


def _check_replica_gpus(config: Config) -> Iterator[str]:
    num_gpus, parallel = config.rollout.num_gpus, config.rollout.tensor_parallel_size
    if num_gpus > 1 and num_gpus != int(num_gpus):
        names = _values(config, "rollout.num_gpus")
        yield f"{names}: allowed: a share of one GPU, or a whole number of GPUs"
    if parallel > 1 and num_gpus < parallel:
        names = _values(config, "rollout.num_gpus", "rollout.tensor_parallel_size")
        yield f"{names}: a replica needs a GPU for each part of the model"
    if config.rollout.device == "cuda" and num_gpus == 0:
        names = _values(config, "rollout.device", "rollout.num_gpus")
        yield f"{names}: an engine on CUDA takes a GPU, or a share of one"


def _check_trainer(config: Config) -> Iterator[str]:
    actor, rollout = config.actor, config.rollout
    if actor.strategy == "single" and actor.world_size > 1:
        names = _values(config, "actor.strategy", "actor.world_size")
        yield f"{names}: one process is one rank; use strategy fsdp2, or world_size 1"
    if actor.world_size > actor.ppo_mini_batch_size * rollout.n:
        names = _values(config, "actor.world_size", "actor.ppo_mini_batch_size", "rollout.n")
        yield f"{names}: some ranks would get no sample of a mini-batch"
    longest = rollout.max_prompt_length + rollout.max_response_length
    if actor.ppo_max_token_len < longest:
        names = _values(
            config,
            "actor.ppo_max_token_len",
            "rollout.max_prompt_length",
            "rollout.max_response_length",
        )
        yield f"{names}: the longest sample ({longest} tokens) does not fit in a micro-batch"


def _check_mismatch(config: Config) -> Iterator[str]:
    limit, temperature = config.health.max_logprob_difference, config.rollout.temperature
    if limit is not None and temperature == 0:
        names = _values(config, "health.max_logprob_difference", "rollout.temperature")
        yield (
            f"{names}: greedy sampling has no distribution that engine and trainer could be "
            "compared on"
        )


def _check_schedule(config: Config) -> Iterator[str]:
    shape, steps = config.actor.optim.lr_scheduler_type, configured_steps(config)
    if shape != "constant" and steps is None and config.algorithm.filter_groups:
        names = _values(config, "actor.optim.lr_scheduler_type", "algorithm.filter_groups")
        yield (
            f"{names}: how many steps the epochs give is not known beforehand, and the schedule "
            "needs it; set trainer.total_training_steps"
        )
    problem = None if steps is None else warm_up_problem(config, steps)
    if problem is not None:
        yield problem


def _check_staleness(config: Config) -> Iterator[str]:
    training = config.async_training
    needed = math.ceil(training.staleness_threshold)
    if training.max_staleness is not None and training.max_staleness < needed:
        names = _values(
            config, "async_training.max_staleness", "async_training.staleness_threshold"
        )
        yield (
            f"{names}: rollouts may run {needed} versions ahead; max_staleness must be at least "
            f"{needed}, or null"
        )


def _check_validation(config: Config) -> Iterator[str]:
    if config.validation.share is not None and config.validation_mode != "parallel":
        names = _values(config, "validation.share")
        yield f"{names}, validation mode {config.validation_mode}: a share is for mode parallel"
    if config.validation.dedicated_replicas > 1 and config.validation_mode != "dedicated":
        names = _values(config, "validation.dedicated_replicas")
        yield f"{names}, validation mode {config.validation_mode}: they are for mode dedicated"
    beside = config.validation.mode in ("parallel", "dedicated")
    if beside and not config.async_training.parallel_validate_and_rollout:
        names = _values(config, "validation.mode", "async_training.parallel_validate_and_rollout")
        yield f"{names}: the two contradict each other; leave validation.mode unset, or exclusive"
    if not config.data.val_files:
        yield from _check_no_validation(config)


def _check_no_validation(config: Config) -> Iterator[str]:
    if config.trainer.test_freq:
        yield f"{_values(config, 'trainer.test_freq')}: data.val_files is not set"
    if config.validation.mode == "dedicated":
        yield f"{_values(config, 'validation.mode')}: data.val_files is not set"


def _check_deadlines(config: Config) -> Iterator[str]:
    limits = {
        "rollout.reward_timeout_s": config.rollout.reward_timeout_s,
        "rollout.timeout_s": config.rollout.timeout_s,
        "validation.timeout_s": config.validation.timeout_s,
    }
    trial = "rollout.timeout_s"
    if config.validation.trial_timeout_s is not None:
        trial = "validation.trial_timeout_s"
        limits[trial] = config.validation.trial_timeout_s
    ordered = [("rollout.reward_timeout_s", "rollout.timeout_s")]
    if config.data.val_files:
        ordered += [("rollout.reward_timeout_s", trial), (trial, "validation.timeout_s")]
    for inner, outer in dict.fromkeys(ordered):
        if limits[inner] > limits[outer]:
            yield (
                f"{inner} = {limits[inner]:g}, {outer} = {limits[outer]:g}: "
                f"{inner} must be at most {outer}"
            )
    yield from _check_watches(config)


def _check_watches(config: Config) -> Iterator[str]:
    """What watches others must leave them the time that their own limits give them."""
    health, longest_s = config.health, config.longest_move_s
    if health.stall_timeout_s is not None and health.stall_timeout_s < longest_s:
        names = _values(config, "health.stall_timeout_s")
        yield (
            f"{names}: the other limits allow {longest_s:g} s before anything moves "
            f"(health.*_timeout_s, rollout.timeout_s, 3 health.grace_s); at least that, or null"
        )
    if health.loop_blocked_s > health.loop_blocked_end_s:
        names = _values(config, "health.loop_blocked_s", "health.loop_blocked_end_s")
        yield f"{names}: the run would end before the block is reported; at most the latter"


def _check_run(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.seed < 0:
        yield f"{_values(config, 'trainer.seed')}: allowed: an integer, at least 0"
    if not trainer.run_dir:
        yield 'trainer.run_dir = "": a folder for the run is required'
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(trainer.run_dir)}
        unknown = fields - {None, *RUN_DIR_FIELDS}
    except ValueError as error:
        yield f"{_values(config, 'trainer.run_dir')}: {error}"
        return
    if unknown:
        known = ", ".join(f"{{{field}}}" for field in RUN_DIR_FIELDS)
        yield f"{_values(config, 'trainer.run_dir')}: filled in are {known} only"
    elif trainer.resume_mode == "auto" and "time" in fields:
        names = _values(config, "trainer.resume_mode", "trainer.run_dir")
        yield f"{names}: a folder with {{time}} is new each time, so nothing would be resumed"


def _check_length(config: Config) -> Iterator[str]:
    num_prompts, trainer = config.data.train_max_samples, config.trainer
    if not num_prompts or trainer.total_training_steps is not None:
        return
    if num_prompts * trainer.total_epochs < config.groups_per_step:
        names = _values(
            config,
            "data.train_max_samples",
            "trainer.total_epochs",
            "actor.ppo_mini_batch_size",
            "async_training.require_batches",
        )
        yield f"{names}: not enough prompts for one step of {config.groups_per_step} groups"


def _check_cluster(config: Config) -> Iterator[str]:
    ray = config.ray
    if ray.num_cpus is None:
        return
    if ray.address is not None:
        names = _values(config, "ray.address", "ray.num_cpus")
        yield f"{names}: num_cpus is for a cluster of our own; leave one of them unset"
    declared = declared_cpus(config)
    if ray.address is None and declared > ray.num_cpus + 1e-9:
        names = _values(config, "ray.num_cpus")
        yield f"{names}: the workers declare {declared:g} CPUs and could not all be placed"


def declared_cpus(config: Config) -> float:
    """CPUs that all workers of the run declare."""
    ray, replicas = config.ray, config.rollout.replicas
    if config.validation_mode == "dedicated":
        replicas += config.validation.dedicated_replicas
    return (
        replicas * ray.cpus_per_replica
        + config.actor.world_size * ray.cpus_per_trainer
        + config.rollout.num_workers * ray.cpus_per_worker
    )


_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _check_adapter,
    _check_groups,
    _check_sampling,
    _check_user_code,
    _check_engine,
    _check_trainer,
    _check_mismatch,
    _check_schedule,
    _check_staleness,
    _check_validation,
    _check_deadlines,
    _check_run,
    _check_length,
    _check_cluster,
)

_TRAINING_CHECKS = (_check_groups, _check_schedule, _check_length)
"""These concern what a validation alone does not do."""
