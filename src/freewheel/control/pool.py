"""The pool of replicas: who may run on which, and which weights each should hold.

Decisions only: plain methods change the state and say what to do; `replica_loop.py` does it. One
signal, `changed`, is notified whenever a waiter may have become able to go on.

Invariants: a replica pinned at v takes no other version until it is released; a lease of a
validation is only given on a replica that holds exactly the pinned version; a replica goes back to
an older version only when nothing runs on it; without partial rollouts it takes any version only
then, and nothing starts on it while it does.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from freewheel.control.waits import Signal
from freewheel.errors import InvariantError
from freewheel.protocols import Replica
from freewheel.types import Purpose

NO_VERSION = -1


class Role(StrEnum):
    """What a replica is there for."""

    SHARED = "shared"
    DEDICATED = "dedicated"


@dataclass(slots=True, eq=False, kw_only=True)
class Pin:
    """A validation's hold on replicas.

    `num_pending`: groups it has not yet placed. `exclusive`: no rollout runs beside it.
    """

    name: str
    version: int
    num_pending: int
    exclusive: bool = False
    replica_ids: set[int] = field(default_factory=set[int])


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """The right to run one group on a replica, under `version` or (training) a newer one."""

    replica_id: int
    replica: Replica
    incarnation: int
    version: int
    purpose: Purpose
    holder: str
    released: bool = False
    lost: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """One replica as the pool sees it. `replica` is None while there is no process that serves.

    `has_served`: one of its processes has had weights.
    """

    replica_id: int
    role: Role
    replica: Replica | None = None
    incarnation: int = 0
    version: int = NO_VERSION
    has_served: bool = False
    updating_to: int | None = None
    pin: Pin | None = None
    leases: list[Lease] = field(default_factory=list[Lease])
    busy_s: float = 0.0
    busy_since_s: float | None = None

    def num_leases(self, purpose: Purpose) -> int:
        """Leases given for this purpose."""
        return sum(lease.purpose is purpose for lease in self.leases)


class Pool:
    """All replicas of a run. See the module's docstring.

    Attributes:
        num_updates: loads of weights that have begun.
    """

    def __init__(
        self,
        *,
        num_shared: int,
        num_dedicated: int,
        capacity: int,
        partial_rollout: bool,
        changed: Signal,
        now_s: Callable[[], float],
    ) -> None:
        self.changed = changed
        self._now_s = now_s
        self.latest = NO_VERSION
        self.num_updates = 0
        self._capacity = capacity
        self._partial_rollout = partial_rollout
        roles = [Role.SHARED] * num_shared + [Role.DEDICATED] * num_dedicated
        self.slots = {i: Slot(replica_id=i, role=role) for i, role in enumerate(roles)}

    # -- replicas come and go -----------------------------------------------------------------

    def up(self, replica_id: int, replica: Replica) -> None:
        """A new process serves under this number; it has no weights yet."""
        slot = self.slots[replica_id]
        slot.replica = replica
        slot.incarnation += 1
        slot.version = NO_VERSION
        slot.updating_to = None
        self.changed.notify()

    def down(self, replica_id: int, incarnation: int) -> Replica | None:
        """The process is gone or of no use.

        Returns:
            It, to be killed, so that whoever still waits for it is told; None if it was replaced
            already (a late report).
        """
        slot = self.slots[replica_id]
        if slot.replica is None or slot.incarnation != incarnation:
            return None
        gone, slot.replica = slot.replica, None
        slot.version = NO_VERSION
        slot.updating_to = None
        for lease in slot.leases:
            lease.lost = True
        slot.leases.clear()
        self._clock_busy(slot)
        self.changed.notify()
        return gone

    # -- weights ------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """A newer version can be fetched."""
        self.latest = version
        self.changed.notify()

    def target_version(self, slot: Slot) -> int:
        """The version that a replica should hold."""
        if slot.pin is not None:
            return slot.pin.version
        if slot.role is Role.DEDICATED:
            return slot.version
        return self.latest

    def due_update(self, replica_id: int) -> int | None:
        """The version that this replica should load now, if any."""
        slot = self.slots[replica_id]
        target = self.target_version(slot)
        if slot.replica is None or slot.updating_to is not None or target == slot.version:
            return None
        if target > self.latest:
            return None  # pinned for a version that is about to be published
        may_update = not slot.leases or (self._partial_rollout and target > slot.version)
        return target if may_update else None

    def begin_update(self, replica_id: int, version: int) -> None:
        """The replica starts to load a version."""
        self.slots[replica_id].updating_to = version
        self.num_updates += 1

    def end_update(self, replica_id: int, version: int) -> None:
        """The replica holds the version now."""
        slot = self.slots[replica_id]
        slot.version = version
        slot.has_served = True
        slot.updating_to = None
        self.changed.notify()

    def cancel_update(self, replica_id: int) -> None:
        """The version could not be had; the replica is as it was."""
        self.slots[replica_id].updating_to = None
        self.changed.notify()

    @property
    def is_syncing(self) -> bool:
        """True while a replica loads a version, or should."""
        loading = any(slot.updating_to is not None for slot in self.slots.values())
        return loading or any(self.due_update(i) is not None for i in self.slots)

    def _changes_version(self, slot: Slot) -> bool:
        """True if it loads a version, or waits to, that no rollout may see beside its present one.

        A newer one may come to rollouts in flight if they are partial; an older one never.
        """
        if slot.updating_to is not None:
            return slot.updating_to < slot.version or not self._partial_rollout
        target = self.target_version(slot)
        if target == slot.version or target > self.latest:
            return False
        return target < slot.version or not self._partial_rollout

    # -- leases -------------------------------------------------------------------------------

    def try_lease_training(self, holder: str, *, min_version: int) -> Lease | None:
        """A lease on the least loaded replica that holds `min_version` or newer, if one is free."""
        return self._lease(self._free_for_training(min_version), Purpose.TRAINING, holder)

    def _free_for_training(self, min_version: int) -> list[Slot]:
        """Replicas that a rollout may have; one that a validation wants only if no other is there.

        Then it has up to half of the slots: a moment in which the others load what this one holds
        already need not hold up rollouts.
        """
        if self._is_full():
            return []
        able = [
            slot
            for slot in self.slots.values()
            if slot.role is Role.SHARED
            and slot.version >= max(min_version, 0)
            and len(slot.leases) < self._training_capacity(slot)
            and not self._changes_version(slot)
        ]
        free = [slot for slot in able if not self._is_wanted_by_validation(slot)]
        return free or [slot for slot in able if self._may_be_lent(slot)]

    def _is_full(self) -> bool:
        """True if as many rollouts run as all shared replicas have slots."""
        total = self._capacity * len(self.ids(Role.SHARED))
        return self.num_leases(Purpose.TRAINING) >= total

    def _training_capacity(self, slot: Slot) -> int:
        """Slots of a replica; those of pinned ones are shared out among the others."""
        if slot.pin is not None:
            return self._capacity
        shared = [s for s in self.slots.values() if s.role is Role.SHARED]
        num_free = sum(s.pin is None for s in shared)
        return ceil(self._capacity * len(shared) / num_free)

    def _may_be_lent(self, slot: Slot) -> bool:
        """True if a rollout may have a slot that a validation would take sooner or later."""
        alone = slot.pin is not None and slot.pin.exclusive
        return not alone and slot.num_leases(Purpose.TRAINING) < self._capacity // 2

    def try_lease_validation(self, holder: str, pin: Pin) -> Lease | None:
        """A lease on the least loaded replica of a pin that holds its version, if one is free."""
        candidates = [
            slot
            for slot in (self.slots[i] for i in sorted(pin.replica_ids))
            if self._takes_trials(slot, pin)
            and slot.updating_to is None
            and len(slot.leases) < self._capacity
            and slot.num_leases(Purpose.VALIDATION) < self._validation_capacity(slot)
        ]
        return self._lease(candidates, Purpose.VALIDATION, holder)

    def release(self, lease: Lease) -> None:
        """Give a lease back. One that was lost with its replica is given back all the same."""
        if lease.released:
            raise InvariantError(f"the lease of {lease.holder} is released twice")
        lease.released = True
        if not lease.lost:
            slot = self.slots[lease.replica_id]
            slot.leases.remove(lease)
            self._clock_busy(slot)
        self.changed.notify()

    def _lease(self, candidates: list[Slot], purpose: Purpose, holder: str) -> Lease | None:
        if not candidates:
            return None
        slot = min(candidates, key=lambda s: (len(s.leases), s.replica_id))
        if slot.replica is None:
            raise InvariantError(f"replica {slot.replica_id} has a version but no process")
        lease = Lease(
            replica_id=slot.replica_id,
            replica=slot.replica,
            incarnation=slot.incarnation,
            version=slot.version,
            purpose=purpose,
            holder=holder,
        )
        slot.leases.append(lease)
        self._clock_busy(slot)
        return lease

    def _clock_busy(self, slot: Slot) -> None:
        now_s = self._now_s()
        if slot.busy_since_s is not None:
            slot.busy_s += now_s - slot.busy_since_s
        slot.busy_since_s = now_s if slot.leases else None

    def _validation_capacity(self, slot: Slot) -> int:
        """Validation leaves half of the slots to rollouts where they have no other replica."""
        alone = slot.pin is not None and slot.pin.exclusive
        if alone or slot.role is Role.DEDICATED or self._has_free_shared():
            return self._capacity
        return max(1, self._capacity // 2)

    def _is_wanted_by_validation(self, slot: Slot) -> bool:
        """True if the free slots of this pinned replica are a validation's."""
        if slot.pin is None:
            return False
        if slot.pin.exclusive:
            return True
        if slot.pin.num_pending == 0 or self._rollouts_come_first():
            return False
        left_for_rollouts = self._capacity - self._validation_capacity(slot)
        return slot.num_leases(Purpose.TRAINING) >= left_for_rollouts

    def _rollouts_come_first(self) -> bool:
        """True while none of the replicas that are left to rollouts has ever had weights.

        Their start is no reason to keep rollouts waiting for a validation; a loss later on is, as
        it may last longer than a validation.
        """
        free = [s for s in self.slots.values() if s.role is Role.SHARED and s.pin is None]
        return bool(free) and not any(s.has_served for s in free)

    def _has_free_shared(self) -> bool:
        return any(s.role is Role.SHARED and s.pin is None for s in self.slots.values())

    # -- pins ---------------------------------------------------------------------------------

    def pin(self, pin: Pin, replica_ids: Iterable[int]) -> None:
        """Hold these replicas at the pin's version, as soon as they have it."""
        for replica_id in replica_ids:
            slot = self.slots[replica_id]
            if slot.pin is not None:
                raise InvariantError(
                    f"replica {replica_id} is pinned by {slot.pin.name}, {pin.name} wants it too"
                )
            slot.pin = pin
            pin.replica_ids.add(replica_id)
        self.changed.notify()

    def unpin(self, pin: Pin, replica_id: int) -> None:
        """Return one replica to the pool."""
        slot = self.slots[replica_id]
        if slot.pin is not pin:
            raise InvariantError(f"replica {replica_id} is not pinned by {pin.name}")
        slot.pin = None
        pin.replica_ids.discard(replica_id)
        self.changed.notify()

    def is_placed(self, pin: Pin) -> bool:
        """True if a replica of the pin has its version and is not kept for rollouts."""
        return any(self._takes_trials(self.slots[i], pin) for i in pin.replica_ids)

    def _takes_trials(self, slot: Slot, pin: Pin) -> bool:
        """True if trials may run on this replica of a pin, now or as soon as it has a slot."""
        is_kept = slot.role is Role.SHARED and self._rollouts_come_first()
        return slot.version == pin.version and not is_kept

    def idle_pinned(self, pin: Pin) -> list[int]:
        """Pinned replicas on which nothing of the validation runs any more."""
        return [
            replica_id
            for replica_id in sorted(pin.replica_ids)
            if self.slots[replica_id].num_leases(Purpose.VALIDATION) == 0
        ]

    def choose_for_pin(self, count: int, version: int) -> list[int]:
        """The shared replicas that reach a version soonest: alive, no step back, few rollouts."""
        free = [s for s in self.slots.values() if s.role is Role.SHARED and s.pin is None]
        free.sort(
            key=lambda s: (
                s.replica is None,
                s.version > version,
                -s.version,
                len(s.leases),
                s.replica_id,
            )
        )
        return sorted(slot.replica_id for slot in free[:count])

    # -- looking ------------------------------------------------------------------------------

    def ids(self, role: Role) -> list[int]:
        """Numbers of the replicas with this role."""
        return [slot.replica_id for slot in self.slots.values() if slot.role is role]

    def num_leases(self, purpose: Purpose) -> int:
        """Leases given for this purpose, over all replicas."""
        return sum(slot.num_leases(purpose) for slot in self.slots.values())

    def busy_s(self) -> float:
        """Seconds in which a shared replica had work, summed over them."""
        shared = [slot for slot in self.slots.values() if slot.role is Role.SHARED]
        for slot in shared:
            self._clock_busy(slot)
        return sum(slot.busy_s for slot in shared)

    def replace_dead(self, pin: Pin) -> list[int]:
        """Pin a replica that lives instead of those of a pin that are all down; says which."""
        if any(self.slots[i].replica is not None for i in pin.replica_ids):
            return []
        chosen = self.choose_for_pin(1, pin.version)
        if not chosen or self.slots[chosen[0]].replica is None:
            return []
        for replica_id in sorted(pin.replica_ids):
            self.unpin(pin, replica_id)
        self.pin(pin, chosen)
        return chosen

    def pins_keep_back(self, min_version: int) -> bool:
        """True if no rollout can have a replica, but one could if none were pinned."""
        if self._is_full() or self._free_for_training(min_version):
            return False
        shared = [s for s in self.slots.values() if s.role is Role.SHARED and s.replica is not None]
        others_are_up_to_date = all(s.version == self.latest for s in shared if s.pin is None)
        return any(
            self._would_be_free(slot, min_version, others_are_up_to_date=others_are_up_to_date)
            for slot in shared
            if slot.pin is not None
        )

    def _would_be_free(self, slot: Slot, min_version: int, *, others_are_up_to_date: bool) -> bool:
        """True if a rollout could have this pinned replica, were it not pinned."""
        if slot.num_leases(Purpose.TRAINING) >= self._capacity:
            return False
        may_stay = self._partial_rollout or slot.version == self.latest
        is_loading = slot.updating_to is not None and slot.updating_to > slot.version
        if slot.version >= max(min_version, 0) and may_stay:
            return self._partial_rollout or not is_loading
        # It would have taken the newest version by the time the others have it, not before.
        return others_are_up_to_date and not is_loading

    def busy_with(self) -> list[str]:
        """Who could make a replica free: the holders of leases and pins, replicas that start."""
        names = [lease.holder for slot in self.slots.values() for lease in slot.leases]
        names += [slot.pin.name for slot in self.slots.values() if slot.pin is not None]
        names += [
            f"replica-{slot.replica_id}"
            for slot in self.slots.values()
            if slot.replica is None or slot.updating_to is not None
        ]
        return names or ["train"]

    def describe(self) -> str:
        """State of all replicas in one line each, for wait tables and reports."""
        return "; ".join(
            f"replica {s.replica_id}: "
            + ("down" if s.replica is None else f"version {s.version}")
            + ("" if s.updating_to is None else f", loading {s.updating_to}")
            + ("" if s.pin is None else f", pinned by {s.pin.name}")
            + f", {len(s.leases)} leases"
            for s in self.slots.values()
        )
