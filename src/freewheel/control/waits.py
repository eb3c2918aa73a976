"""The wait table and the two ways to wait: a signal (state changed) and a channel (items).

Every wait on another role, process or resource is entered in the table with waiter, resource,
holder, since when and until when, so that "why does it not move" can be answered at any moment.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One entry: `waiter` waits for `resource`. Times are the event loop's, in seconds."""

    waiter: str
    resource: str
    holder: Callable[[], str]
    since_s: float
    deadline_s: float | None


class WaitTable:
    """Who waits for what, now. The event loop's thread alone changes it."""

    def __init__(self) -> None:
        self._entries: dict[int, Wait] = {}
        self._next_id = 0

    @contextmanager
    def waiting(
        self,
        waiter: str,
        resource: str,
        *,
        holder: Callable[[], str] | str = "",
        timeout_s: float | None = None,
    ) -> Iterator[None]:
        """Enter a wait for the length of the block.

        Args:
            waiter: the role or task that waits, by its task's name.
            resource: what it waits for.
            holder: who has it; a callable is asked when the table is read.
            timeout_s: the wait's own limit, which the caller enforces.
        """
        now_s = asyncio.get_running_loop().time()
        self._next_id += 1
        key = self._next_id
        self._entries[key] = Wait(
            waiter=waiter,
            resource=resource,
            holder=holder if callable(holder) else lambda: holder,
            since_s=now_s,
            deadline_s=None if timeout_s is None else now_s + timeout_s,
        )
        try:
            yield
        finally:
            del self._entries[key]

    def entries(self) -> list[Wait]:
        """All entries, oldest first."""
        return list(self._entries.values())

    def describe(self) -> str:
        """The table as text, a line an entry."""
        now_s = asyncio.get_running_loop().time()
        return "\n".join(
            f"{wait.waiter} waits for {wait.resource} (since {now_s - wait.since_s:.1f} s"
            + (f", held by {holder}" if (holder := wait.holder()) else "")
            + ")"
            for wait in self._entries.values()
        )


class Signal:
    """Wakes everyone who waits for some state to change; they look for themselves.

    Between looking and `wait()` there must be no await, so that no change is missed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()

    async def until(self, look: Callable[[], T | None]) -> T:
        """Return the first result of `look` that is not None, looking again after each change."""
        while (found := look()) is None:
            await self.wait()
        return found


class ChannelClosed(Exception):
    """The channel has been closed and is empty."""


class Channel(Generic[T]):
    """A bounded queue that ends by closing: readers get what is left, then the end."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a channel's capacity must be at least 1, not {capacity}")
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = Signal()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        """True once `close` was called; items may be left."""
        return self._closed

    def put_nowait(self, item: T) -> bool:
        """Add an item if there is room; says whether there was."""
        if self._closed:
            raise ChannelClosed
        if len(self._items) >= self._capacity:
            return False
        self._items.append(item)
        self._changed.notify()
        return True

    async def put(self, item: T) -> None:
        """Add an item, waiting for room."""
        while not self.put_nowait(item):
            await self._changed.wait()

    async def get(self) -> T:
        """Take the oldest item.

        Raises:
            ChannelClosed: closed, and nothing is left.
        """
        while not self._items:
            if self._closed:
                raise ChannelClosed
            await self._changed.wait()
        item = self._items.popleft()
        self._changed.notify()
        return item

    def close(self) -> None:
        """No more items will come. Idempotent."""
        self._closed = True
        self._changed.notify()

    async def __aiter__(self) -> AsyncIterator[T]:
        """Items until the channel is closed and empty."""
        while True:
            try:
                item = await self.get()
            except ChannelClosed:
                return
            yield item
