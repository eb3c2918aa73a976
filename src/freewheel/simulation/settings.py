"""What the simulated workers are like: how long things take, how long responses are, what fails."""

import math
import random
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often what goes wrong. Probabilities are for each attempt of each member."""

    environment: float = 0.0
    hang: float = 0.0
    over_long_prompt: float = 0.0
    replica_deaths_per_s: float = 0.0
    worker_deaths_per_s: float = 0.0
    update_death: float = 0.0


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
