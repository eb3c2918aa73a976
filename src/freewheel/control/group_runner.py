"""One request to run a group's members: on a leased replica, by a rollout worker, in time.

Shared by training rollouts and validation. A failure of a member comes back as its outcome; a
worker that does not answer by deadline plus grace is reported lost, and so is a replica that a
worker could not reach; what a lost worker left in the engine is ended. An answer to an earlier
attempt is not taken for one to this.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from freewheel.config.sections import HealthConfig
from freewheel.control.pool import Lease, Pool
from freewheel.control.waits import WaitTable
from freewheel.control.worker_pool import WorkerPool
from freewheel.errors import (
    FailureClass,
    FreewheelError,
    InvariantError,
    LostError,
    ReplicaLostError,
)
from freewheel.protocols import Recorder
from freewheel.types import GroupRequest, GroupResult, Member, RolloutOutcome, SamplingParams, Split


class GroupRunner:
    """Runs group requests. Holds no state but the counter of request ids.

    `on_late` is given outcomes of earlier attempts, which are in no result.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        workers: WorkerPool,
        health: HealthConfig,
        waits: WaitTable,
        recorder: Recorder,
        on_late: Callable[[Sequence[RolloutOutcome]], None],
    ) -> None:
        self._pool = pool
        self._workers = workers
        self._health = health
        self._waits = waits
        self._recorder = recorder
        self._on_late = on_late
        self._request_ids = count()

    async def run(
        self,
        lease: Lease,
        *,
        group_id: int,
        split: Split,
        prompt_index: int,
        members: tuple[Member, ...],
        sampling: SamplingParams,
        timeout_s: float,
    ) -> GroupResult:
        """Run the members; each has an outcome in the result, whatever happened."""
        request = GroupRequest(
            request_id=f"{lease.purpose}-{next(self._request_ids)}",
            group_id=group_id,
            split=split,
            purpose=lease.purpose,
            prompt_index=prompt_index,
            members=members,
            sampling=sampling,
            timeout_s=timeout_s,
        )
        result = self._without_late(request, await self._call(lease, request))
        self._notice_lost_replica(lease, result)
        return result

    async def _call(self, lease: Lease, request: GroupRequest) -> GroupResult:
        worker = await self._workers.choose(lease.holder)
        if lease.lost:
            reason = f"replica {lease.replica_id} was lost before the request"
            return _all_failed(request, FailureClass.LOST_REPLICA, reason)
        limit_s = request.timeout_s + self._health.grace_s
        held_by = (f"rollout-worker-{worker.worker_id}", f"replica-{lease.replica_id}")
        self._workers.began_call(worker)
        try:
            with self._waits.waiting(lease.holder, "rollouts", held_by=held_by, timeout_s=limit_s):
                async with asyncio.timeout(limit_s):
                    return await worker.run_group(request, lease.replica)
        except TimeoutError:
            reason = f"no answer within {limit_s:g} s ({lease.holder})"
        except ReplicaLostError as error:
            return _all_failed(request, FailureClass.LOST_REPLICA, str(error))
        except LostError as error:
            reason = str(error)
        finally:
            self._workers.ended_call(worker)
        self._workers.report_lost(worker, reason)
        await self._abort(lease, request)
        return _all_failed(request, FailureClass.LOST_WORKER, reason)

    async def _abort(self, lease: Lease, request: GroupRequest) -> None:
        """End what a lost worker left in the engine: the next attempt would wait behind it."""
        if lease.lost:
            return
        limit_s, held_by = self._health.grace_s, (f"replica-{lease.replica_id}",)
        what = "the end of a lost worker's requests"
        try:
            with self._waits.waiting(lease.holder, what, held_by=held_by, timeout_s=limit_s):
                async with asyncio.timeout(limit_s):
                    await lease.replica.abort(request.request_id)
        except TimeoutError:
            # A replica that stands still is found by its own watch; the requests have a deadline.
            return
        except FreewheelError as error:
            # Lost, or an engine that cannot end a request: of no use either.
            self._lost_replica(lease, str(error))

    def _without_late(self, request: GroupRequest, result: GroupResult) -> GroupResult:
        """The result, or all members as lost if their worker answered an earlier attempt."""
        late = _late_outcomes(request, result)
        if not late:
            _check_result(request, result)
            return result
        self._on_late(late)
        # Its trajectories, too, may be of the earlier attempt: nothing of it can be used.
        reason = "the rollout worker answered an earlier attempt"
        return _all_failed(request, FailureClass.LOST_WORKER, reason)

    def _notice_lost_replica(self, lease: Lease, result: GroupResult) -> None:
        lost = [o for o in result.outcomes if o.failure is FailureClass.LOST_REPLICA]
        if lost:
            self._lost_replica(lease, lost[0].message)

    def _lost_replica(self, lease: Lease, reason: str) -> None:
        gone = self._pool.down(lease.replica_id, lease.incarnation)
        if gone is not None:
            gone.kill()
            self._recorder.event("replica_lost", replica=lease.replica_id, reason=reason)


def _all_failed(request: GroupRequest, failure: FailureClass, message: str) -> GroupResult:
    outcomes = tuple(
        RolloutOutcome(sample_id=m.sample_id, attempt=m.attempt, failure=failure, message=message)
        for m in request.members
    )
    return GroupResult(request_id=request.request_id, outcomes=outcomes, payload=None)


def _late_outcomes(request: GroupRequest, result: GroupResult) -> list[RolloutOutcome]:
    asked = {member.sample_id: member.attempt for member in request.members}
    return [o for o in result.outcomes if o.attempt < asked.get(o.sample_id, 0)]


def _check_result(request: GroupRequest, result: GroupResult) -> None:
    asked = [(m.sample_id, m.attempt) for m in request.members]
    given = [(o.sample_id, o.attempt) for o in result.outcomes]
    if result.request_id != request.request_id or sorted(asked) != sorted(given):
        raise InvariantError(
            f"request {request.request_id} for {asked} was answered by {result.request_id} "
            f"with {given}"
        )
