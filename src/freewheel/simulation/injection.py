"""One failure, injected at a random moment into a simulated run.

What a failure of user code looks like to the control plane: the member's outcome is a timeout at
its deadline, since a rollout worker keeps deadlines on a loop that user code cannot block. So an
environment, a tool and a reward that never return differ only in where the rollout stands still,
and an environment that ignores cancellation looks like one that never returns. One that blocks the
loop of the user code takes along all that shares this loop until the first deadline replaces it.
"""

import asyncio
import random
from collections.abc import Sequence

from freewheel.errors import CheckpointError
from freewheel.simulation.settings import Failure, Injection

HANGS_AT: dict[Failure, tuple[str, ...]] = {
    Failure.ENVIRONMENT_NEVER_RETURNS: ("environment_begins", "environment_ends"),
    Failure.ENVIRONMENT_IGNORES_CANCELLATION: ("environment_begins", "environment_ends"),
    Failure.ENVIRONMENT_BLOCKS_LOOP: ("environment_begins", "environment_ends"),
    Failure.TOOL_NEVER_RETURNS: ("tool",),
    Failure.REWARD_NEVER_RETURNS: ("reward",),
    Failure.TRIAL_NEVER_RETURNS: ("trial",),
    Failure.WEIGHT_FETCH_NEVER_RETURNS: ("weight_fetch",),
    Failure.CHECKPOINT_DISK_FULL: ("checkpoint_state", "checkpoint_commit"),
    Failure.CHECKPOINT_NEVER_RETURNS: ("checkpoint_copy", "checkpoint_state", "checkpoint_commit"),
}
"""Points of the fakes at which a failure may strike; one of them is drawn for each run."""


class Injector:
    """Says when and where the failure strikes. Without an injection it never does.

    Attributes:
        num_strikes: how often it has struck.
        point: the drawn point of the fakes at which it strikes; empty if it strikes processes.
        unplaced: the drawn name of the process that is never placed, if that is the failure.

    Args:
        injection: what to inject.
        rng: draws what the injection leaves open.
        names: replicas and rollout workers.
    """

    def __init__(
        self, injection: Injection | None, rng: random.Random, names: Sequence[str]
    ) -> None:
        self.injection = injection
        self.num_strikes = 0
        self.rng = rng
        points = HANGS_AT.get(injection.failure, ()) if injection is not None else ()
        self.point = rng.choice(points) if points else ""
        # The trainer's process is not killed for it: that is another failure.
        at_start = injection is not None and injection.at_s == 0
        self.unplaced = rng.choice([*names, "trainer"] if at_start else names)

    def is_due(self, failure: Failure) -> bool:
        """True if this is the run's failure and its moment has come."""
        injection = self.injection
        if injection is None or injection.failure is not failure:
            return False
        return asyncio.get_running_loop().time() >= injection.at_s

    def strikes(self, point: str) -> bool:
        """True if the failure strikes at this point now; it then counts as a strike."""
        injection = self.injection
        if injection is None or point != self.point or not self.is_due(injection.failure):
            return False
        if injection.times is not None and self.num_strikes >= injection.times:
            return False
        self.num_strikes += 1
        return True

    def cannot_place(self, name: str) -> bool:
        """True if the start of this process, begun now, never returns; counts as a strike."""
        if name != self.unplaced or not self.is_due(Failure.NEVER_PLACED):
            return False
        self.num_strikes += 1
        return True

    async def checkpoint(self, point: str) -> None:
        """One part of a checkpoint: fails, or does not return, if the failure strikes here.

        Raises:
            CheckpointError: the disk is full.
        """
        if not self.strikes(point):
            return
        if self.is_due(Failure.CHECKPOINT_DISK_FULL):
            raise CheckpointError(f"{point}: [Errno 28] No space left on device")
        await asyncio.Event().wait()
