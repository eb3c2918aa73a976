"""Whether a group may start or go on, and what is to blame if not."""

from dataclasses import dataclass, field

import pytest

from freewheel.config.sections import ActorConfig, Config, TrainerConfig
from freewheel.control.pool import Pin, Pool
from freewheel.control.rollouter import Admission
from freewheel.control.staleness import StalenessBound
from freewheel.control.waits import Signal


@dataclass
class OpenGroup:
    group_id: int = 0
    start_version: int = 0


@dataclass
class Books:
    """As much of a ledger as admission reads."""

    num_trained_groups: int = 0
    open: dict[int, OpenGroup] = field(default_factory=dict)


def make(*, num_open, total=4, max_open=2):
    """One replica with one slot, at version 0, pinned exclusively; a run of so many groups."""
    pool = Pool(
        num_shared=1,
        num_dedicated=0,
        capacity=1,
        partial_rollout=False,
        changed=Signal(),
        now_s=lambda: 0.0,
    )
    pool.up(0, object())
    pool.published(0)
    pool.begin_update(0, 0)
    pool.end_update(0, 0)
    staleness = StalenessBound(max_open=max_open, max_staleness=0)
    staleness.publish(0, num_trained=0)
    admission = Admission(
        Config(
            actor=ActorConfig(ppo_mini_batch_size=1),
            trainer=TrainerConfig(total_training_steps=total),
        ),
        ledger=Books(open={i: OpenGroup(group_id=i) for i in range(num_open)}),
        pool=pool,
        staleness=staleness,
        changed=pool.changed,
    )
    pin = Pin(name="validation-0", version=0, num_pending=1, exclusive=True)
    pool.pin(pin, [0])
    return admission, pool, pin


def test_a_group_that_may_start_is_kept_back_by_the_pin_and_by_the_hold():
    admission, pool, pin = make(num_open=0)
    assert admission.is_blocked_by_pins()
    pool.unpin(pin, 0)
    assert not admission.is_blocked_by_pins()
    admission.hold("validation-0")
    assert admission.is_blocked_by_pins()


@pytest.mark.parametrize("bounded_by", [{"max_open": 1}, {"total": 1}])
def test_a_group_that_could_not_start_anyway_is_not(bounded_by):
    admission, _, _ = make(num_open=1, **bounded_by)
    admission.hold("validation-0")
    assert not admission.is_blocked_by_pins()


@pytest.mark.parametrize("bounded_by", [{"max_open": 1}, {"total": 1}])
def test_an_open_group_that_waits_for_a_replica_is_kept_back_by_the_pin(bounded_by):
    admission, pool, pin = make(num_open=1, **bounded_by)
    with admission.returning(OpenGroup()):
        assert admission.is_blocked_by_pins()
        pool.unpin(pin, 0)
        assert not admission.is_blocked_by_pins()
        pool.pin(pin, [0])
    assert not admission.is_blocked_by_pins()


def test_a_hold_of_open_groups_keeps_them_from_going_on_and_is_to_blame():
    admission, pool, pin = make(num_open=1, max_open=1)
    pool.unpin(pin, 0)
    admission.hold("SIGINT")
    group = OpenGroup()
    with admission.returning(group):
        admission.hold("validation-0", open_groups_too=True)
        assert admission.try_return("group-0", group) is None
        assert admission.return_blocked_by() == ["validation-0"]
        assert admission.is_blocked_by_pins()
        admission.release("validation-0")
        assert not admission.is_blocked_by_pins()
        assert admission.try_return("group-0", group) is not None, "a stop lets it go on"
    assert admission.return_blocked_by() == ["group-0"], "it has the only slot"
