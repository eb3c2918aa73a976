"""The fake replica of simulations passes the contract of Protocol `Replica`."""

import asyncio

import pytest
import pytest_asyncio

from freewheel.config.sections import Config
from freewheel.simulation.fakes import FakeBackend, FakeDisk, FakeReplica
from freewheel.simulation.settings import SimSettings
from freewheel.types import ReplicaStats, Weights
from tests.contract.replica_suite import *  # noqa: F403  # its tests are this module's

pytestmark = pytest.mark.asyncio

TOKENS_PER_S = 400.0


class FakeSubject:
    """The fake tells versions in spans and counts tokens when a request ends."""

    def __init__(self, replica: FakeReplica) -> None:
        self._replica = replica

    async def update(self, version: int) -> None:
        await self._replica.update_weights(Weights(version=version, num_bytes=1, ref="digest"))

    async def sample(self, num_tokens: int) -> list[int]:
        spans = await self._replica.generate(num_tokens)
        return [version for version, count in spans for _ in range(count)]

    async def under_way(self) -> None:
        await asyncio.sleep(10 / TOKENS_PER_S)

    async def stats(self) -> ReplicaStats:
        return await self._replica.stats()

    async def kill(self) -> None:
        self._replica.kill()


@pytest_asyncio.fixture
async def new_subject():
    async def make():
        settings = SimSettings(startup_s=0.01, update_s=0.02, tokens_per_s=TOKENS_PER_S)
        replica = FakeBackend(Config(), settings, FakeDisk()).replica(0)
        await replica.start()
        return FakeSubject(replica)

    return make
