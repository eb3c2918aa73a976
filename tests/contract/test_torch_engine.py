"""The embedded engine passes the contract."""

import pytest
import pytest_asyncio

from freewheel.engine import AsyncEngine
from tests.contract.engine_suite import *  # noqa: F403  # its tests are this module's
from tests.contract.replica_suite import *  # noqa: F403  # as above
from tests.contract.subjects import CoreSubject, bundle, config, save

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def new_core(tmp_path):
    made = []

    async def make(**model):
        core = AsyncEngine(config("torch"), save(tmp_path, **model), stop_timeout_s=20)
        made.append(core)
        await core.start()
        return core

    yield make
    for core in made:
        await core.aclose()


@pytest_asyncio.fixture
async def core(new_core):
    core = await new_core()
    await core.update_weights(0, bundle(0))
    return core


@pytest_asyncio.fixture
async def new_subject(new_core):
    async def make():
        return CoreSubject(await new_core())

    return make
