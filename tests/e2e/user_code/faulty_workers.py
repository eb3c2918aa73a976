"""A rollout worker that blocks the loop which serves rollouts."""

import time

import once

from freewheel.rollout.worker import RolloutWorkerCore


class BlocksItsServingLoop(RolloutWorkerCore):
    """Sleeps on the serving loop over one group, once."""

    async def run_group(self, request, generator):
        if request.group_id == 32 and once.claim("blocked"):
            time.sleep(60)  # noqa: TID251, ASYNC251 - what is tested
        return await super().run_group(request, generator)
