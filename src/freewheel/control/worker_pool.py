"""The rollout workers: started, given work, replaced when lost."""

import asyncio
from dataclasses import dataclass

from freewheel.config.sections import HealthConfig
from freewheel.control.restarts import Restarts
from freewheel.control.waits import Signal, WaitTable, because
from freewheel.errors import DataError, RolloutWorkerLostError, StartupError
from freewheel.protocols import Backend, Recorder, RolloutWorker
from freewheel.types import DatasetInfo, Split

_FILES = {Split.TRAIN: "data.train_files", Split.VALIDATION: "data.val_files"}


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerSlot:
    """One rollout worker as the control plane sees it. `worker` is None while there is none.

    `retiring` is why it gets no new groups, empty if it does; `lost_by` why the last one was lost.
    """

    worker_id: int
    worker: RolloutWorker | None = None
    num_calls: int = 0
    retiring: str = ""
    lost_by: str = ""


class WorkerPool:
    """All rollout workers of a run; each has a loop of its own (`run_worker`)."""

    def __init__(
        self,
        num_workers: int,
        *,
        backend: Backend,
        restarts: Restarts,
        health: HealthConfig,
        waits: WaitTable,
        recorder: Recorder,
        changed: Signal,
    ) -> None:
        self.changed = changed
        self.slots = [WorkerSlot(worker_id=i) for i in range(num_workers)]
        self.datasets: dict[Split, DatasetInfo] | None = None
        self.num_started = 0
        self._backend = backend
        self._restarts = restarts
        self._health = health
        self._waits = waits
        self._recorder = recorder

    async def run_worker(self, worker_id: int) -> None:
        """Keep one worker alive.

        Consumes: reports of loss.
        Produces: a worker that takes work.
        Waits for: the process to start; then a report that it is lost.
        Unblocked by: rollouts, validate and feed, which report a worker that fails them.
        """
        slot = self.slots[worker_id]
        while True:
            worker = self._backend.rollout_worker(worker_id)
            try:
                self._check_datasets(worker_id, await self._start(worker))
                await self._serve_until_lost(slot, worker)
            except RolloutWorkerLostError as lost:
                slot.worker = None
                self._restarts.spend(f"rollout-worker-{worker_id}", lost)
            finally:
                worker.kill()

    async def _serve_until_lost(self, slot: WorkerSlot, worker: RolloutWorker) -> None:
        self._restarts.came_up(f"rollout-worker-{slot.worker_id}")
        slot.worker = worker
        slot.num_calls = 0
        slot.retiring = ""
        self.num_started += 1
        self._recorder.event("rollout_worker_up", worker=slot.worker_id)
        self.changed.notify()
        await self.changed.until(lambda: None if slot.worker is worker else True)
        raise RolloutWorkerLostError(f"rollout worker {slot.worker_id} is lost: {slot.lost_by}")

    async def _start(self, worker: RolloutWorker) -> dict[Split, DatasetInfo]:
        limit_s, name = self._health.startup_timeout_s, f"rollout-worker-{worker.worker_id}"
        async with self._waits.limited(
            name,
            "its process and data",
            held_by=(f"process of {name}",),
            note=lambda: worker.waiting_for,
            timeout_s=limit_s,
            otherwise=lambda: StartupError(
                f"{name} did not come up within {limit_s:g} s (health.startup_timeout_s)"
                f"{because(worker.waiting_for)}"
            ),
        ):
            return await worker.start()

    def _check_datasets(self, worker_id: int, datasets: dict[Split, DatasetInfo]) -> None:
        if self.datasets is None:
            for split, key in _FILES.items():
                if split in datasets and datasets[split].num_prompts < 1:
                    raise DataError(f"{key} holds no prompt")
            self.datasets = datasets
        elif datasets != self.datasets:
            raise DataError(
                f"rollout worker {worker_id} reads other data than the first worker: "
                f"{datasets}, not {self.datasets}"
            )

    @property
    def num_serving(self) -> int:
        """Workers that take work now."""
        return sum(slot.worker is not None and not slot.retiring for slot in self.slots)

    def report_lost(self, worker: RolloutWorker, reason: str) -> None:
        """Take a worker out of service; its loop replaces it. Late reports are ignored."""
        slot = self.slots[worker.worker_id]
        if slot.worker is worker:
            self._recorder.event("rollout_worker_lost", worker=worker.worker_id, reason=reason)
            slot.worker, slot.lost_by = None, reason
            self.changed.notify()

    def retire(self, worker: RolloutWorker, reason: str) -> None:
        """Give a worker no new groups; replace it when those that it has are done, or late."""
        slot = self.slots[worker.worker_id]
        if slot.worker is worker and not slot.retiring:
            slot.retiring = reason
            self._recorder.event("rollout_worker_retired", worker=worker.worker_id, reason=reason)
            # Rollouts may have no other worker: they do not wait for the longest trial of this one.
            asyncio.get_running_loop().call_later(
                self._health.loop_blocked_end_s, self.report_lost, worker, reason
            )
            self._replace_if_retired(slot)

    def _replace_if_retired(self, slot: WorkerSlot) -> None:
        if slot.worker is not None and slot.retiring and slot.num_calls == 0:
            self.report_lost(slot.worker, slot.retiring)

    def replace_all(self) -> None:
        """Take all workers out of service: one of them holds up the run."""
        for worker in [slot.worker for slot in self.slots]:
            if worker is not None:
                self.report_lost(worker, "the stage that it works for stands still")

    def _least_loaded(self) -> RolloutWorker | None:
        alive = [slot for slot in self.slots if slot.worker is not None and not slot.retiring]
        if not alive:
            return None
        slot = min(alive, key=lambda s: (s.num_calls, s.worker_id))
        return slot.worker

    async def choose(self, waiter: str) -> RolloutWorker:
        """The least loaded worker, waiting until there is one."""
        worker = self._least_loaded()
        if worker is not None:
            return worker
        with self._waits.waiting(waiter, "a rollout worker", held_by=self._names()):
            return await self.changed.until(self._least_loaded)

    def _names(self) -> tuple[str, ...]:
        return tuple(f"rollout-worker-{slot.worker_id}" for slot in self.slots)

    def began_call(self, worker: RolloutWorker) -> None:
        """Count a call in."""
        self.slots[worker.worker_id].num_calls += 1

    def ended_call(self, worker: RolloutWorker) -> None:
        """Count a call out, unless the worker was replaced meanwhile."""
        slot = self.slots[worker.worker_id]
        if slot.worker is worker:
            slot.num_calls -= 1
            self._replace_if_retired(slot)

    async def dataset(self, split: Split, waiter: str) -> DatasetInfo | None:
        """Size and identity of a split, as soon as a worker is up; None if there is no such."""
        with self._waits.waiting(waiter, "the data's size", held_by=self._names()):
            datasets = await self.changed.until(lambda: self.datasets)
        return datasets.get(split)
