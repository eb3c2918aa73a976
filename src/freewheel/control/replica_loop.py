"""The life of one replica: start, take weights as they are due, be replaced when lost.

One such loop a replica, so that none waits for another's weight sync.
"""

import asyncio
from collections.abc import Callable

from freewheel.config.sections import HealthConfig
from freewheel.control.pool import Pool
from freewheel.control.restarts import Restarts
from freewheel.control.trainer_keeper import TrainerKeeper
from freewheel.control.waits import WaitTable, because
from freewheel.control.weight_store import WeightStore
from freewheel.errors import ReplicaLostError, StalledError, StartupError, WeightsLostError
from freewheel.protocols import Backend, Recorder, Replica
from freewheel.types import Weights


class ReplicaLoop:
    """Loop `replica-N`. Consumes: published versions. Produces: a replica that serves."""

    def __init__(
        self,
        replica_id: int,
        *,
        backend: Backend,
        pool: Pool,
        store: WeightStore,
        trainer: TrainerKeeper,
        restarts: Restarts,
        health: HealthConfig,
        waits: WaitTable,
        recorder: Recorder,
        give_up: Callable[[int, str], None],
    ) -> None:
        self.name = f"replica-{replica_id}"
        self._replica_id = replica_id
        self._backend = backend
        self._pool = pool
        self._store = store
        self._trainer = trainer
        self._restarts = restarts
        self._health = health
        self._waits = waits
        self._recorder = recorder
        self._give_up = give_up

    async def run(self) -> None:
        """Keep the replica alive and at the version that it should hold.

        Consumes: versions from the weight store, as the pool says they are due.
        Produces: a replica in the pool.
        Waits for: the process to start; a due update; the replica's own loading of weights.
        Unblocked by: train (publication), validate (pin, unpin), rollouts (leases given back).
        """
        while True:
            replica = self._backend.replica(self._replica_id)
            try:
                await self._start(replica)
                await self._serve(replica)
            except ReplicaLostError as lost:
                self._pool.down(self._replica_id, self._pool.slots[self._replica_id].incarnation)
                self._restarts.spend(self.name, lost)
            finally:
                replica.kill()

    async def _start(self, replica: Replica) -> None:
        limit_s = self._health.startup_timeout_s
        async with self._waits.limited(
            self.name,
            "its process and engine",
            held_by=(f"process of {self.name}",),
            note=lambda: replica.waiting_for,
            timeout_s=limit_s,
            otherwise=lambda: StartupError(
                f"{self.name} did not come up within {limit_s:g} s (health.startup_timeout_s)"
                f"{because(replica.waiting_for)}"
            ),
        ):
            await replica.start()
        self._restarts.came_up(self.name)
        self._pool.up(self._replica_id, replica)
        self._recorder.event("replica_up", replica=self._replica_id)

    async def _serve(self, replica: Replica) -> None:
        while True:
            version = await self._pool.changed.until(lambda: self._next_update(replica))
            self._pool.begin_update(self._replica_id, version)
            began_s = asyncio.get_running_loop().time()
            weights = self._store.get(version)
            try:
                await self._update(replica, weights)
            except WeightsLostError as lost:
                self._pool.cancel_update(self._replica_id)
                await self._renew(replica, weights, lost)
                continue
            if self._pool.slots[self._replica_id].replica is not replica:
                raise ReplicaLostError(f"{self.name} was reported lost while it loaded weights")
            self._pool.end_update(self._replica_id, version)
            self._recorder.event(
                "weights_activated",
                replica=self._replica_id,
                version=version,
                wall_s=round(asyncio.get_running_loop().time() - began_s, 6),
            )

    async def _renew(self, replica: Replica, weights: Weights, lost: WeightsLostError) -> None:
        """Have the weights published again; those that nobody can publish again are given up.

        Of the newest version that is not for long: the trainer is about to publish the next.
        """
        self._recorder.event("weights_lost", version=weights.version, reason=str(lost))
        version, latest = weights.version, self._store.latest
        if self._store.has(version) and self._store.get(version) is not weights:
            return  # published again meanwhile
        if latest is None or version != latest.version:
            self._give_up(version, str(lost))
        else:
            await self._trainer.renew(version, lost, waiter=self.name)
            await self._wait_for_others(replica, weights)

    async def _wait_for_others(self, replica: Replica, weights: Weights) -> None:
        """Wait until other weights are to be loaded than these, which are gone.

        Raises:
            StalledError: none were published in time.
            ReplicaLostError: the replica was reported lost meanwhile.
        """
        limit_s = self._health.sync_timeout_s + self._health.grace_s
        while True:
            num_replaced = self._trainer.num_replaced
            try:
                async with self._waits.limited(
                    self.name,
                    f"weights instead of those of version {weights.version}, which are gone",
                    held_by=("train",),
                    timeout_s=limit_s,
                    otherwise=lambda: StalledError(
                        f"{self.name}: the weights of version {weights.version} are gone, and no "
                        f"others were published within {limit_s:g} s (health.sync_timeout_s + "
                        "health.grace_s)"
                    ),
                ):
                    await self._pool.changed.until(lambda: self._has_others(replica, weights))
                    return
            except StalledError:
                # Another trainer has the whole limit for a publication again.
                if self._trainer.num_replaced == num_replaced and not self._trainer.is_replacing:
                    raise

    def _has_others(self, replica: Replica, weights: Weights) -> bool | None:
        is_due = self._next_update(replica) == weights.version
        return None if is_due and self._store.latest is weights else True

    def _next_update(self, replica: Replica) -> int | None:
        if self._pool.slots[self._replica_id].replica is not replica:
            raise ReplicaLostError(f"{self.name} was reported lost")
        return self._pool.due_update(self._replica_id)

    async def _update(self, replica: Replica, weights: Weights) -> None:
        limit_s, version = self._health.sync_timeout_s, weights.version
        async with self._waits.limited(
            self.name,
            f"weights of version {version}",
            held_by=(f"process of {self.name}",),
            timeout_s=limit_s,
            otherwise=lambda: ReplicaLostError(
                f"{self.name} did not load version {version} within {limit_s:g} s "
                "(health.sync_timeout_s)"
            ),
        ):
            await replica.update_weights(weights)
