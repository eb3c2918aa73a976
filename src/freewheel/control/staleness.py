"""How far rollouts may run ahead of training: the admission rule and the check on consumption.

Symbols: B groups a trainer step; k steps between publications; C = kB groups a version; q the
staleness threshold; S the staleness bound in versions; T(v) groups trained when v was published.

Admission: with t groups trained and o open (started, not yet trained), one more group may start on
a replica that holds version v iff t + o < T(v) + floor((1 + q) C).
Because t >= T(v), at most (1 + q) C groups are ever open; because T(v + j) = T(v) + jC, whatever is
started under v fits into what versions v .. v + ceil(q) train on.
Consumption: a batch is only taken if all groups that stay behind can still be trained within S
versions of their oldest token (earliest deadline first); the trainer waits for the slow ones rather
than dropping or overtaking them for ever. `docs/staleness.md` has the proof.
"""

from collections.abc import Iterable
from dataclasses import dataclass


class StalenessBound:
    """The admission rule. Remembers at which count of trained groups each version was published.

    `max_open` is floor((1 + q) C), `max_staleness` is S.
    """

    def __init__(self, *, max_open: int, max_staleness: int) -> None:
        self.max_open = max_open
        self.max_staleness = max_staleness
        self._published: dict[int, int] = {}

    def publish(self, version: int, *, num_trained: int) -> None:
        """Record a publication, and forget versions that no start can need any more."""
        self._published[version] = num_trained
        for old in [v for v in self._published if v < version - self.max_staleness - 1]:
            del self._published[old]

    def knows(self, version: int) -> bool:
        """True if the version's publication is recorded."""
        return version in self._published

    def required_version(self, *, num_trained: int, num_open: int) -> int | None:
        """Oldest version under which one more group may start; None if it must wait."""
        position = num_trained + num_open
        for version, base in self._published.items():
            if position < base + self.max_open:
                return version
        return None

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: version -> groups trained at its publication."""
        return {str(version): trained for version, trained in self._published.items()}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from `state()`."""
        self._published = {int(version): trained for version, trained in state.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An open group as the choice of a batch sees it.

    `expires` is the last version that may train on it: that of its oldest token plus S. While it
    runs, the version that it started under stands for that of its oldest token.
    """

    group_id: int
    expires: int
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """Where the trainer stands when it chooses a batch.

    Attributes:
        size: groups to take.
        version: the trainer's policy version.
        steps_left: trainer steps until the next publication, this one included.
        groups_per_step: B.
        groups_per_version: C.
    """

    size: int
    version: int
    steps_left: int
    groups_per_step: int
    groups_per_version: int


def choose_batch(open_groups: Iterable[Candidate], rule: BatchRule) -> list[int] | None:
    """Ids of the groups to train on now, oldest first; None: wait.

    Takes the ready groups that expire first, and only if every group left behind still fits into
    the trainer's steps before it expires.
    """
    groups = list(open_groups)
    ready = sorted(
        (group for group in groups if group.ready), key=lambda g: (g.expires, g.group_id)
    )
    if len(ready) < rule.size:
        return None
    chosen = ready[: rule.size]
    chosen_ids = {group.group_id for group in chosen}
    left_behind = (group for group in groups if group.group_id not in chosen_ids)
    room = (rule.steps_left - 1) * rule.groups_per_step
    for num_before, expires in enumerate(sorted(group.expires for group in left_behind)):
        if num_before >= room + (expires - rule.version) * rule.groups_per_version:
            return None
    return sorted(chosen_ids)
