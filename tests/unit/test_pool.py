"""Leases, pins and due updates, without an event loop."""

import random
from collections import Counter

import pytest

from freewheel.control.pool import Pin, Pool, Role
from freewheel.control.waits import Signal
from freewheel.errors import InvariantError
from freewheel.types import Purpose


class Process:
    """Stands for a replica's process; the pool only passes it on."""


def make_pool(num_shared=2, num_dedicated=0, capacity=2, partial_rollout=True):
    pool = Pool(
        num_shared=num_shared,
        num_dedicated=num_dedicated,
        capacity=capacity,
        partial_rollout=partial_rollout,
        changed=Signal(),
        now_s=lambda: 0.0,
    )
    for replica_id in pool.slots:
        pool.up(replica_id, Process())
    return pool


def publish(pool, version, *, load=()):
    pool.published(version)
    for replica_id in load:
        assert pool.due_update(replica_id) == version
        pool.begin_update(replica_id, version)
        pool.end_update(replica_id, version)


def test_nothing_is_leased_before_there_are_weights():
    pool = make_pool()
    assert pool.try_lease_training("g", min_version=0) is None
    publish(pool, 0, load=[1])
    assert pool.try_lease_training("g", min_version=0).replica_id == 1
    assert pool.try_lease_training("g", min_version=1) is None


def test_leases_go_to_the_least_loaded_and_end_at_capacity():
    pool = make_pool()
    publish(pool, 0, load=[0, 1])
    leases = [pool.try_lease_training("g", min_version=0) for _ in range(4)]
    assert [lease.replica_id for lease in leases] == [0, 1, 0, 1]
    assert pool.try_lease_training("g", min_version=0) is None
    pool.release(leases[1])
    assert pool.try_lease_training("g", min_version=0).replica_id == 1


def test_a_double_release_raises_and_a_lost_lease_can_be_released_once():
    pool = make_pool()
    publish(pool, 0, load=[0, 1])
    lease = pool.try_lease_training("g", min_version=0)
    pool.release(lease)
    with pytest.raises(InvariantError, match="twice"):
        pool.release(lease)
    lost = pool.try_lease_training("h", min_version=0)
    assert pool.down(lost.replica_id, lost.incarnation) is lost.replica
    assert pool.down(lost.replica_id, lost.incarnation) is None
    pool.release(lost)
    with pytest.raises(InvariantError, match="twice"):
        pool.release(lost)


def test_with_partial_rollout_a_replica_takes_weights_while_it_works():
    pool = make_pool()
    publish(pool, 0, load=[0, 1])
    pool.try_lease_training("g", min_version=0)
    pool.published(1)
    assert pool.due_update(0) == 1


def test_without_partial_rollout_a_replica_drains_first_and_alone():
    pool = make_pool(partial_rollout=False)
    publish(pool, 0, load=[0, 1])
    lease = pool.try_lease_training("g", min_version=0)
    pool.published(1)
    assert pool.due_update(lease.replica_id) is None
    assert pool.due_update(1 - lease.replica_id) == 1
    assert pool.try_lease_training("h", min_version=0) is None
    pool.release(lease)
    assert pool.due_update(lease.replica_id) == 1


def test_a_pinned_replica_keeps_its_version_and_the_others_go_on():
    pool = make_pool()
    publish(pool, 0, load=[0, 1])
    pin = Pin(name="validation-0", version=0, num_pending=0)
    pool.pin(pin, [0])
    publish(pool, 1, load=[1])
    assert pool.due_update(0) is None
    assert pool.try_lease_validation("v", pin).replica_id == 0
    assert pool.try_lease_training("g", min_version=1).replica_id == 1
    assert pool.try_lease_training("g", min_version=0).replica_id == 0
    pool.unpin(pin, 0)
    assert pool.due_update(0) == 1


def test_a_replica_pinned_for_the_next_version_waits_for_its_publication():
    pool = make_pool(num_shared=1, partial_rollout=False)
    publish(pool, 0, load=[0])
    pin = Pin(name="validation-5", version=1, num_pending=3)
    pool.pin(pin, [0])
    assert pool.due_update(0) is None
    assert pool.try_lease_validation("v", pin) is None
    publish(pool, 1, load=[0])
    assert pool.try_lease_validation("v", pin).version == 1


def test_a_replica_goes_back_to_an_older_version_only_when_nothing_runs_on_it():
    pool = make_pool(num_shared=1)
    publish(pool, 0, load=[0])
    publish(pool, 1, load=[0])
    lease = pool.try_lease_training("g", min_version=1)
    pool.pin(Pin(name="late", version=0, num_pending=1), [0])
    assert pool.due_update(0) is None
    assert pool.try_lease_training("h", min_version=0) is None
    pool.release(lease)
    assert pool.due_update(0) == 0


