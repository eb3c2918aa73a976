"""Engines that answer and yet do nothing."""

import asyncio
import time

import once

from freewheel.engine import async_engine
from freewheel.engine.torch_engine import TorchEngine

_LOADS_BEFORE = 3


class _Silent(TorchEngine):
    """From when it is told to, it takes requests and weights, and samples nothing."""

    silent = False
    stuck = False

    def step(self):
        if self.stuck:
            time.sleep(600)  # noqa: TID251 - what is tested; in the engine's own thread
        if self.silent:
            time.sleep(0.01)  # noqa: TID251 - as above
            return []
        return super().step()


async_engine.TorchEngine = _Silent


class _Faulty(async_engine.AsyncEngine):
    num_loads = 0

    async def update_weights(self, version, bundle):
        self.num_loads += 1
        await super().update_weights(version, bundle)


class SamplesNothing(_Faulty):
    """One replica goes silent."""

    async def update_weights(self, version, bundle):
        await super().update_weights(version, bundle)
        if self.num_loads == _LOADS_BEFORE and once.claim("silent"):
            self._engine.silent = True


class StuckInAStep(_Faulty):
    """One replica's engine never comes back from a step; its process answers."""

    async def update_weights(self, version, bundle):
        await super().update_weights(version, bundle)
        if self.num_loads == _LOADS_BEFORE and once.claim("stuck"):
            self._engine.stuck = True


class NeverLoads(_Faulty):
    """One replica's fetch of weights never returns."""

    async def update_weights(self, version, bundle):
        if self.num_loads == _LOADS_BEFORE and once.claim("never-loads"):
            await asyncio.Event().wait()
        await super().update_weights(version, bundle)
