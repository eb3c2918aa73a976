"""The stages that the watchdog covers, and what counts as work and as progress in each.

A stage's limit is that of its own deadlines plus a grace: the deadlines act first, and the watchdog
catches what they missed.
"""

from collections.abc import Callable

from freewheel.config.sections import Config
from freewheel.control.checkpointing import Checkpointer
from freewheel.control.ledger import Ledger
from freewheel.control.pool import NO_VERSION, Pool
from freewheel.control.rollouter import Rollouter
from freewheel.control.train_loop import TrainLoop
from freewheel.control.trainer_keeper import TrainerKeeper
from freewheel.control.validation import Validator
from freewheel.control.watchdog import Stage
from freewheel.control.weight_store import WeightStore
from freewheel.control.worker_pool import WorkerPool


def make_stages(
    config: Config,
    *,
    ledger: Ledger,
    pool: Pool,
    store: WeightStore,
    workers: WorkerPool,
    rollouter: Rollouter,
    train: TrainLoop,
    trainer: TrainerKeeper,
    validator: Validator,
    checkpointer: Checkpointer,
    is_ending: Callable[[], bool],
) -> list[Stage]:
    """All stages of a run."""
    health, grace_s = config.health, 2 * config.health.grace_s

    def processes() -> object:
        replicas = tuple(slot.incarnation for slot in pool.slots.values())
        return replicas, workers.num_started

    def versions() -> object:
        return pool.latest, tuple((s.version, s.updating_to) for s in pool.slots.values())

    def validation() -> object:
        run = validator.current
        return validator.num_recorded, None if run is None else (run.step, run.num_moves)

    def is_validating() -> bool:
        return validator.current is not None and not validator.current.is_rejoining

    def everything() -> object:
        return (
            processes(),
            versions(),
            validation(),
            ledger.num_moves,
            train.state.step,
            trainer.num_moves,
            len(checkpointer.saved_steps),
        )

    def is_syncing() -> bool:
        loading = any(s.updating_to is not None for s in pool.slots.values())
        return loading or any(pool.due_update(i) is not None for i in pool.slots)

    def serves() -> bool:
        return any(slot.version != NO_VERSION for slot in pool.slots.values())

    return [
        Stage(
            name="start-up",
            limit_s=health.startup_timeout_s + grace_s,
            setting="health.startup_timeout_s",
            has_work=lambda: store.latest is None or workers.datasets is None,
            progress=processes,
        ),
        Stage(
            name="rollout",
            limit_s=config.rollout.timeout_s + health.grace_s + grace_s,
            setting="rollout.timeout_s",
            has_work=lambda: rollouter.num_running > 0 and serves(),
            progress=lambda: (ledger.num_moves, processes()),
            recover=workers.replace_all,
        ),
        Stage(
            name="training",
            limit_s=health.train_step_timeout_s + grace_s,
            setting="health.train_step_timeout_s",
            has_work=lambda: train.is_training and not trainer.is_replacing,
            progress=lambda: train.state.step,
        ),
        Stage(
            name="the trainer's replacement",
            limit_s=health.startup_timeout_s + health.train_step_timeout_s + grace_s,
            setting="health.startup_timeout_s + health.train_step_timeout_s",
            has_work=lambda: trainer.is_replacing,
            progress=lambda: trainer.num_moves,
        ),
        Stage(
            name="weight sync",
            limit_s=health.sync_timeout_s + grace_s,
            setting="health.sync_timeout_s",
            has_work=is_syncing,
            progress=versions,
        ),
        Stage(
            name="validation",
            limit_s=config.validation.timeout_s + grace_s,
            setting="validation.timeout_s",
            has_work=is_validating,
            progress=validation,
            recover=workers.replace_all,
        ),
        Stage(
            name="checkpoint",
            limit_s=health.checkpoint_timeout_s + grace_s,
            setting="health.checkpoint_timeout_s",
            has_work=lambda: checkpointer.num_copies > 0 and not trainer.is_replacing,
            progress=lambda: len(checkpointer.saved_steps),
        ),
        Stage(
            name="the run",
            limit_s=health.stall_timeout_s,
            setting="health.stall_timeout_s",
            has_work=lambda: not is_ending(),
            progress=everything,
        ),
    ]