def test_the_only_replica_is_shared_by_halves():
    pool = make_pool(num_shared=1, capacity=4)
    publish(pool, 0, load=[0])
    pin = Pin(name="validation", version=0, num_pending=9)
    pool.pin(pin, [0])
    assert [pool.try_lease_validation("v", pin) is not None for _ in range(3)] == [
        True,
        True,
        False,
    ]
    taken = [pool.try_lease_training("g", min_version=0) is not None for _ in range(3)]
    assert taken == [True, True, False]
    assert pool.num_leases(Purpose.VALIDATION) == pool.num_leases(Purpose.TRAINING) == 2


def test_a_validation_has_first_call_on_a_pinned_replica_while_another_is_free():
    pool = make_pool(capacity=4)
    publish(pool, 0, load=[0, 1])
    pin = Pin(name="validation", version=0, num_pending=1)
    pool.pin(pin, [0])
    leases = [pool.try_lease_training("g", min_version=0) for _ in range(3)]
    assert [lease.replica_id for lease in leases] == [1, 1, 1]
    pin.num_pending = 0
    assert pool.try_lease_training("g", min_version=0).replica_id == 0


def test_dedicated_replicas_never_take_rollouts_and_only_the_pinned_version():
    pool = make_pool(num_shared=1, num_dedicated=1)
    publish(pool, 0, load=[0])
    assert pool.due_update(1) is None
    pin = Pin(name="validation", version=0, num_pending=1)
    pool.pin(pin, pool.ids(Role.DEDICATED))
    assert pool.due_update(1) == 0
    pool.begin_update(1, 0)
    pool.end_update(1, 0)
    assert pool.try_lease_validation("v", pin).replica_id == 1
    leases = [pool.try_lease_training("g", min_version=0) for _ in range(3)]
    assert [lease and lease.replica_id for lease in leases] == [0, 0, None]


def test_a_replaced_replica_stays_pinned_and_gets_the_pinned_version_again():
    pool = make_pool()
    publish(pool, 0, load=[0, 1])
    pin = Pin(name="validation", version=0, num_pending=1)
    pool.pin(pin, [0])
    publish(pool, 1, load=[1])
    pool.down(0, pool.slots[0].incarnation)
    pool.up(0, Process())
    assert pool.due_update(0) == 0


def test_pinning_prefers_replicas_that_need_no_step_back():
    pool = make_pool(num_shared=3)
    publish(pool, 0, load=[0, 1, 2])
    publish(pool, 1, load=[0, 1])
    assert pool.choose_for_pin(1, version=0) == [2]
    assert pool.choose_for_pin(2, version=1) == [0, 1]


def test_two_pins_on_one_replica_are_a_bug():
    pool = make_pool()
    pool.pin(Pin(name="a", version=0, num_pending=0), [0])
    with pytest.raises(InvariantError, match="pinned by a, b wants it too"):
        pool.pin(Pin(name="b", version=0, num_pending=0), [0])


def test_without_partial_rollout_nothing_starts_while_a_pinned_replica_loads_another_version():
    pool = make_pool(num_shared=1, partial_rollout=False)
    publish(pool, 0, load=[0])
    pool.published(1)
    assert pool.due_update(0) == 1
    pool.begin_update(0, 1)
    pin = Pin(name="validation-0", version=0, num_pending=0)
    pool.pin(pin, [0])  # what it should hold is what it holds, but version 1 is on its way
    assert pool.try_lease_training("g", min_version=0) is None
    assert pool.try_lease_validation("v", pin) is None
    pool.end_update(0, 1)
    assert pool.try_lease_validation("v", pin) is None
    assert pool.due_update(0) == 0
    pool.begin_update(0, 0)
    assert pool.try_lease_training("g", min_version=0) is None
    pool.end_update(0, 0)
    assert pool.try_lease_training("g", min_version=0).version == 0


def pinned_pool(*, num_shared, capacity, version=0, num_pending=3, **options):
    """All replicas at version 0, the first one pinned at a version."""
    pool = make_pool(num_shared=num_shared, capacity=capacity, **options)
    publish(pool, 0, load=range(num_shared))
    pin = Pin(name="validation", version=version, num_pending=num_pending)
    pool.pin(pin, [0])
    return pool, pin


