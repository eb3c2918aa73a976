"""One request inside the engine: its tokens so far, and what it becomes when it ends."""

import secrets
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from freewheel.types import Generation, GenerationRequest, SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "error"]
"""`error`: the model gave logits that are not finite. It never leaves the engine as a result."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request and the tokens sampled for it. Owned by the scheduler; compared by identity."""

    request_id: str
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    seed: int
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    order: int = 0
    """Rank of its admission; the youngest gives way when memory runs out."""
    length: int = field(init=False)
    """Prompt and sampled tokens together."""

    filters: tuple[float, float, int, float] = field(init=False)
    """Temperature, top-p, top-k, min-p: requests that share them are drawn together."""

    def __post_init__(self) -> None:
        self.length = len(self.prompt) + len(self.token_ids)
        kind = self.sampling
        self.filters = (kind.temperature, kind.top_p, kind.top_k, kind.min_p)
        if kind.temperature == 0:
            self.filters = (0.0, 1.0, 0, 0.0)

    @classmethod
    def of(cls, request: GenerationRequest) -> "Request":
        """Take a request in. One without a seed gets one from the operating system."""
        seed = request.sampling.seed
        return cls(
            request_id=request.request_id,
            prompt=np.ascontiguousarray(request.prompt_token_ids, dtype=np.int32),
            sampling=request.sampling,
            seed=secrets.randbits(64) if seed is None else seed,
        )

    @property
    def max_length(self) -> int:
        """Tokens when it has run to its limit."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def last_token(self) -> int:
        """The newest token: the next one to feed."""
        return self.token_ids[-1]

    def all_tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and sampled tokens, int32 (length,)."""
        return np.concatenate([self.prompt, np.asarray(self.token_ids, dtype=np.int32)])

    def append(self, token_id: int, logprob: float, version: int) -> None:
        """Record one sampled token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.length += 1

    def result(self, finish_reason: FinishReason) -> Generation:
        """What the request leaves with."""
        return Generation(
            request_id=self.request_id,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int32),
            finish_reason=finish_reason,
        )
