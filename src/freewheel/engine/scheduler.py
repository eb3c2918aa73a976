"""Decides what one engine step computes: which requests decode, which prompt tokens are prefilled.

Plain Python, no tensors. A request is waiting, prefilling or running. Prompts that are equal and
wait at the same time (the rollouts of a group) are prefilled once, as one `Prefill` with several
members. A request whose keys and values were dropped (for memory, or because the weights changed)
waits again, first in line, and is prefilled with the tokens it already has.

Memory is counted in cells, the keys and values of one token. Running requests share a rectangle:
rows by the longest length; a prefill has cells of its own until it joins it. Invariant after
`plan`: rectangle and prefills together fit into `max_cells`, with the prefilling members counted
as rows already.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from freewheel.engine.request import Request

if TYPE_CHECKING:
    from freewheel.engine.kv import KVRows

HEADROOM_TOKENS = 32
"""Growth that must fit when a request is admitted, so that it does not give way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine may use at once. `max_length` bounds prompt and response together."""

    max_num_seqs: int
    max_cells: int
    max_prefill_tokens: int
    max_length: int


@dataclass(slots=True, eq=False, kw_only=True)
class Prefill:
    """Tokens to run through the model before their members can sample. `done` of them are."""

    members: list[Request]
    token_ids: npt.NDArray[np.int32]
    done: int = 0
    kv: "KVRows | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, stop) of a prefill, to be computed in this step."""

    prefill: Prefill
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether its members sample after this chunk."""
        return self.stop == len(self.prefill.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step. `decode` are the running requests, by row."""

    decode: tuple[Request, ...]
    chunks: tuple[Chunk, ...]


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """State of all requests, and the decisions about them."""

    limits: Limits
    waiting: deque[Request] = field(default_factory=deque[Request])
    prefilling: list[Prefill] = field(default_factory=list[Prefill])
    running: list[Request] = field(default_factory=list[Request])
    _admitted: int = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is in the engine."""
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def num_active(self) -> int:
        """Requests that run or are being prefilled."""
        return len(self.running) + sum(len(prefill.members) for prefill in self.prefilling)

    def add(self, request: Request) -> None:
        """Put a request last in line."""
        self.waiting.append(request)

    def crowded_rows(self) -> list[Request]:
        """Running requests that must give way before the next step, youngest first."""
        others = [request for prefill in self.prefilling for request in prefill.members]
        if not self.running or self._cells(self.running + others) <= self.limits.max_cells:
            return []
        victims: list[Request] = []
        rows = sorted(self.running, key=lambda request: request.order)
        while rows and self._cells(rows + others) > self.limits.max_cells:
            if len(rows) + len(others) == 1:
                break
            victims.append(rows.pop())
        return victims

    def plan(self) -> Plan:
        """Continue prefills, admit what fits, within the step's budget of prompt tokens."""
        budget = self.limits.max_prefill_tokens
        chunks: list[Chunk] = []
        for prefill in self.prefilling:
            budget -= self._take(prefill, budget, chunks)
        while budget > 0 and (prefill := self._admit()) is not None:
            budget -= self._take(prefill, budget, chunks)
        return Plan(decode=tuple(self.running), chunks=tuple(chunks))

    def requeue(self, requests: Iterable[Request]) -> None:
        """Put requests first in line again, in the order of their admission.

        They must have been removed from the rows.
        """
        for request in sorted(requests, key=lambda request: request.order, reverse=True):
            self.waiting.appendleft(request)

    def reset(self) -> None:
        """Everything in flight waits again: its keys and values are void."""
        requests = [*self.running, *(r for prefill in self.prefilling for r in prefill.members)]
        self.running.clear()
        self.prefilling.clear()
        self.requeue(requests)

    def find(self, request_id: str) -> Request | None:
        """The request of this id, wherever it is."""
        return next((r for r in self.requests() if r.request_id == request_id), None)

    def requests(self) -> Iterable[Request]:
        """All requests in the engine."""
        yield from self.running
        for prefill in self.prefilling:
            yield from prefill.members
        yield from self.waiting

    def drop(self, request: Request) -> None:
        """Take out a request that is not running."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        for prefill in self.prefilling:
            if request in prefill.members:
                prefill.members.remove(request)
                if not prefill.members:
                    self.prefilling.remove(prefill)
                return

    def _take(self, prefill: Prefill, budget: int, chunks: list[Chunk]) -> int:
        stop = min(prefill.done + budget, len(prefill.token_ids))
        if stop > prefill.done:
            chunks.append(Chunk(prefill=prefill, start=prefill.done, stop=stop))
        return stop - prefill.done

    def _admit(self) -> Prefill | None:
        """Move the first in line, and those that share its prompt, to prefilling."""
        members: list[Request] = []
        active = [*self.running, *(r for prefill in self.prefilling for r in prefill.members)]
        for request in self._sharing():
            if not self._fits(active, members, request):
                break
            members.append(request)
        if not members:
            return None
        for member in members:
            self.waiting.remove(member)
            self._admitted += 1
            member.order = member.order or self._admitted
        prefill = Prefill(members=members, token_ids=members[0].all_tokens())
        self.prefilling.append(prefill)
        return prefill

    def _sharing(self) -> Iterator[Request]:
        """The first in line, then all with its prompt that have no tokens of their own yet.

        Wherever they are in line: requests of several groups that come one by one mix in it, and a
        prompt is dear to compute, while those who are passed lose no more than rows.
        """
        queue = iter(self.waiting)
        first = next(queue, None)
        if first is None:
            return
        yield first
        if not first.token_ids:
            for request in queue:
                if not request.token_ids and np.array_equal(first.prompt, request.prompt):
                    yield request

    def _fits(self, active: list[Request], members: list[Request], request: Request) -> bool:
        requests = [*active, *members, request]
        if len(requests) == 1:
            return True
        if len(requests) > self.limits.max_num_seqs:
            return False
        new_cells = (members or [request])[0].length
        return self._cells(requests, HEADROOM_TOKENS) + new_cells <= self.limits.max_cells

    def _cells(self, requests: list[Request], headroom: int = 0) -> int:
        longest = max(request.length for request in requests)
        longest = max(longest, min(longest + headroom, self.limits.max_length))
        prefills = sum(len(prefill.token_ids) for prefill in self.prefilling)
        return len(requests) * longest + prefills
