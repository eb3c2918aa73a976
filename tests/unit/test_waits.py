"""The wait table: what it says of a wait, and how it finds a closed circle."""

import asyncio

import pytest

from freewheel.control.waits import Channel, ChannelClosed, Signal, Wait, WaitTable, find_deadlock


def wait(waiter, *held_by):
    return Wait(
        waiter=waiter,
        resource="it",
        held_by=held_by,
        note="",
        since_s=0.0,
        deadline_s=None,
    )


def names(waits):
    return [wait.waiter for wait in waits]


def test_a_circle_is_found_as_a_chain():
    waits = [
        wait("train", "group-1", "group-2"),
        wait("group-1", "validation"),
        wait("group-2", "group-1"),
        wait("validation", "group-2"),
    ]
    chain = find_deadlock(waits)
    assert sorted(names(chain)) == ["group-1", "group-2", "validation"]
    for one, following in zip(chain, [*chain[1:], chain[0]], strict=True):
        assert following.waiter in one.held_by


def test_whoever_is_not_waiting_may_act():
    assert find_deadlock([wait("train", "group-1"), wait("group-1", "replica-0")]) == []
    assert find_deadlock([wait("a", "b"), wait("b", "a", "process")]) == []
    assert find_deadlock([wait("a", "b"), wait("b")]) == []
    assert find_deadlock([]) == []


def test_the_waits_outside_the_circle_are_left_out():
    chain = find_deadlock([wait("outside", "a"), wait("a", "b"), wait("b", "a")])
    assert sorted(names(chain)) == ["a", "b"]


def test_the_table_describes_a_wait_while_it_lasts():
    async def main():
        table = WaitTable()
        with table.waiting("train", "samples", held_by=lambda: ["g", "g"], note="2 of 4"):
            assert table.entries()[0].held_by == ("g",)
            text = table.describe()
        assert text.startswith("train waits for samples (since 0.0 s, held by g) [2 of 4]")
        assert table.entries() == []

    asyncio.run(main())


def test_a_limited_wait_ends_with_the_given_error():
    async def main():
        table = WaitTable()
        limited = table.limited("w", "r", timeout_s=0.01, otherwise=lambda: ValueError("late"))
        with pytest.raises(ValueError, match="late"):
            async with limited:
                await Signal().wait()
        assert table.entries() == []

    asyncio.run(main())


def test_a_channel_gives_what_is_left_after_closing_and_then_its_end():
    async def main():
        channel = Channel(2)
        assert channel.put_nowait(1)
        assert channel.put_nowait(2)
        assert not channel.put_nowait(3)
        channel.close()
        assert [item async for item in channel] == [1, 2]
        with pytest.raises(ChannelClosed):
            await channel.get()
        with pytest.raises(ChannelClosed):
            channel.put_nowait(4)

    asyncio.run(main())


def test_a_full_channel_makes_the_writer_wait():
    async def main():
        channel = Channel(1)
        taken = []
        async with asyncio.TaskGroup() as group:
            group.create_task(channel.put("first"))
            group.create_task(channel.put("second"))
            await asyncio.sleep(0)
            assert len(channel) == 1
            taken.append(await channel.get())
            taken.append(await channel.get())
        assert taken == ["first", "second"]

    asyncio.run(main())
