"""What a run is doing at one moment: shown as progress, kept in `status.json`."""

import dataclasses
import functools
import json
from dataclasses import dataclass

from pydantic import TypeAdapter

from freewheel.files import dump_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningValidation:
    """A validation in progress: due at `step`, scores policy version `version`."""

    step: int
    version: int
    num_done: int
    num_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredValidation:
    """The last validation that ended. `ci95` is (low, high).

    `score` is None if no trial completed. A partial one has in `partial` why it is.
    """

    step: int
    version: int
    score: float | None
    ci95: tuple[float, float] | None = None
    num_done: int = 0
    num_total: int = 0
    partial: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One entry of the wait table: `waiter` needs `resource`, which `holder` has.

    `since_s` is when it began, in seconds since the run's first start.
    """

    waiter: str
    resource: str
    holder: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run.

    Attributes:
        phase: `starting`, `running`, `stopping`, `ended`.
        step: trainer steps done; `total_steps` is None while unknown.
        policy_version: version that was published last.
        groups_running: groups in flight on replicas.
        groups_ready: finished groups that wait for the trainer.
        slots_used: groups started and not yet trained, of at most `slots_max`.
        samples_per_s, tokens_per_s: rollouts and response tokens finished lately.
        reward_mean, staleness_mean, staleness_max: of the last trained batch; None before it.
        validation: the running one.
        last_validation: the last that was not skipped.
        last_checkpoint: step of the last complete checkpoint.
        num_dropped_prompts: prompts that cannot be used; `dropped_prompts` has the first of them.
        first_failures: the first failed rollout of each class, in words.
        losses: lost workers, in words; the first of them.
        trainer_waits_for: what the trainer waits for now, None while it computes.
        waits: the wait table.
        wall_s: seconds since the run's first start. `eta_s`: seconds to the end, None if unknown.
    """

    phase: str
    step: int = 0
    total_steps: int | None = None
    policy_version: int = 0
    groups_running: int = 0
    groups_ready: int = 0
    slots_used: int = 0
    slots_max: int = 0
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    reward_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    validation: RunningValidation | None = None
    last_validation: ScoredValidation | None = None
    last_checkpoint: int | None = None
    num_dropped_prompts: int = 0
    dropped_prompts: tuple[str, ...] = ()
    first_failures: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    trainer_waits_for: str | None = None
    waits: tuple[Wait, ...] = ()
    wall_s: float = 0.0
    eta_s: float | None = None

    def to_json(self) -> str:
        """One JSON object; a number that is not finite becomes null."""
        return dump_json(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RunStatus":
        """What `to_json` wrote; unknown members are ignored.

        Raises:
            ValueError: it is not a status.
        """
        # Not the validator's own parser of JSON: it refuses what Python's writes (lone surrogates).
        return _adapter().validate_python(json.loads(text))


@functools.cache
def _adapter() -> TypeAdapter[RunStatus]:
    return TypeAdapter(RunStatus)
