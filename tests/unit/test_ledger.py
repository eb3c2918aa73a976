"""The books: rows of `samples.jsonl` and the state that a checkpoint keeps."""

import copy
import json
from typing import Any

import pytest

from freewheel.control.ledger import Group, Ledger
from freewheel.control.waits import Signal
from freewheel.errors import FailureClass
from freewheel.types import PromptInfo, RolloutOutcome

pytestmark = pytest.mark.asyncio


class Books:
    """A ledger with a clock that the test sets, and what it recorded."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rows: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.ledger = Ledger(
            group_size=2,
            max_prompt_failures=3,
            recorder=self,
            now_s=lambda: self.now_s,
            changed=Signal(),
        )

    def sample(self, row):
        self.rows.append(row)

    def event(self, name, **fields):
        self.events.append((name, fields))

    def issue(self) -> Group:
        prompt = PromptInfo(prompt_index=4, num_prompt_tokens=7)
        return self.ledger.issue(epoch=0, prompt=prompt, start_version=0, max_staleness=1)

    def begin(self, group, indices):
        self.ledger.begin_attempt(group, indices, lambda sample_id, attempt: attempt)

    def times(self):
        return {row["sample_id"]: (row["started_s"], row["ended_s"]) for row in self.rows}


def done(index, *, attempt=1, wall_s=1.0, **fields):
    values = {"reward": 1.0, "version_spans": ((0, 3),), "num_prompt_tokens": 7} | fields
    return RolloutOutcome(sample_id=f"0-{index}", attempt=attempt, wall_s=wall_s, **values)


def lost(index, *, attempt=1):
    failure = FailureClass.LOST_WORKER
    return RolloutOutcome(sample_id=f"0-{index}", attempt=attempt, failure=failure)


async def test_a_failed_member_of_a_trained_group_was_not_trained():
    books = Books()
    group = books.issue()
    books.begin(group, [0, 1])
    books.ledger.absorb(group, [done(0), lost(1)], payload=object())
    books.ledger.make_ready(group)
    books.ledger.train([0], step=9)
    rows = {row["sample_id"]: row for row in books.rows}
    assert (rows["0-0"]["status"], rows["0-0"]["trained_step"]) == ("trained", 9)
    assert (rows["0-1"]["status"], rows["0-1"]["trained_step"]) == ("failed", None)
    assert [rows[name]["num_prompt_tokens"] for name in ("0-0", "0-1")] == [7, 7]


async def test_times_are_those_of_the_attempt_that_ended_the_sample():
    books = Books()
    group = books.issue()
    books.now_s = 10.0
    books.begin(group, [0, 1])
    books.now_s = 20.0  # member 0 took 6 s, member 1 was lost after 10 s at most
    books.ledger.absorb(group, [done(0, wall_s=6.0), lost(1)], payload=object())
    books.now_s = 30.0
    books.begin(group, [1])
    books.now_s = 35.0
    books.ledger.absorb(group, [done(1, attempt=2, wall_s=4.0)], payload=object())
    books.ledger.make_ready(group)
    books.now_s = 99.0  # it waits for the trainer
    books.ledger.train([0], step=1)
    assert books.times() == {"0-0": (14.0, 20.0), "0-1": (31.0, 35.0)}


async def test_members_of_a_request_end_one_after_the_other():
    books = Books()
    group = books.issue()
    books.now_s = 10.0
    books.begin(group, [0, 1])
    books.now_s = 30.0
    books.ledger.absorb(group, [done(0, wall_s=2.0), done(1, wall_s=19.0)], payload=object())
    books.ledger.filter(group)
    assert books.times() == {"0-0": (11.0, 13.0), "0-1": (11.0, 30.0)}


async def test_a_duration_longer_than_the_attempt_begins_with_it():
    books = Books()
    group = books.issue()
    books.now_s = 10.0
    books.begin(group, [0, 1])
    books.now_s = 12.0
    books.ledger.absorb(group, [lost(0), lost(1)], payload=None)
    books.begin(group, [0, 1])
    books.now_s = 15.0
    late = [done(0, attempt=2, wall_s=5.0), lost(1, attempt=2)]
    books.ledger.absorb(group, late, payload=object())
    books.ledger.fail(group)
    assert books.times() == {"0-0": (12.0, 15.0), "0-1": (12.0, 15.0)}


def over_long(index):
    return PromptInfo(
        prompt_index=index,
        num_prompt_tokens=900,
        failure=FailureClass.OVER_LONG_PROMPT,
        message=f"rows.jsonl line {index}: too long",
    )


async def test_a_dropped_prompt_is_named_once_also_across_a_resume():
    books = Books()
    for epoch in range(2):
        for index in (3, 8):
            books.ledger.drop(epoch=epoch, prompt=over_long(index))
    named = [fields["prompt_index"] for name, fields in books.events if name == "prompt_dropped"]
    assert named == [3, 8]
    assert books.events[0][1]["message"] == "rows.jsonl line 3: too long"
    assert books.ledger.dropped[0] == "prompt 3: rows.jsonl line 3: too long"
    assert len(books.rows) == 2 * 2 * 2
    assert {row["num_prompt_tokens"] for row in books.rows} == {900}
    again = Books()
    again.ledger.restore(json.loads(json.dumps(books.ledger.state())))
    again.ledger.drop(epoch=2, prompt=over_long(3))
    assert again.events == again.ledger.dropped == []
    again.ledger.drop(epoch=2, prompt=over_long(5))
    assert again.ledger.num_dropped == 3
    assert len(again.ledger.dropped) == 1


async def test_a_state_does_not_change_with_the_ledger():
    books = Books()
    for index in range(2):
        group = books.issue()
        books.begin(group, [0, 1])
        if index == 0:
            books.ledger.absorb(group, [done(0), done(1)], payload=object())
            books.ledger.make_ready(group)
    state = books.ledger.state()
    before = copy.deepcopy(state)
    books.begin(books.ledger.open[1], [0, 1])
    books.ledger.train([0], step=1)
    books.ledger.fail(books.ledger.open[1])
    assert state == before


async def test_a_restored_ledger_has_its_own_lists_and_its_times():
    books = Books()
    group = books.issue()
    books.now_s = 5.0
    books.begin(group, [0, 1])
    books.now_s = 8.0
    books.ledger.absorb(group, [done(0, wall_s=2.0), done(1, wall_s=3.0)], payload=object())
    books.ledger.make_ready(group)
    state = json.loads(json.dumps(books.ledger.state()))
    again = Books()
    again.ledger.restore(state)
    kept = copy.deepcopy(state)
    again.ledger.open[0].attempts[0] = 77
    assert state == kept
    again.now_s = 50.0
    again.ledger.train([0], step=1)
    assert again.times() == {"0-0": (5.0, 7.0), "0-1": (5.0, 8.0)}
