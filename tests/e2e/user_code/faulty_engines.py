"""Engines that answer and yet do nothing: each replica that comes up has the next fault."""

import asyncio
import itertools
import time

import once

from freewheel.engine import async_engine
from freewheel.engine.torch_engine import TorchEngine

_LOADS_BEFORE = 3
_FAULTS = {0: "silent", 2: "stuck", 3: "never-loads"}
"""By how many replicas were up before. The second one is well: it goes on beside those that fail.
"""


class _Stoppable(TorchEngine):
    """From when it is told to, it samples nothing, or never comes back from a step."""

    silent = False
    stuck = False

    def step(self):
        if self.stuck:
            time.sleep(600)  # noqa: TID251 - what is tested; in the engine's own thread
        if self.silent:
            time.sleep(0.01)  # noqa: TID251 - as above
            return []
        return super().step()


async_engine.TorchEngine = _Stoppable


class FailsInTurn(async_engine.AsyncEngine):
    """After three loads of weights, one replica goes silent, the next is stuck, the third waits.

    The silent one takes requests and weights and samples nothing. The stuck one's engine never
    comes back from a step, while its process answers. The fetch of weights of the third never
    returns.
    """

    num_loads = 0
    fault = ""

    async def update_weights(self, version, bundle):
        if self.num_loads == 0:
            number = next(n for n in itertools.count() if once.claim(f"replica-{n}"))
            self.fault = _FAULTS.get(number, "")
        self.num_loads += 1
        fails = self.num_loads == _LOADS_BEFORE and self.fault and once.claim(self.fault)
        if fails and self.fault == "never-loads":
            await asyncio.Event().wait()
        await super().update_weights(version, bundle)
        if fails:
            setattr(self._engine, self.fault, True)
