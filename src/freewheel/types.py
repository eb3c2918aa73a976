"""The messages that roles pass to each other. All frozen; nobody changes one once it is built.

Vocabulary: a prompt gives a *group* of `rollout.n` *rollouts* (samples); each rollout that finishes
gives a *trajectory* (its token record); trajectories of whole groups make a *batch*. A *policy
version* is an int: 0 for the initial weights, one more with each publication. A `Ref` names bulk
data that lives between workers; the control plane passes it on and never looks inside.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from freewheel.errors import FailureClass
from freewheel.unicode_text import well_formed

Ref: TypeAlias = Any
"""Opaque reference to bulk data (Ray object reference; the data itself under simulation)."""

VersionSpans: TypeAlias = tuple[tuple[int, int], ...]
"""(policy version, number of response tokens sampled under it), in order of sampling."""


class Purpose(StrEnum):
    """What a lease on a replica is for."""

    TRAINING = "training"
    VALIDATION = "validation"


class Split(StrEnum):
    """Which prompts: those to train on, or the held-out ones."""

    TRAIN = "train"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample a response.

    `temperature=0` is greedy. `top_p=1`, `top_k=0` (or -1) and `min_p=0` switch the filters off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """What the control plane knows of a prompt: never its text.

    `failure` is set when the prompt cannot be used (over-long, malformed); `message` says why.
    """

    prompt_index: int
    num_prompt_tokens: int
    failure: FailureClass | None = None
    message: str = ""

    def __post_init__(self) -> None:
        """The message is well-formed Unicode, whatever the file holds."""
        object.__setattr__(self, "message", well_formed(self.message))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """Size and identity of one split. `fingerprint` changes when its content does."""

    num_prompts: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One attempt at one sample of a group. A retry has the same `sample_id`, another `attempt`."""

    sample_id: str
    attempt: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Run these members of a group on one replica.

    `request_id` is unique for each request of a run, so that a late answer can be told from a
    current one. `timeout_s` bounds each member; members past it are returned as failed (timeout).
    """

    request_id: str
    group_id: int
    split: Split
    purpose: Purpose
    prompt_index: int
    members: tuple[Member, ...]
    sampling: SamplingParams
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """What became of one member: everything but its tokens.

    A finished rollout has `failure is None` and a `reward`. `answer` is the extracted answer, used
    for majority@n. Times are seconds spent; `wall_s` from the rollout's start to its end, 0 if it
    never ran or nobody could say. (Durations, as each worker has a clock of its own.)
    """

    sample_id: str
    attempt: int
    failure: FailureClass | None = None
    message: str = ""
    reward: float | None = None
    answer: str | None = None
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    version_spans: VersionSpans = ()
    finish_reason: str = ""
    gen_s: float = 0.0
    reward_s: float = 0.0
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        """What user code said is well-formed Unicode from here on: records and displays take it."""
        object.__setattr__(self, "message", well_formed(self.message))
        if isinstance(self.answer, str):
            object.__setattr__(self, "answer", well_formed(self.answer))

    @property
    def min_version(self) -> int:
        """Oldest version that sampled a token of it. Raises ValueError if it has no token."""
        return min(version for version, _ in self.version_spans)

    @property
    def max_version(self) -> int:
        """Newest version that sampled a token of it. Raises ValueError if it has no token."""
        return max(version for version, _ in self.version_spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """Outcomes of all members of a request, and a reference to the finished ones' trajectories.

    `payload` refers to a `list[Trajectory]`, in the order of the finished outcomes; it is None for
    validation, whose tokens nobody reads again.
    """

    request_id: str
    outcomes: tuple[RolloutOutcome, ...]
    payload: Ref | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Token record of one finished rollout; T = prompt and response tokens together.

    Attributes:
        sample_id: id of the sample.
        group_id: id of its group; advantages are relative to the group.
        reward: scalar reward of the whole rollout.
        token_ids: int32 (T,), prompt then response.
        loss_mask: bool (T,), true where the policy sampled the token as the configuration says:
            not the environment's tokens, nor a turn that it had sampled in another way.
        rollout_logprobs: float32 (T,), log-probability of each sampled token under the
            distribution it was sampled from; 0 where `loss_mask` is false.
        versions: int32 (T,), policy version that sampled each token; -1 where `loss_mask` is false.
    """

    sample_id: str
    group_id: int
    reward: float
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    rollout_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Continue these tokens.

    `request_id` is unique while the request is in the engine; of a rollout, it begins with the id
    of the `GroupRequest` and a slash.
    """

    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled for one request; T = tokens sampled, the end token included.

    Attributes:
        request_id: the request's.
        token_ids: int32 (T,).
        logprobs: float32 (T,), of each token under the distribution it was sampled from (after
            temperature and filters).
        versions: int32 (T,), policy version that sampled each token.
        finish_reason: `stop` (end token or stop string), `length`, `abort`, `timeout`.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: str


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Weights:
    """One published policy version. `ref` refers to what replicas load.

    What it refers to may go with the last reference to this object.
    """

    version: int
    num_bytes: int
    ref: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """One trainer step. `payloads` are references to `list[Trajectory]`, whole groups each.

    The groups are split, in order, into mini-batches of `mini_batch_groups` groups, one optimizer
    step each. `num_tokens` counts prompts and responses.
    """

    step: int
    policy_version: int
    payloads: tuple[Ref, ...]
    mini_batch_groups: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Metrics of one trainer step by their names, and how long it took."""

    step: int
    metrics: dict[str, float]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInfo:
    """What the trainer says when it is up. `step` is the last step its weights have seen."""

    step: int
    num_parameters: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """A replica's own counters since its start."""

    version: int
    num_running: int
    num_waiting: int
    num_generated_tokens: int
    num_prompt_tokens: int = 0
    extra: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReport:
    """What a worker process says of one of its event loops.

    Attributes:
        number: counts the reports of the process, from 1.
        loop: `serving`, or the name of a loop of user code.
        state: `blocked`, again and again while it lasts; `turned`, when it is over; `given_up`,
            when the rollouts on a loop of user code were ended: the process wants to be replaced.
        blocked_s: for how long it has been, or was, blocked.
        cause: the block in one sentence, with the frame; empty when it is over.
        call: the innermost frame of all, the call that blocks.
        sample_id: the rollout whose code blocks, where that is known.
    """

    number: int = 0
    loop: str
    state: Literal["blocked", "turned", "given_up"]
    blocked_s: float
    cause: str = ""
    call: str = ""
    sample_id: str = ""