def test_pins_keep_back_the_only_slot_of_the_only_replica():
    pool, pin = pinned_pool(num_shared=1, capacity=1)
    assert pool.try_lease_training("g", min_version=0) is None
    assert pool.pins_keep_back(0)
    pool.unpin(pin, 0)
    assert not pool.pins_keep_back(0)
    assert pool.try_lease_training("g", min_version=0) is not None
    assert not pool.pins_keep_back(0), "rollouts have it, no validation"


def test_the_only_slot_is_a_rollouts_again_when_the_last_trials_have_begun():
    pool, pin = pinned_pool(num_shared=1, capacity=1)
    trial = pool.try_lease_validation("v", pin)
    pool.release(trial)
    assert pool.try_lease_training("g", min_version=0) is None
    last = pool.try_lease_validation("v", pin)
    pin.num_pending = 0
    assert pool.try_lease_training("g", min_version=0) is None
    pool.release(last)
    assert pool.try_lease_training("g", min_version=0) is not None


def test_the_other_replicas_take_over_the_rollouts_of_a_pinned_one():
    pool, pin = pinned_pool(num_shared=3, capacity=2)
    leases = [pool.try_lease_training("g", min_version=0) for _ in range(6)]
    assert [lease.replica_id for lease in leases] == [1, 2, 1, 2, 1, 2]
    assert pool.try_lease_training("h", min_version=0) is None
    assert not pool.pins_keep_back(0), "as many run as if none were pinned"
    pool.unpin(pin, 0)
    assert pool.try_lease_training("h", min_version=0) is None
    pool.release(leases[0])
    assert pool.try_lease_training("h", min_version=0).replica_id == 0


def test_nobody_takes_over_the_rollouts_of_a_dead_replica():
    pool = make_pool(num_shared=2, capacity=2)
    publish(pool, 0, load=[0, 1])
    pool.down(0, pool.slots[0].incarnation)
    leases = [pool.try_lease_training("g", min_version=0) for _ in range(3)]
    assert [lease and lease.replica_id for lease in leases] == [1, 1, None]


def test_pins_keep_back_rollouts_while_the_other_replica_is_down():
    pool, _ = pinned_pool(num_shared=2, capacity=2)
    pool.down(1, pool.slots[1].incarnation)
    assert not pool.pins_keep_back(0)
    assert pool.try_lease_training("g", min_version=0).replica_id == 0, "it lends half of itself"
    assert pool.try_lease_training("h", min_version=0) is None
    assert pool.pins_keep_back(0), "the pinned one would have room"


def test_pins_keep_back_the_newer_version_once_it_could_be_there():
    pool, _ = pinned_pool(num_shared=1, capacity=4, num_pending=0)
    assert not pool.pins_keep_back(0)
    pool.published(1)
    assert pool.pins_keep_back(1)
    pool, _ = pinned_pool(num_shared=2, capacity=1)
    pool.published(1)
    pool.begin_update(1, 1)
    assert not pool.pins_keep_back(1), "the other one loads it, and so would this one"
    pool.end_update(1, 1)
    assert not pool.pins_keep_back(1)
    leases = [pool.try_lease_training("g", min_version=1) for _ in range(2)]
    assert [lease.replica_id for lease in leases] == [1, 1]
    assert not pool.pins_keep_back(1), "as many run as if none were pinned"
    pool.release(leases[0])
    pool.down(1, pool.slots[1].incarnation)
    assert pool.pins_keep_back(1), "this one would have loaded it by now"


def test_without_partial_rollout_a_pin_is_not_blamed_for_the_drain_of_the_others():
    pool, _ = pinned_pool(num_shared=2, capacity=1, partial_rollout=False)
    lease = pool.try_lease_training("g", min_version=0)
    pool.published(1)
    assert pool.try_lease_training("h", min_version=0) is None
    assert not pool.pins_keep_back(0)
    pool.release(lease)
    pool.begin_update(1, 1)
    assert not pool.pins_keep_back(0)


def test_until_the_other_replicas_have_started_the_pinned_one_is_for_rollouts():
    pool = make_pool(num_shared=2, capacity=2)
    publish(pool, 0, load=[0])
    pin = Pin(name="validation", version=0, num_pending=3)
    pool.pin(pin, [0])
    assert pool.try_lease_validation("v", pin) is None
    assert not pool.is_placed(pin), "it has the version, but is kept for rollouts"
    leases = [pool.try_lease_training("g", min_version=0) for _ in range(2)]
    assert [lease.replica_id for lease in leases] == [0, 0]
    assert not pool.pins_keep_back(0), "rollouts have both slots"
    publish(pool, 0, load=[1])
    assert pool.is_placed(pin)
    assert pool.try_lease_training("h", min_version=0).replica_id == 1
    pool.release(leases[0])
    assert pool.try_lease_validation("v", pin).replica_id == 0
    pool.down(1, pool.slots[1].incarnation)
    pool.up(1, Process())
    pool.release(leases[1])
    assert pool.try_lease_validation("w", pin).replica_id == 0, "only the first start counts"


