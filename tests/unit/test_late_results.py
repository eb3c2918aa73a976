"""Results of an earlier attempt are ignored and counted; those of no attempt are a bug of ours."""

import pytest

from freewheel.control.ledger import Ledger
from freewheel.control.waits import Signal
from freewheel.errors import FailureClass, InvariantError
from freewheel.types import PromptInfo, RolloutOutcome


class Rows:
    """A recorder that keeps samples and events."""

    def __init__(self):
        self.samples, self.events = [], []

    def sample(self, row):
        self.samples.append(row)

    def event(self, name, **fields):
        self.events.append((name, fields))


def make_ledger():
    rows = Rows()
    ledger = Ledger(
        group_size=2, max_prompt_failures=3, recorder=rows, now_s=lambda: 1.0, changed=Signal()
    )
    prompt = PromptInfo(prompt_index=7, num_prompt_tokens=5)
    group = ledger.issue(epoch=0, prompt=prompt, start_version=0, max_staleness=1)
    return ledger, group, rows


def outcome(sample_id, attempt, *, failure=None, reward=1.0):
    done = {"num_response_tokens": 4, "version_spans": ((0, 4),), "reward": reward}
    return RolloutOutcome(
        sample_id=sample_id, attempt=attempt, failure=failure, **({} if failure else done)
    )


def begin(ledger, group, *indices):
    ledger.begin_attempt(group, indices, lambda _sample_id, _attempt: 1)


def lost(*ids):
    return [outcome(i, 1, failure=FailureClass.LOST_WORKER) for i in ids]


def test_a_worker_reported_lost_that_answers_afterwards_changes_nothing():
    ledger, group, rows = make_ledger()
    begin(ledger, group, 0, 1)
    ledger.absorb(group, lost("0-0", "0-1"), None)
    begin(ledger, group, 0, 1)
    ledger.absorb(group, [outcome("0-0", 1, reward=0.0), outcome("0-1", 1)], "late payload")
    assert (ledger.num_late, group.payloads, group.finished) == (2, [], [])
    ledger.absorb(group, [outcome("0-0", 2), outcome("0-1", 2)], "payload")
    ledger.make_ready(group)
    ledger.train([0], step=1)
    assert [(row["attempt"], row["reward"], row["status"]) for row in rows.samples] == [
        (2, 1.0, "trained"),
        (2, 1.0, "trained"),
    ]
    assert rows.events == [("late_results", {"samples": [["0-0", 1], ["0-1", 1]]})]
    ledger.check()


def test_what_comes_to_a_decided_group_is_late():
    ledger, group, rows = make_ledger()
    begin(ledger, group, 0, 1)
    both = [outcome("0-0", 1), outcome("0-1", 1)]
    ledger.absorb(group, both, "payload")
    ledger.absorb(group, both, "payload again")
    ledger.make_ready(group)
    ledger.absorb(group, both, "payload again")
    ledger.train([0], step=1)
    ledger.absorb(group, both, "payload again")
    assert (ledger.num_late, group.payloads, len(rows.samples)) == (6, ["payload"], 2)


def test_late_failures_come_along_with_what_is_current():
    ledger, group, _ = make_ledger()
    begin(ledger, group, 0, 1)
    begin(ledger, group, 0)
    late = outcome("0-0", 1, failure=FailureClass.TIMEOUT)
    ledger.absorb(group, [late, outcome("0-1", 1)], "payload")
    assert (ledger.num_late, group.payloads, group.unfinished()) == (1, ["payload"], [0])


def test_late_and_current_trajectories_in_one_payload_are_refused():
    ledger, group, _ = make_ledger()
    begin(ledger, group, 0, 1)
    begin(ledger, group, 0)
    with pytest.raises(InvariantError, match="came together"):
        ledger.absorb(group, [outcome("0-0", 1), outcome("0-1", 1)], "payload")


@pytest.mark.parametrize("sample_id", ["0-2", "1-0"])
def test_an_outcome_of_no_member_is_refused(sample_id):
    ledger, group, _ = make_ledger()
    begin(ledger, group, 0, 1)
    with pytest.raises(InvariantError, match=sample_id):
        ledger.absorb(group, [outcome(sample_id, 1)], "payload")


def test_an_outcome_of_an_attempt_that_was_not_begun_is_refused():
    ledger, group, _ = make_ledger()
    begin(ledger, group, 0, 1)
    with pytest.raises(InvariantError, match="attempt 2, but attempt 1"):
        ledger.absorb(group, [outcome("0-0", 1), outcome("0-1", 2)], "payload")
    assert group.outcomes == {}


def test_the_count_is_part_of_a_checkpoint():
    ledger, group, _ = make_ledger()
    begin(ledger, group, 0, 1)
    begin(ledger, group, 0, 1)
    ledger.absorb(group, lost("0-0"), None)
    state = ledger.state()
    restored, _, _ = make_ledger()
    restored.restore(state)
    assert restored.num_late == ledger.num_late == 1
