"""A replica is healthy if it produced tokens lately while it had work; not if it answers pings.

One loop asks all replicas for their counters. A replica that has work and whose counters stand
still, or that does not answer, for `health.replica_stall_s` is reported lost: its loop kills and
replaces it, and its rollouts run again elsewhere. Only time with work counts, and only a token
ends the count: neither a moment without work nor new weights does, so that one that is asked again
and again, or loads every version and samples nothing, is found as well. While it loads weights it
need not sample, but it answers; the load has a limit of its own, `health.sync_timeout_s`.
"""

import asyncio
from dataclasses import dataclass

from freewheel.config.sections import HealthConfig
from freewheel.control.pool import Pool, Slot
from freewheel.control.waits import WaitTable
from freewheel.errors import LostError
from freewheel.protocols import Recorder, Replica
from freewheel.types import ReplicaStats

_CHECKS_PER_LIMIT = 8


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What the last look at a replica told.

    `tokens`: -1 until it has answered. `stood_still_s`: time with work since its last token.
    """

    incarnation: int
    tokens: int = -1
    should_move: bool = False
    looked_s: float = 0.0
    stood_still_s: float = 0.0


class ReplicaHealth:
    """Loop `replica-health`. See the module's docstring."""

    def __init__(
        self, *, pool: Pool, health: HealthConfig, waits: WaitTable, recorder: Recorder
    ) -> None:
        self._pool = pool
        self._limit_s = health.replica_stall_s
        self._waits = waits
        self._recorder = recorder
        self._seen: dict[int, _Seen] = {}

    async def run(self) -> None:
        """Check all replicas, again and again.

        Consumes: the replicas' counters.
        Produces: reports of loss.
        Waits for: its timer; each replica's answer, within a check's interval.
        Unblocked by: the clock.
        """
        interval_s = self._limit_s / _CHECKS_PER_LIMIT
        while True:
            async with asyncio.TaskGroup() as checks:
                checks.create_task(asyncio.sleep(interval_s), name="next-check-of-replicas")
                for slot in self._pool.slots.values():
                    if slot.replica is not None:
                        checks.create_task(
                            self._check(slot, slot.replica, interval_s),
                            name=f"check-replica-{slot.replica_id}",
                        )

    async def _check(self, slot: Slot, replica: Replica, timeout_s: float) -> None:
        incarnation = slot.incarnation
        is_wanted, is_loading = bool(slot.leases), slot.updating_to is not None
        stats = await self._ask(replica, timeout_s)
        if slot.incarnation != incarnation or slot.replica is None:
            return
        seen = self._seen.get(slot.replica_id)
        if seen is None or seen.incarnation != incarnation:
            seen = self._seen[slot.replica_id] = _Seen(incarnation=incarnation)
        is_loading = is_loading or slot.updating_to is not None
        if stats is None:
            should_move = is_wanted or is_loading
        else:
            # Its own word on whether it has work: the rollouts that hold its leases may wait in
            # their environments, or their worker may be gone. While it loads it need not sample.
            should_move = stats.num_running + stats.num_waiting > 0 and not is_loading
        self._note(seen, stats, should_move=should_move)
        if seen.stood_still_s >= self._limit_s:
            self._report(slot, seen.stood_still_s, answers=stats is not None)

    def _note(self, seen: _Seen, stats: ReplicaStats | None, *, should_move: bool) -> None:
        """Count the time since the last look if there was work at both, and nothing came of it."""
        now_s = asyncio.get_running_loop().time()
        tokens = None if stats is None else stats.num_generated_tokens + stats.num_prompt_tokens
        if tokens is not None and tokens != seen.tokens:
            seen.tokens, seen.stood_still_s = tokens, 0.0
        elif should_move and seen.should_move:
            # Work may have come just before this look: then it counts from here on.
            seen.stood_still_s += now_s - seen.looked_s
        seen.should_move, seen.looked_s = should_move, now_s

    async def _ask(self, replica: Replica, timeout_s: float) -> ReplicaStats | None:
        """Its counters; None if it does not answer."""
        name = f"check-replica-{replica.replica_id}"
        try:
            with self._waits.waiting(
                name, "counters", held_by=(f"process of replica-{replica.replica_id}",)
            ):
                async with asyncio.timeout(timeout_s):
                    return await replica.stats()
        except (TimeoutError, LostError):
            return None

    def _report(self, slot: Slot, since_s: float, *, answers: bool) -> None:
        doing = f"it had {len(slot.leases)} groups to run"
        if slot.updating_to is not None:
            doing += f" and version {slot.updating_to} to load"
        reason = f"no token for {since_s:.0f} s while {doing}{'' if answers else ', and no answer'}"
        self._recorder.event("replica_stalled", replica=slot.replica_id, reason=reason)
        gone = self._pool.down(slot.replica_id, slot.incarnation)
        if gone is not None:
            gone.kill()
