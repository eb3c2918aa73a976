"""Building and driving a trainer in tests."""

from freewheel.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    OptimConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
)
from freewheel.trainer.core import TrainerCore
from freewheel.types import TrainRequest, TrainResult, Trajectory


def make_config(
    *,
    temperature: float = 1.0,
    rollout: dict[str, object] | None = None,
    correction: RolloutCorrectionConfig | None = None,
    optim: OptimConfig | None = None,
    **actor: object,
) -> Config:
    settings = {"ppo_mini_batch_size": 2, "ppo_max_token_len": 40, "device": "cpu", **actor}
    return Config(
        rollout=RolloutConfig(
            temperature=temperature, max_response_length=11, device="cpu", **(rollout or {})
        ),
        actor=ActorConfig(optim=optim or OptimConfig(lr=1e-3), **settings),
        algorithm=AlgorithmConfig(rollout_correction=correction or RolloutCorrectionConfig()),
    )


def step(
    core: TrainerCore, number: int, groups: list[list[Trajectory]], mini_batch_groups: int = 2
) -> TrainResult:
    request = TrainRequest(
        step=number,
        policy_version=0,
        payloads=(),
        mini_batch_groups=mini_batch_groups,
        num_tokens=sum(len(t.token_ids) for group in groups for t in group),
    )
    return core.train_step(request, groups)
