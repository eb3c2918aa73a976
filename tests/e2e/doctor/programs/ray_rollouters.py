"""Actor classes for `ray_actors.py`: blocked in known ways, and healthy ones."""

import asyncio
import os
import threading

import ray
from bridge import auto_await


class Rollouter:
    """Rollouts take a worker from a queue and give it back; so does validation, on the loop."""

    def __init__(self):
        self.workers = asyncio.Queue()
        self.workers.put_nowait("the only worker")

    async def rollout(self):
        worker = await self.workers.get()
        await asyncio.sleep(1.0)
        self.workers.put_nowait(worker)

    @auto_await
    async def validate(self):
        return await self.workers.get()

    def do_validate(self):
        return self.validate()

    async def pid(self):
        return os.getpid()


class Decorated(Rollouter):
    """The wrapper on the actor's own method: Ray calls it from a sync frame of its own."""

    @auto_await
    async def do_validate(self):
        return await self.workers.get()


class Frozen(Rollouter):
    """No cycle: the loop is frozen for as long as the validation lasts."""

    @auto_await
    async def validate(self):
        await asyncio.sleep(600)


class GetsOnLoop(Rollouter):
    """`ray.get` in an async method."""

    async def do_validate(self):
        return ray.get(never.remote())


class WaitsOnLoop(Rollouter):
    """`ray.wait` in an async method."""

    async def do_validate(self):
        return ray.wait([never.remote()])


class Idle(Rollouter):
    """Healthy: waits for a worker as it should."""

    async def do_validate(self):
        return await self.workers.get()


class SyncIdle:
    """Healthy: a sync actor without work."""

    def pid(self):
        return os.getpid()

    def do_validate(self):
        return None

    rollout = do_validate


@ray.remote(num_cpus=0)
def never():
    threading.Event().wait()


CLASSES = (Rollouter, Decorated, Frozen, GetsOnLoop, WaitsOnLoop, Idle, SyncIdle)
