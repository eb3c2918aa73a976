"""The roles of a run, built and passed to each other. The controller runs their loops."""

from collections.abc import Callable

from freewheel.config.sections import Config
from freewheel.control.checkpointing import Checkpointer, CutState
from freewheel.control.feed import Feed
from freewheel.control.group_runner import GroupRunner
from freewheel.control.ledger import Ledger
from freewheel.control.pool import Pool
from freewheel.control.replica_loop import ReplicaLoop
from freewheel.control.restarts import Restarts
from freewheel.control.rollouter import Admission, Rollouter
from freewheel.control.stages import make_stages
from freewheel.control.staleness import StalenessBound
from freewheel.control.train_loop import TrainLoop
from freewheel.control.trainer_keeper import TrainerKeeper
from freewheel.control.validation import Validator
from freewheel.control.waits import Signal, WaitTable
from freewheel.control.weight_store import WeightStore
from freewheel.control.worker_pool import WorkerPool
from freewheel.protocols import Backend, CheckpointStore, Recorder, Watched
from freewheel.types import Weights


class Roles:
    """One of each role, many of replicas.

    Args:
        config: checked configuration.
        backend: makes the worker processes, or fakes.
        recorder: takes the run's records.
        checkpoints: where checkpoints go.
        now_s: seconds since the run's first start.
        collect: takes the control plane's part of a cut.
        is_ending: whether the run's end has begun.
    """

    def __init__(
        self,
        config: Config,
        *,
        backend: Backend,
        recorder: Recorder,
        checkpoints: CheckpointStore,
        now_s: Callable[[], float],
        collect: Callable[[], CutState],
        is_ending: Callable[[], bool],
    ) -> None:
        changed, health = Signal(), config.health
        waits = self.waits = WaitTable()
        self.store = WeightStore()
        self.restarts = Restarts(health, recorder)
        self.staleness = StalenessBound(
            max_open=config.max_slots,
            max_staleness=config.async_training.staleness_bound,
        )
        self.ledger = Ledger(
            group_size=config.rollout.n,
            max_prompt_failures=health.max_prompt_failures,
            recorder=recorder,
            now_s=now_s,
            changed=changed,
        )
        dedicated = config.validation_mode == "dedicated" and bool(config.data.val_files)
        self.pool = Pool(
            num_shared=config.rollout.replicas,
            num_dedicated=config.validation.dedicated_replicas if dedicated else 0,
            capacity=config.async_training.concurrent_samples_per_replica,
            partial_rollout=config.async_training.partial_rollout,
            changed=changed,
            now_s=now_s,
        )
        self.workers = WorkerPool(
            config.rollout.num_workers,
            backend=backend,
            restarts=self.restarts,
            health=health,
            waits=waits,
            recorder=recorder,
            changed=changed,
        )
        self.trainer = TrainerKeeper(
            backend.trainer,
            health=health,
            restarts=self.restarts,
            waits=waits,
            recorder=recorder,
            on_republished=self._take_renewed,
        )
        self.replicas = [
            ReplicaLoop(
                replica_id,
                backend=backend,
                pool=self.pool,
                store=self.store,
                trainer=self.trainer,
                restarts=self.restarts,
                health=health,
                waits=waits,
                recorder=recorder,
                give_up=lambda version, reason: self.validator.give_up(version, reason),
            )
            for replica_id in self.pool.slots
        ]
        runner = GroupRunner(
            pool=self.pool,
            workers=self.workers,
            health=health,
            waits=waits,
            recorder=recorder,
            on_late=self.ledger.ignore_late,
        )
        self.feed = Feed(config, workers=self.workers, waits=waits)
        self.admission = Admission(
            config, ledger=self.ledger, pool=self.pool, staleness=self.staleness, changed=changed
        )
        self.rollouter = Rollouter(
            config,
            feed=self.feed,
            admission=self.admission,
            ledger=self.ledger,
            pool=self.pool,
            runner=runner,
            waits=waits,
        )
        self.validator = Validator(
            config,
            pool=self.pool,
            store=self.store,
            workers=self.workers,
            runner=runner,
            admission=self.admission,
            waits=waits,
            recorder=recorder,
            now_s=now_s,
            changed=changed,
        )
        self.checkpointer = Checkpointer(
            config,
            trainer=self.trainer,
            store=checkpoints,
            collect=collect,
            weights=self.store,
            waits=waits,
            recorder=recorder,
        )
        self.train = TrainLoop(
            config,
            trainer=self.trainer,
            ledger=self.ledger,
            pool=self.pool,
            store=self.store,
            staleness=self.staleness,
            admission=self.admission,
            rollouter=self.rollouter,
            cuts=self.checkpointer,
            validations=self.validator,
            waits=waits,
            recorder=recorder,
            run_time_s=now_s,
        )

        self.stages = make_stages(
            config,
            ledger=self.ledger,
            pool=self.pool,
            store=self.store,
            workers=self.workers,
            restarts=self.restarts,
            train=self.train,
            trainer=self.trainer,
            validator=self.validator,
            checkpointer=self.checkpointer,
            is_ending=is_ending,
        )

    def _take_renewed(self, weights: Weights) -> None:
        """Whoever found the first ones lost may go on."""
        self.store.renew(weights)
        self.pool.changed.notify()

    def processes(self) -> dict[str, Watched]:
        """The worker processes that are up, by name."""
        # It has moved when it is up.
        ranks = self.trainer.processes if self.trainer.num_moves else ()
        workers = {f"rollout-worker-{s.worker_id}": s.worker for s in self.workers.slots}
        replicas = {f"replica-{s.replica_id}": s.replica for s in self.pool.slots.values()}
        up = {name: process for name, process in {**workers, **replicas}.items() if process}
        return {**up, **{f"trainer-{rank}": process for rank, process in enumerate(ranks)}}
