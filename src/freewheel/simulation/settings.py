"""What the simulated workers are like: how long things take, how long responses are, what fails."""

import math
import random
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Distribution of response lengths, in tokens; `max_response_length` cuts it off.

    `fixed`: always `mean`. `lognormal`: mean `mean`, shape `sigma`. `pareto`: mean `mean`, tail
    index `alpha` (> 1). `file`: drawn from a text file, one length a line.
    """

    kind: Literal["fixed", "lognormal", "pareto", "file"] = "lognormal"
    mean: float = 40.0
    sigma: float = 0.8
    alpha: float = 1.5
    path: str = ""

    def sampler(self) -> "LengthSampler":
        """A sampler; reads the file once."""
        observed: tuple[int, ...] = ()
        if self.kind == "file":
            lines = Path(self.path).read_text().split()
            observed = tuple(int(line) for line in lines)
            if not observed or min(observed) < 1:
                raise ValueError(f"{self.path}: wants positive lengths, one a line")
        return LengthSampler(lengths=self, observed=observed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSampler:
    """Draws response lengths."""

    lengths: Lengths
    observed: tuple[int, ...]

    def draw(self, rng: random.Random, limit: int) -> int:
        """One length in tokens, at least 1 and at most `limit`."""
        spec = self.lengths
        if spec.kind == "fixed":
            length = spec.mean
        elif spec.kind == "lognormal":
            length = rng.lognormvariate(math.log(spec.mean) - spec.sigma**2 / 2, spec.sigma)
        elif spec.kind == "pareto":
            length = spec.mean * (spec.alpha - 1) / spec.alpha * rng.paretovariate(spec.alpha)
        else:
            length = rng.choice(self.observed)
        return min(limit, max(1, round(length)))


class Failure(StrEnum):
    """A failure that is injected once into a run (see `injection.py` for what each looks like)."""

    ENVIRONMENT_NEVER_RETURNS = "environment_never_returns"
    ENVIRONMENT_BLOCKS_LOOP = "environment_blocks_loop"
    ENVIRONMENT_IGNORES_CANCELLATION = "environment_ignores_cancellation"
    REWARD_NEVER_RETURNS = "reward_never_returns"
    TOOL_NEVER_RETURNS = "tool_never_returns"
    ENGINE_NO_TOKENS = "engine_no_tokens"
    ENGINE_FROZEN = "engine_frozen"
    ENGINE_KILLED = "engine_killed"
    TRAINER_FROZEN = "trainer_frozen"
    TRAINER_KILLED = "trainer_killed"
    WORKER_FROZEN = "worker_frozen"
    WORKER_KILLED = "worker_killed"
    WEIGHT_FETCH_NEVER_RETURNS = "weight_fetch_never_returns"
    CHECKPOINT_DISK_FULL = "checkpoint_disk_full"
    CHECKPOINT_NEVER_RETURNS = "checkpoint_never_returns"
    TRIAL_NEVER_RETURNS = "trial_never_returns"
    NEVER_PLACED = "never_placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A failure that strikes at the first opportunity from `at_s` on, in seconds of virtual time.

    `times`: how many calls it strikes, None for all from then on; what strikes a process does so
    once. `never_placed`: at 0 s a worker's first start never returns; later a worker is killed and
    its replacement's start never returns.
    """

    failure: Failure
    at_s: float
    times: int | None = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often what goes wrong. Probabilities are for each attempt of each member.

    `injection`: one failure besides, at one moment.
    """

    environment: float = 0.0
    hang: float = 0.0
    over_long_prompt: float = 0.0
    replica_deaths_per_s: float = 0.0
    worker_deaths_per_s: float = 0.0
    update_death: float = 0.0
    injection: Injection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """Durations in seconds of virtual time, sizes, and faults of a simulated run."""

    seed: int = 0
    num_prompts: int = 64
    num_val_prompts: int = 8
    lengths: Lengths = field(default_factory=Lengths)
    tokens_per_s: float = 20.0
    train_step_s: float = 4.0
    publish_s: float = 0.3
    update_s: float = 0.5
    copy_s: float = 0.2
    write_s: float = 3.0
    startup_s: float = 2.0
    prepare_s: float = 0.05
    reward_s: float = 0.1
    jitter: float = 0.3
    faults: Faults = field(default_factory=Faults)
