"""The stages that the watchdog covers, and what counts as work and as progress in each.

A stage's limit is that of its own deadlines plus a grace: the deadlines act first, and the watchdog
catches what they missed. For each stage must hold, whatever the settings: while it has work, some
deadline within the limit either moves its progress, or ends its work, or ends the run. So a stage
that waits for another one has no work: what it waits for is that one's.
"""

from collections.abc import Callable

from freewheel.config.sections import Config, HealthConfig
from freewheel.control.checkpointing import Checkpointer
from freewheel.control.ledger import Ledger
from freewheel.control.pool import Pool
from freewheel.control.restarts import Restarts
from freewheel.control.train_loop import TrainLoop
from freewheel.control.trainer_keeper import TrainerKeeper
from freewheel.control.validation import Validator
from freewheel.control.watchdog import Stage
from freewheel.control.weight_store import WeightStore
from freewheel.control.worker_pool import WorkerPool
from freewheel.types import Purpose


def make_stages(
    config: Config,
    *,
    ledger: Ledger,
    pool: Pool,
    store: WeightStore,
    workers: WorkerPool,
    restarts: Restarts,
    train: TrainLoop,
    trainer: TrainerKeeper,
    validator: Validator,
    checkpointer: Checkpointer,
    is_ending: Callable[[], bool],
) -> list[Stage]:
    """All stages of a run."""
    health, grace_s = config.health, 2 * config.health.grace_s
    replacement_s, replacement_setting = _replacement_limit(health)

    def processes() -> object:
        replicas = tuple(slot.incarnation for slot in pool.slots.values())
        # Each loss counts, too: the replacement has the whole start-up limit again.
        return replicas, workers.num_started, restarts.count

    def versions() -> object:
        return pool.latest, tuple((s.version, s.updating_to) for s in pool.slots.values())

    def validation() -> object:
        run = validator.current
        return validator.num_recorded, None if run is None else (run.step, run.num_moves)

    def trainers() -> object:
        # A replacement begins everything anew, and may be over between two looks.
        return trainer.num_moves, restarts.count

    def writes() -> object:
        return checkpointer.num_moves, trainers()

    def everything() -> object:
        return (
            processes(),
            versions(),
            validation(),
            ledger.num_moves,
            train.state.step,
            train.is_training,
            writes(),
            checkpointer.num_copies,
        )

    def is_rolling_out() -> bool:
        # Not the groups under way: those that wait for a replica (an exclusive validation has them
        # all, or the lost ones are starting) or for a rollout worker wait for another stage.
        return pool.num_leases(Purpose.TRAINING) > 0 and workers.num_serving > 0

    def is_validating() -> bool:
        # Not while it waits for rollouts to drain (they are the rollout stage's), or for a replica
        # to start and load its version.
        run = validator.current
        return run is not None and run.has_begun

    return [
        Stage(
            name="start-up",
            # The trainer starts, then publishes.
            limit_s=health.startup_timeout_s + health.sync_timeout_s + grace_s,
            setting="health.startup_timeout_s + health.sync_timeout_s",
            has_work=lambda: store.latest is None or workers.datasets is None,
            progress=lambda: (processes(), trainers()),
        ),
        Stage(
            name="rollout",
            limit_s=config.rollout.timeout_s + health.grace_s + grace_s,
            setting="rollout.timeout_s",
            has_work=is_rolling_out,
            progress=lambda: (ledger.num_moves, processes()),
            recover=workers.replace_all,
        ),
        Stage(
            name="training",
            limit_s=health.train_step_timeout_s + grace_s,
            setting="health.train_step_timeout_s",
            has_work=lambda: train.is_training and not trainer.is_replacing,
            progress=lambda: (train.state.step, trainers()),
        ),
        Stage(
            name="the trainer's replacement",
            limit_s=replacement_s + grace_s,
            setting=replacement_setting,
            has_work=lambda: trainer.is_replacing,
            progress=writes,
        ),
        Stage(
            name="weight sync",
            limit_s=health.sync_timeout_s + grace_s,
            setting="health.sync_timeout_s",
            # Lost weights may have to be published again by the trainer's replacement.
            has_work=lambda: pool.is_syncing and not trainer.is_replacing,
            # A load that failed begins anew, and may do so between two looks.
            progress=lambda: (versions(), pool.num_updates),
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
            # A copy, then its writing.
            limit_s=2 * health.checkpoint_timeout_s + grace_s,
            setting="2 * health.checkpoint_timeout_s",
            has_work=lambda: (
                checkpointer.num_copies > 0
                and checkpointer.overdue is None
                and not trainer.is_replacing
            ),
            progress=writes,
        ),
        Stage(
            name="the run",
            limit_s=config.stall_timeout_s,
            setting="health.stall_timeout_s",
            has_work=lambda: not is_ending(),
            progress=everything,
        ),
    ]


def _replacement_limit(health: HealthConfig) -> tuple[float, str]:
    """The longest that a replacement may go without a move, in seconds, and by which keys.

    It waits for a commit to end, starts, trains again, copies again, publishes again.
    """
    return max(
        (
            health.startup_timeout_s + health.train_step_timeout_s,
            "health.startup_timeout_s + health.train_step_timeout_s",
        ),
        (health.checkpoint_timeout_s, "health.checkpoint_timeout_s"),
        (health.sync_timeout_s, "health.sync_timeout_s"),
    )
