"""The plan of a run before it starts: processes, slots, the staleness bound, what is due when."""

from dataclasses import dataclass
from typing import Literal

from freewheel.config import Config
from freewheel.config.checks import declared_cpus
from freewheel.config.schedule import steps_of_epochs
from freewheel.run_folder import resolve_run_dir

Rows = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """Processes of one role; CPUs and GPUs of each. GPUs count where the cluster has some."""

    role: str
    count: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a configuration comes to.

    Attributes:
        processes: all workers, by role.
        num_cpus: CPUs that the workers declare together.
        num_gpus: GPUs that they take together, where the cluster has some.
        total_steps: trainer steps, None when the number of prompts is not known. `is_exact` says
            whether failed and filtered groups can change it.
        sections: everything in words, a title and (label, text) rows each.
        warnings: what will work, but hardly as meant.
    """

    processes: tuple[ProcessPlan, ...]
    num_cpus: float
    num_gpus: float
    total_steps: int | None
    is_exact: bool
    sections: tuple[tuple[str, Rows], ...]
    warnings: tuple[str, ...]


def build_plan(
    config: Config, *, num_train_prompts: int | None = None, num_val_prompts: int | None = None
) -> Plan:
    """Work out the plan.

    Args:
        config: checked.
        num_train_prompts: training prompts, None if unknown.
        num_val_prompts: held-out prompts, None if unknown.
    """
    processes = _processes(config)
    total = _total_steps(config, num_train_prompts)
    return Plan(
        processes=processes,
        num_cpus=declared_cpus(config),
        num_gpus=sum(process.count * process.num_gpus for process in processes),
        total_steps=total,
        is_exact=config.trainer.total_training_steps is not None,
        sections=(
            ("processes", _process_rows(config, processes)),
            ("asynchrony", _asynchrony_rows(config)),
            ("run", _run_rows(config, num_train_prompts, total)),
            ("due", _due_rows(config, num_val_prompts, total)),
            ("deadlines", _deadline_rows(config)),
            ("files", _file_rows(config)),
        ),
        warnings=tuple(_warnings(config)),
    )


def render_plan(plan: Plan) -> str:
    """The plan as plain text."""
    lines: list[str] = []
    for title, rows in plan.sections:
        lines.append(title)
        width = max(len(label) for label, _ in rows)
        lines += [f"  {label:<{width}}  {text}" for label, text in rows]
    return "\n".join(lines) + "\n"


def _gpus(device: Literal["auto", "cpu", "cuda"], num_gpus: float) -> float:
    return 0.0 if device == "cpu" else num_gpus


def _processes(config: Config) -> tuple[ProcessPlan, ...]:
    rollout, ray = config.rollout, config.ray
    replica_gpus = _gpus(rollout.device, rollout.num_gpus)
    groups = [("rollout replica", rollout.replicas, ray.cpus_per_replica, replica_gpus)]
    if config.validation_mode == "dedicated":
        count = config.validation.dedicated_replicas
        groups.append(("validation replica", count, ray.cpus_per_replica, replica_gpus))
    trainer_gpus = _gpus(config.actor.device, config.actor.num_gpus)
    groups.append(("trainer rank", config.actor.world_size, ray.cpus_per_trainer, trainer_gpus))
    groups.append(("rollout worker", rollout.num_workers, ray.cpus_per_worker, 0.0))
    return tuple(
        ProcessPlan(role=role, count=count, num_cpus=cpus, num_gpus=gpus)
        for role, count, cpus, gpus in groups
    )


def _process_rows(config: Config, processes: tuple[ProcessPlan, ...]) -> Rows:
    rows: list[tuple[str, str]] = []
    for process in processes:
        gpus = f", {process.num_gpus:g} GPU" if process.num_gpus else ""
        each = " each" if process.count > 1 else ""
        what = _role_text(config, process.role)
        rows.append(
            (f"{process.count} x {process.role}", f"{process.num_cpus:g} CPU{gpus}{each}{what}")
        )
    total = f"{declared_cpus(config):g} CPU"
    num_gpus = sum(process.count * process.num_gpus for process in processes)
    if num_gpus:
        sure = config.rollout.device == config.actor.device == "cuda"
        total += f", {num_gpus:g} GPU" + ("" if sure else " where the cluster has some, else none")
    where = config.ray.address or "a cluster of our own, on this machine"
    return (*rows, ("together", f"{total}; Ray: {where}"))


def _role_text(config: Config, role: str) -> str:
    if "replica" in role:
        parallel = config.rollout.tensor_parallel_size
        split = f", tensor parallel {parallel}" if parallel > 1 else ""
        return f"; engine {config.rollout.engine}{split}"
    if role == "trainer rank":
        return f"; {config.actor.strategy}, {config.actor.dtype}"
    return f"; environment {config.rollout.environment}, reward {config.rollout.reward}"


def _asynchrony_rows(config: Config) -> Rows:
    training, actor = config.async_training, config.actor
    threshold = training.staleness_threshold
    bound = training.staleness_bound
    versions = "version" if bound == 1 else "versions"
    return (
        ("mode", _mode_text(config)),
        (
            "groups per step",
            f"{config.groups_per_step} = require_batches {training.require_batches} x "
            f"ppo_mini_batch_size {actor.ppo_mini_batch_size}; "
            f"{config.groups_per_step * config.rollout.n} samples",
        ),
        (
            "groups per version",
            f"{config.groups_per_version} = {config.groups_per_step} x "
            f"trigger_parameter_sync_step {training.trigger_parameter_sync_step}",
        ),
        (
            "slots",
            f"{config.max_slots} = (1 + staleness_threshold {threshold:g}) x "
            f"{config.groups_per_version}: most groups started and not yet trained",
        ),
        (
            "staleness bound",
            f"{bound} {versions}"
            + (
                f" = staleness_threshold {threshold:g}, rounded up"
                if training.max_staleness is None
                else " = max_staleness"
            ),
        ),
        (
            "in flight at once",
            f"{training.concurrent_samples_per_replica * config.rollout.replicas} groups = "
            f"{config.rollout.replicas} replicas x concurrent_samples_per_replica "
            f"{training.concurrent_samples_per_replica}, within the slots",
        ),
    )


def _mode_text(config: Config) -> str:
    training = config.async_training
    if training.staleness_threshold > 0:
        partial = "with" if training.partial_rollout else "without"
        return f"asynchronous with stale samples, {partial} partial rollouts"
    if training.trigger_parameter_sync_step > 1 or training.require_batches > 1:
        return "stream off-policy: no stale samples"
    return "on-policy"


def _total_steps(config: Config, num_prompts: int | None) -> int | None:
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    if num_prompts is None:
        return None
    return steps_of_epochs(config, num_prompts)


def _run_rows(config: Config, num_prompts: int | None, total: int | None) -> Rows:
    prompts = "unknown number of" if num_prompts is None else str(num_prompts)
    rows = [("training prompts", f"{prompts} prompts, {config.rollout.n} rollouts of each")]
    if config.trainer.total_training_steps is not None:
        text = f"{total}"
        if num_prompts:
            epochs = config.trainer.total_training_steps * config.groups_per_step / num_prompts
            text += f" (about {epochs:.2g} epochs, if no group is filtered or fails)"
    elif total is None:
        text = f"as {config.trainer.total_epochs} epochs give"
    else:
        text = (
            f"at most {total} = {num_prompts} prompts x {config.trainer.total_epochs} epochs / "
            f"{config.groups_per_step} groups, rounded up; fewer if groups are filtered or fail"
        )
    rows.append(("trainer steps", text))
    optim = config.actor.optim
    rows.append(
        (
            "learning rate",
            f"{optim.lr:g}, {optim.lr_scheduler_type}, {optim.lr_warmup_steps} steps of warm-up",
        )
    )
    return tuple(rows)


def _due_rows(config: Config, num_val_prompts: int | None, total: int | None) -> Rows:
    trainer = config.trainer
    sync = config.async_training.trigger_parameter_sync_step
    return (
        ("weights published", _every(sync, "step", total, at_end=True)),
        (
            "checkpoints",
            f"{_every(trainer.save_freq, 'step', total, at_end=True)}; the newest "
            f"{config.checkpoint.keep} are kept",
        ),
        ("validations", _validation_text(config, num_val_prompts, total)),
    )


def _every(freq: int, unit: str, total: int | None, *, at_end: bool) -> str:
    if not freq:
        return "at the end" if at_end else "never"
    each = f"after every {unit}" if freq == 1 else f"every {freq} {unit}s"
    if total is None:
        return f"{each}, and at the end" if at_end else each
    count = total // freq + int(at_end and total % freq > 0)
    return f"{each}{', and at the end' if at_end and total % freq else ''} ({count} in all)"


def _validation_text(config: Config, num_prompts: int | None, total: int | None) -> str:
    if not config.data.val_files:
        return "none: data.val_files is not set"
    trainer, validation = config.trainer, config.validation
    when: list[str] = []
    if trainer.val_before_train:
        when.append("version 0 while training starts")
    if trainer.test_freq or trainer.val_at_end:
        when.append(_every(trainer.test_freq, "step", total, at_end=trainer.val_at_end))
    prompts = "unknown number of" if num_prompts is None else str(num_prompts)
    size = f"{prompts} prompts x {validation.n} trials"
    return f"{'; '.join(when) or 'never'}; mode {config.validation_mode}; {size}"


def _deadline_rows(config: Config) -> Rows:
    rollout, health = config.rollout, config.health
    return (
        (
            "rollout",
            f"{rollout.timeout_s:g} s, of it at most {rollout.reward_timeout_s:g} s for the reward",
        ),
        (
            "validation",
            f"{config.validation.timeout_s:g} s, {config.trial_timeout_s:g} s for each trial",
        ),
        (
            "stages",
            f"start-up {health.startup_timeout_s:g} s, trainer step "
            f"{health.train_step_timeout_s:g} s, weight sync {health.sync_timeout_s:g} s, "
            f"checkpoint {health.checkpoint_timeout_s:g} s, stop {health.shutdown_timeout_s:g} s",
        ),
    )


def _file_rows(config: Config) -> Rows:
    rows = [
        ("run folder", str(resolve_run_dir(config))),
        ("model", config.model.path),
        ("training data", _names(config.data.train_files)),
    ]
    if config.data.val_files:
        rows.append(("held-out data", _names(config.data.val_files)))
    rows.append(("loggers", ", ".join(config.logging.loggers) or "none"))
    return tuple(rows)


def _names(files: str | tuple[str, ...]) -> str:
    return files if isinstance(files, str) else ", ".join(files)


def _warnings(config: Config) -> list[str]:
    rollout, training = config.rollout, config.async_training
    warnings: list[str] = []
    if config.max_slots < rollout.replicas:
        warnings.append(
            f"{config.max_slots} slots for {rollout.replicas} replicas: some replicas never work"
        )
    requests = min(training.concurrent_samples_per_replica, config.max_slots) * rollout.n
    if requests > 2 * rollout.max_num_seqs:
        warnings.append(
            f"up to {requests} requests on a replica that decodes rollout.max_num_seqs = "
            f"{rollout.max_num_seqs} at once: most of them wait in it, under their deadlines"
        )
    if config.trainer.test_freq and config.trainer.test_freq < training.trigger_parameter_sync_step:
        warnings.append(
            "trainer.test_freq is below async_training.trigger_parameter_sync_step: the same "
            "version is validated more than once"
        )
    return warnings
