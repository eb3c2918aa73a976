"""The wait table and the two ways to wait: a signal (state changed) and a channel (items).

Every wait on another role, process or resource is entered in the table with waiter, resource,
holder, since when and until when, so that "why does it not move" can be answered at any moment.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


Names: TypeAlias = Callable[[], Iterable[str]] | tuple[str, ...]
"""Names of waiters or of processes; a callable is asked when the table is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One entry: `waiter` waits for `resource`, which any of `held_by` may bring about.

    A holder is another waiter (by its task's name) or a process (by its worker's name). Times are
    the event loop's, in seconds.
    """

    waiter: str
    resource: str
    held_by: tuple[str, ...]
    note: str
    since_s: float
    deadline_s: float | None

    def describe(self, now_s: float) -> str:
        """The entry in one line."""
        held = f", held by {', '.join(self.held_by)}" if self.held_by else ""
        left = "" if self.deadline_s is None else f", at most {self.deadline_s - now_s:.1f} s more"
        note = f" [{self.note}]" if self.note else ""
        return (
            f"{self.waiter} waits for {self.resource} (since {now_s - self.since_s:.1f} s"
            f"{held}{left}){note}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    waiter: str
    resource: str
    held_by: Names
    note: Callable[[], str] | str
    since_s: float
    deadline_s: float | None

    def read(self) -> Wait:
        held_by = self.held_by() if callable(self.held_by) else self.held_by
        return Wait(
            waiter=self.waiter,
            resource=self.resource,
            held_by=tuple(dict.fromkeys(held_by)),
            note=self.note() if callable(self.note) else self.note,
            since_s=self.since_s,
            deadline_s=self.deadline_s,
        )


class WaitTable:
    """Who waits for what, now. The event loop's thread alone changes it."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._next_id = 0

    @contextmanager
    def waiting(
        self,
        waiter: str,
        resource: str,
        *,
        held_by: Names = (),
        note: Callable[[], str] | str = "",
        timeout_s: float | None = None,
    ) -> Iterator[None]:
        """Enter a wait for the length of the block.

        Args:
            waiter: the role or task that waits, by its task's name.
            resource: what it waits for.
            held_by: who has it: any of them can bring it about.
            note: more for a person who reads the table; a callable is asked when it is read.
            timeout_s: the wait's own limit, which the caller enforces.
        """
        now_s = asyncio.get_running_loop().time()
        self._next_id += 1
        key = self._next_id
        self._entries[key] = _Entry(
            waiter=waiter,
            resource=resource,
            held_by=held_by,
            note=note,
            since_s=now_s,
            deadline_s=None if timeout_s is None else now_s + timeout_s,
        )
        try:
            yield
        finally:
            del self._entries[key]

    @asynccontextmanager
    async def limited(
        self,
        waiter: str,
        resource: str,
        *,
        held_by: Names = (),
        note: Callable[[], str] | str = "",
        timeout_s: float,
        otherwise: Callable[[], Exception],
    ) -> AsyncIterator[None]:
        """Enter a wait and end it at its limit.

        Args:
            waiter: as for `waiting`.
            resource: as for `waiting`.
            held_by: as for `waiting`.
            note: as for `waiting`.
            timeout_s: the limit.
            otherwise: makes the error that is raised at the limit.
        """
        with self.waiting(waiter, resource, held_by=held_by, note=note, timeout_s=timeout_s):
            try:
                async with asyncio.timeout(timeout_s):
                    yield
            except TimeoutError as error:
                raise otherwise() from error

    def entries(self) -> list[Wait]:
        """All entries, oldest first."""
        return [entry.read() for entry in list(self._entries.values())]

    def describe(self) -> str:
        """The table as text, a line an entry."""
        now_s = asyncio.get_running_loop().time()
        return "\n".join(wait.describe(now_s) for wait in self.entries())


def because(reason: str) -> str:
    """A reason as the end of a sentence; nothing if there is none."""
    return f": {reason}" if reason else ""


def find_deadlock(waits: Iterable[Wait]) -> list[Wait]:
    """The waits that can never end: all who could end them wait likewise, in a closed circle.

    Whoever is not in the table (a process, a timer) may act; so may, then, everyone who waits for
    one that may. The rest is stuck. A wait that names no holder counts as one that may end.

    Returns:
        A chain of stuck waits, each of which waits for the next, the last for the first; empty if
        there is none.
    """
    by_waiter = {wait.waiter: wait for wait in waits}
    free = {name for name, wait in by_waiter.items() if not wait.held_by}
    while True:
        freed = {
            name
            for name, wait in by_waiter.items()
            if name not in free and any(h not in by_waiter or h in free for h in wait.held_by)
        }
        if not freed:
            break
        free |= freed
    stuck = {name: wait for name, wait in by_waiter.items() if name not in free}
    if not stuck:
        return []
    chain: list[str] = []
    name = min(stuck)
    while name not in chain:
        chain.append(name)
        name = next(holder for holder in stuck[name].held_by if holder in stuck)
    return [stuck[name] for name in chain[chain.index(name) :]]


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
