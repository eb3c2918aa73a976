"""The books: every issued sample ends as exactly one of trained, filtered, failed, set aside.

The ledger owns all open groups (started or finished, not yet trained) and the counts of the closed
ones; it writes a row to `samples.jsonl` when a sample's fate is known. Roles change it through its
methods only, on the event loop's thread. Its state is part of every checkpoint.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import compress
from typing import Any

from freewheel.control.staleness import Candidate
from freewheel.control.waits import Signal
from freewheel.errors import FailureClass, InvariantError
from freewheel.protocols import Recorder
from freewheel.types import Member, PromptInfo, Ref, RolloutOutcome

MAX_DROPPED = 10
"""Dropped prompts whose messages are kept for the display; `events.jsonl` has all."""


class Fate(StrEnum):
    """How a sample ends."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    SET_ASIDE = "set_aside"


@dataclass(slots=True, kw_only=True)
class Group:
    """One open group. `start_version` bounds the versions of all its tokens from below.

    `began_s` has the begin of each member's newest attempt, `times_s` begin and end of the attempt
    that gave its outcome, in run time; both by the member's number.
    """

    group_id: int
    epoch: int
    prompt_index: int
    num_prompt_tokens: int
    start_version: int
    max_staleness: int
    ready: bool = False
    attempts: list[int] = field(default_factory=list[int])
    outcomes: dict[int, RolloutOutcome] = field(default_factory=dict[int, RolloutOutcome])
    began_s: dict[int, float] = field(default_factory=dict[int, float])
    times_s: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    payloads: list[Ref] = field(default_factory=list[Ref])

    def sample_id(self, index: int) -> str:
        """Id of the group's sample with this number."""
        return f"{self.group_id}-{index}"

    @property
    def finished(self) -> list[RolloutOutcome]:
        """Outcomes of the finished members, by their number."""
        return [o for _, o in sorted(self.outcomes.items()) if o.failure is None]

    def become_ready(self) -> None:
        """It is complete and waits for the trainer; its oldest version is known now."""
        self.ready = True
        self.start_version = min(outcome.min_version for outcome in self.finished)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token; while it runs, the version that it started under."""
        return self.start_version

    def unfinished(self) -> list[int]:
        """Numbers of the members that have not finished."""
        return [
            index
            for index in range(len(self.attempts))
            if index not in self.outcomes or self.outcomes[index].failure is not None
        ]


class Ledger:
    """All samples of a run. See the module's docstring."""

    def __init__(
        self,
        *,
        group_size: int,
        max_prompt_failures: int,
        recorder: Recorder,
        now_s: Callable[[], float],
        changed: Signal,
    ) -> None:
        self.changed = changed
        self.open: dict[int, Group] = {}
        self.next_group_id = 0
        self.num_trained_groups = 0
        self.num_ready = 0
        self.num_moves = 0
        self.failed_in_a_row = 0
        self.filtered_in_a_row = 0
        self.dropped_in_a_row = 0
        self.num_late = 0
        self._group_size = group_size
        self._max_prompt_failures = max_prompt_failures
        self._recorder = recorder
        self._now_s = now_s
        self._issued = 0
        self._fates: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._prompt_failures: Counter[int] = Counter()
        self._named: set[int] = set()
        self.dropped: list[str] = []
        self.first_failures: dict[FailureClass, str] = {}

    # -- issuing ------------------------------------------------------------------------------

    def is_set_aside(self, prompt_index: int) -> bool:
        """True if groups of this prompt failed too often."""
        return self._prompt_failures[prompt_index] >= self._max_prompt_failures

    def issue(
        self, *, epoch: int, prompt: PromptInfo, start_version: int, max_staleness: int
    ) -> Group:
        """Open the next group; its staleness bound stays that of its start."""
        group = self._make_group(epoch, prompt, start_version, max_staleness)
        self.open[group.group_id] = group
        self.dropped_in_a_row = 0
        self._moved()
        return group

    def drop(self, *, epoch: int, prompt: PromptInfo) -> None:
        """Issue the next group and close it at once: its prompt cannot be used."""
        group = self._make_group(epoch, prompt, start_version=-1, max_staleness=0)
        if self.is_set_aside(prompt.prompt_index):
            fate, failure, message = Fate.SET_ASIDE, None, "failed too often"
        else:
            fate, failure, message = Fate.FILTERED, prompt.failure, prompt.message
        self._name_once(prompt.prompt_index, failure, message)
        self.dropped_in_a_row += 1
        for index in range(self._group_size):
            outcome = RolloutOutcome(
                sample_id=group.sample_id(index),
                attempt=0,
                failure=failure,
                message=message,
                num_prompt_tokens=prompt.num_prompt_tokens,
            )
            self._close_sample(group, outcome, fate)
        self._moved()

    def _name_once(self, prompt_index: int, failure: FailureClass | None, message: str) -> None:
        """Say which prompt is dropped, the first time it is."""
        if prompt_index in self._named:
            return
        self._named.add(prompt_index)
        self._recorder.event(
            "prompt_dropped", prompt_index=prompt_index, failure=failure, message=message
        )
        if len(self.dropped) < MAX_DROPPED:
            self.dropped.append(f"prompt {prompt_index}: {message}")

    @property
    def num_dropped(self) -> int:
        """Prompts that were dropped, each counted once."""
        return len(self._named)

    def _make_group(
        self, epoch: int, prompt: PromptInfo, start_version: int, max_staleness: int
    ) -> Group:
        group = Group(
            group_id=self.next_group_id,
            epoch=epoch,
            prompt_index=prompt.prompt_index,
            num_prompt_tokens=prompt.num_prompt_tokens,
            start_version=start_version,
            max_staleness=max_staleness,
            attempts=[0] * self._group_size,
        )
        self.next_group_id += 1
        self._issued += self._group_size
        return group

    # -- while a group runs -------------------------------------------------------------------

    def begin_attempt(
        self, group: Group, indices: Sequence[int], seed: Callable[[str, int], int]
    ) -> tuple[Member, ...]:
        """Start another attempt of these members."""
        members: list[Member] = []
        for index in indices:
            group.attempts[index] += 1
            group.began_s[index] = self._now_s()
            sample_id, attempt = group.sample_id(index), group.attempts[index]
            members.append(
                Member(sample_id=sample_id, attempt=attempt, seed=seed(sample_id, attempt))
            )
        return tuple(members)

    def absorb(self, group: Group, outcomes: Sequence[RolloutOutcome], payload: Ref | None) -> None:
        """Take the outcomes of an attempt. Those that come too late are ignored and counted.

        Too late is what belongs to an earlier attempt, a second answer for the same one, and
        whatever comes to a group that is ready or closed: its fate is decided.

        Raises:
            InvariantError: an outcome of no attempt that was begun, or late and current ones with
                trajectories in one payload, which cannot be parted.
        """
        is_late = [self._is_late(group, outcome) for outcome in outcomes]
        late = list(compress(outcomes, is_late))
        taken = [o for o, too_late in zip(outcomes, is_late, strict=True) if not too_late]
        finished = [o for o in taken if o.failure is None]
        if late:
            self.ignore_late(late)
            if finished and any(o.failure is None for o in late):
                raise InvariantError(
                    f"group {group.group_id}: late and current trajectories came together: "
                    f"{[(o.sample_id, o.attempt) for o in outcomes]}"
                )
        self._book(group, taken)
        if payload is not None and finished:
            group.payloads.append(payload)
        self._moved()

    def _book(self, group: Group, outcomes: Sequence[RolloutOutcome]) -> None:
        now_s, longest_s = self._now_s(), max((o.wall_s for o in outcomes), default=0.0)
        for outcome in outcomes:
            index = _number(outcome)
            group.outcomes[index] = outcome
            if outcome.failure is not None:
                self.first_failures.setdefault(outcome.failure, outcome.message)
            # They come together, when the last has ended.
            ended_s = now_s - (longest_s - outcome.wall_s if outcome.wall_s else 0.0)
            began_s = ended_s - outcome.wall_s if outcome.wall_s else 0.0
            group.times_s[index] = (max(began_s, group.began_s[index]), ended_s)

    def _is_late(self, group: Group, outcome: RolloutOutcome) -> bool:
        index = _number(outcome)
        current = group.attempts[index] if index < len(group.attempts) else 0
        if outcome.sample_id != group.sample_id(index) or outcome.attempt > current:
            raise InvariantError(
                f"group {group.group_id}: outcome of sample {outcome.sample_id}, attempt "
                f"{outcome.attempt}, but attempt {current} is the current one"
            )
        booked = group.outcomes.get(index)
        is_decided = group.ready or self.open.get(group.group_id) is not group
        is_booked = booked is not None and booked.attempt == current
        return is_decided or is_booked or outcome.attempt < current

    def ignore_late(self, outcomes: Sequence[RolloutOutcome]) -> None:
        """Count outcomes that came when another attempt had taken their place."""
        self.num_late += len(outcomes)
        self._recorder.event("late_results", samples=[[o.sample_id, o.attempt] for o in outcomes])

    def make_ready(self, group: Group) -> None:
        """The group is complete and waits for the trainer."""
        group.become_ready()
        self.num_ready += 1
        self.failed_in_a_row = self.filtered_in_a_row = 0
        self._moved()

    def run_again(self, group_ids: Sequence[int]) -> list[Group]:
        """Open groups again whose trajectories are lost; their members have further attempts."""
        groups = [self.open[group_id] for group_id in group_ids]
        for group in groups:
            if not group.ready:
                raise InvariantError(f"group {group.group_id} is not ready, nothing of it is lost")
            group.ready = False
            group.outcomes.clear()
            group.times_s.clear()
            group.payloads.clear()
        self.num_ready -= len(groups)
        self._moved()
        return groups

    # -- closing ------------------------------------------------------------------------------

    def train(self, group_ids: Sequence[int], step: int) -> None:
        """Close groups as trained in a step."""
        groups = [self._pop(group_id, ready=True) for group_id in group_ids]
        self.num_ready -= len(groups)
        for group in groups:
            for outcome in group.outcomes.values():
                if outcome.failure is None:
                    self._close_sample(group, outcome, Fate.TRAINED, step)
                else:
                    self._close_sample(group, outcome, Fate.FAILED)
        self.num_trained_groups += len(groups)
        self._moved()

    def filter(self, group: Group) -> None:
        """Close a complete group that carries no gradient."""
        self._pop(group.group_id, ready=False)
        for outcome in group.outcomes.values():
            fate = Fate.FILTERED if outcome.failure is None else Fate.FAILED
            self._close_sample(group, outcome, fate)
        self.failed_in_a_row = 0
        self.filtered_in_a_row += 1
        self._moved()

    def fail(self, group: Group) -> None:
        """Close a group of which too few members finished."""
        self._pop(group.group_id, ready=False)
        self._prompt_failures[group.prompt_index] += 1
        self.failed_in_a_row += 1
        for outcome in group.outcomes.values():
            self._close_sample(group, outcome, Fate.FAILED)
        self._moved()

    def _pop(self, group_id: int, *, ready: bool) -> Group:
        group = self.open.pop(group_id, None)
        if group is None or group.ready is not ready:
            raise InvariantError(f"group {group_id} is closed twice, or before its time")
        return group

    def _close_sample(
        self, group: Group, outcome: RolloutOutcome, fate: Fate, step: int | None = None
    ) -> None:
        failure = outcome.failure
        if fate is Fate.FAILED and failure is None:
            failure = FailureClass.GROUP
        self._fates[fate.value] += 1
        if failure is not None:
            self._failures[failure.value] += 1
        now_s = self._now_s()
        began_s, ended_s = group.times_s.get(_number(outcome), (now_s, now_s))
        self._recorder.sample(
            {
                "sample_id": outcome.sample_id,
                "group_id": group.group_id,
                "epoch": group.epoch,
                "prompt_index": group.prompt_index,
                "attempt": outcome.attempt,
                "status": fate.value,
                "failure": None if failure is None else failure.value,
                "message": outcome.message,
                "reward": outcome.reward,
                "num_prompt_tokens": outcome.num_prompt_tokens or group.num_prompt_tokens,
                "num_response_tokens": outcome.num_response_tokens,
                "version_spans": [list(span) for span in outcome.version_spans],
                "started_s": round(began_s, 6),
                "ended_s": round(ended_s, 6),
                "trained_step": step,
            }
        )

    def _moved(self) -> None:
        self.num_moves += 1
        self.changed.notify()

    # -- looking ------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """Open groups as the choice of a batch sees them."""
        return [
            Candidate(
                group_id=g.group_id, expires=g.oldest_version + g.max_staleness, ready=g.ready
            )
            for g in self.open.values()
        ]

    def counts(self) -> dict[str, int]:
        """Samples by fate, as `summary.json` gives them."""
        return {
            "issued": self._issued,
            **{fate.value: self._fates[fate.value] for fate in Fate},
            "open": len(self.open) * self._group_size,
        }

    def failures(self) -> dict[str, int]:
        """Closed samples by class of failure."""
        return dict(sorted(self._failures.items()))

    def check(self) -> None:
        """Raise InvariantError unless every issued sample is open or closed exactly once."""
        counts = self.counts()
        closed_or_open = sum(counts[fate.value] for fate in Fate) + counts["open"]
        if counts["issued"] != closed_or_open:
            raise InvariantError(f"the ledger does not add up: {counts}")

    # -- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; trajectories of ready groups are written beside it."""
        self.check()
        return {
            "next_group_id": self.next_group_id,
            "num_trained_groups": self.num_trained_groups,
            "issued": self._issued,
            "fates": dict(self._fates),
            "failures": dict(self._failures),
            "late": self.num_late,
            "prompt_failures": {str(k): v for k, v in self._prompt_failures.items()},
            "dropped_prompts": sorted(self._named),
            "open": [_group_state(group) for group in self.open.values()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`. Groups that were running start again, as further attempts.

        Ready groups have no trajectories before `attach`.
        """
        self.next_group_id = state["next_group_id"]
        self.num_trained_groups = state["num_trained_groups"]
        self._issued = state["issued"]
        self._fates = Counter(state["fates"])
        self._failures = Counter(state["failures"])
        self.num_late = state.get("late", 0)
        self._prompt_failures = Counter({int(k): v for k, v in state["prompt_failures"].items()})
        self._named = set(state["dropped_prompts"])
        self.open = {row["group_id"]: _restore_group(row) for row in state["open"]}
        self.num_ready = sum(group.ready for group in self.open.values())
        self.check()

    def ready_ids(self) -> list[int]:
        """Ids of the groups that are ready to be trained."""
        return [group.group_id for group in self.open.values() if group.ready]

    def attach(self, trajectories: Mapping[int, Ref]) -> None:
        """Give restored ready groups their trajectories, by group id."""
        for group_id in self.ready_ids():
            self.open[group_id].payloads = [trajectories[group_id]]


def without_outcomes(state: dict[str, Any], group_ids: Collection[int]) -> dict[str, Any]:
    """A ledger's `state()` in which these groups are not finished: they run again."""

    def reopened(row: dict[str, Any]) -> dict[str, Any]:
        if row["group_id"] not in group_ids:
            return row
        kept = {k: v for k, v in row.items() if k not in ("outcomes", "times_s")}
        return {**kept, "ready": False}

    return {**state, "open": [reopened(row) for row in state["open"]]}


def _number(outcome: RolloutOutcome) -> int:
    """Number of the sample in its group."""
    return int(outcome.sample_id.rpartition("-")[2])


def _group_state(group: Group) -> dict[str, Any]:
    state: dict[str, Any] = {
        "group_id": group.group_id,
        "epoch": group.epoch,
        "prompt_index": group.prompt_index,
        "num_prompt_tokens": group.num_prompt_tokens,
        "start_version": group.start_version,
        "max_staleness": group.max_staleness,
        "ready": group.ready,
        "attempts": list(group.attempts),
    }
    if group.ready:
        state["outcomes"] = {str(i): asdict(o) for i, o in sorted(group.outcomes.items())}
        state["times_s"] = {str(i): list(times) for i, times in sorted(group.times_s.items())}
    return state


def _restore_group(row: dict[str, Any]) -> Group:
    own = ("outcomes", "times_s", "attempts")
    return Group(
        **{key: value for key, value in row.items() if key not in own},
        attempts=list(row["attempts"]),
        outcomes={int(i): restore_outcome(o) for i, o in row.get("outcomes", {}).items()},
        times_s={int(i): (began, ended) for i, (began, ended) in row.get("times_s", {}).items()},
    )


def restore_outcome(row: dict[str, Any]) -> RolloutOutcome:
    """Undo `asdict` and JSON."""
    spans = tuple((int(version), int(tokens)) for version, tokens in row["version_spans"])
    failure = None if row["failure"] is None else FailureClass(row["failure"])
    fields: dict[str, Any] = {**row, "version_spans": spans, "failure": failure}
    return RolloutOutcome(**fields)