def test_a_dead_replica_is_not_kept_back_by_its_pin():
    pool, _ = pinned_pool(num_shared=1, capacity=1)
    pool.down(0, pool.slots[0].incarnation)
    assert not pool.pins_keep_back(0)


class Driver:
    """Does to a pool what the roles do, in any order, and notes what each lease sees."""

    def __init__(self, rng, *, partial_rollout):
        self.rng = rng
        self.partial_rollout = partial_rollout
        self.pool = make_pool(2, 1, capacity=3, partial_rollout=partial_rollout)
        self.pin = None
        self.seen = {}
        self.pool.published(0)

    def pick(self, items):
        return self.rng.choice(list(items))

    def publish(self):
        self.pool.published(self.pool.latest + 1)

    def load(self):
        """Begin a due update, or end one: the tokens that follow have its version."""
        slot = self.pick(self.pool.slots.values())
        if slot.updating_to is None:
            due = self.pool.due_update(slot.replica_id)
            if due is not None:
                self.pool.begin_update(slot.replica_id, due)
            return
        self.pool.end_update(slot.replica_id, slot.updating_to)
        for lease in slot.leases:
            self.seen[lease].append(slot.version)

    def rollout(self):
        min_version = max(0, self.pool.latest - self.pick(range(3)))
        self.note(self.pool.try_lease_training("group", min_version=min_version))

    def trial(self):
        if self.pin is not None:
            self.note(self.pool.try_lease_validation("trial", self.pin))

    def note(self, lease):
        if lease is not None:
            self.seen[lease] = [lease.version]

    def end(self):
        leases = [lease for lease in self.seen if not lease.released]
        if leases:
            self.pool.release(self.pick(leases))

    def pin_or_unpin(self):
        """A validation ends only when none of its trials runs."""
        if self.pin is None:
            version = max(0, self.pool.latest + self.pick([-1, 0, 0, 1]))
            exclusive, num_pending = self.pick([True, False]), self.pick([0, 2])
            self.pin = Pin(
                name="validation", version=version, num_pending=num_pending, exclusive=exclusive
            )
            dedicated = self.pool.ids(Role.DEDICATED)
            shared = self.pool.choose_for_pin(2 if exclusive else 1, version)
            self.pool.pin(self.pin, self.pick([shared, dedicated]))
            return
        self.pin.num_pending = 0
        for replica_id in self.pool.idle_pinned(self.pin):
            self.pool.unpin(self.pin, replica_id)
        if not self.pin.replica_ids:
            self.pin = None

    def lose(self):
        slot = self.pick(self.pool.slots.values())
        if slot.replica is None:
            self.pool.up(slot.replica_id, Process())
        else:
            self.pool.down(slot.replica_id, slot.incarnation)

    def check(self):
        for lease, versions in self.seen.items():
            if lease.purpose is Purpose.VALIDATION or not self.partial_rollout:
                assert len(versions) == 1, f"{lease} saw versions {versions}"
            assert versions == sorted(versions)
        if self.pin is not None:
            for replica_id in self.pin.replica_ids:
                slot = self.pool.slots[replica_id]
                if slot.num_leases(Purpose.VALIDATION):
                    assert slot.version == self.pin.version
        for slot in self.pool.slots.values():
            assert len(slot.leases) <= 6
            assert slot.num_leases(Purpose.VALIDATION) <= 3
            assert slot.role is Role.SHARED or not slot.num_leases(Purpose.TRAINING)
        assert self.pool.num_leases(Purpose.TRAINING) <= 6


@pytest.mark.parametrize("partial_rollout", [False, True])
def test_whatever_happens_to_a_pool_no_lease_sees_a_version_that_it_must_not(partial_rollout):
    weights = {
        "publish": 2, "load": 12, "rollout": 8, "trial": 8, "end": 6, "pin_or_unpin": 4, "lose": 1
    }  # fmt: skip
    purposes = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        driver = Driver(rng, partial_rollout=partial_rollout)
        for move in rng.choices(list(weights), list(weights.values()), k=500):
            getattr(driver, move)()
            driver.check()
        purposes.update(lease.purpose for lease in driver.seen)
    assert min(purposes[purpose] for purpose in Purpose) >= 500, purposes
