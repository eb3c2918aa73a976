"""The contract of Protocol `Replica`, which fake, embedded engine and vLLM pass.

A test module imports all of this and defines the fixture `new_subject`: makes a `Subject` that has
started and has no weights yet.
"""

import asyncio

import pytest

from freewheel.errors import ReplicaLostError


async def test_every_token_has_the_version_that_sampled_it(new_subject):
    subject = await new_subject()
    await subject.update(0)
    assert await subject.sample(8) == [0] * 8
    await subject.update(4)
    assert await subject.sample(8) == [4] * 8
    assert (await subject.stats()).version == 4


async def test_requests_in_flight_go_on_under_new_weights(new_subject):
    subject = await new_subject()
    await subject.update(0)
    async with asyncio.TaskGroup() as group:
        call = group.create_task(subject.sample(400))
        for version in (1, 2, 5):
            await subject.under_way()
            await subject.update(version)
            # What starts when the update has returned is under the new weights alone.
            assert set(await subject.sample(4)) == {version}
    versions = call.result()
    assert len(versions) == 400
    assert versions == sorted(versions)
    assert set(versions) == {0, 1, 2, 5}


async def test_health_is_told_by_tokens(new_subject):
    subject = await new_subject()
    await subject.update(0)
    before = (await subject.stats()).num_generated_tokens
    await subject.sample(30)
    after = await subject.stats()
    assert after.num_generated_tokens == before + 30
    assert after.num_running + after.num_waiting == 0
    async with asyncio.TaskGroup() as group:
        group.create_task(subject.sample(200))
        await subject.under_way()
        assert (await subject.stats()).num_running == 1


async def test_a_dead_replica_fails_every_call(new_subject):
    subject = await new_subject()
    await subject.update(0)
    call = asyncio.tasks.Task(subject.sample(1500))
    await subject.under_way()
    await subject.kill()
    for again in (call, subject.sample(1), subject.update(1)):
        with pytest.raises(ReplicaLostError):
            await again
    await subject.kill()
