"""The trainer: groups of trajectories in, new weights out. A plain object, one call at a time.

Only `write_state` may run beside another call: it works on a copy that `copy_state` took. Weights
change in `train_step` alone, and not at all if the loss or the gradient is not finite.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from freewheel.checkpoint.contents import TRAJECTORIES
from freewheel.config.sections import Config
from freewheel.errors import (
    CheckpointError,
    EngineMismatchError,
    InvariantError,
    StartupError,
    WeightsLostError,
)
from freewheel.files import sync_tree
from freewheel.remote_weights import RemoteWeights, WeightSource
from freewheel.sampling_filters import Filters
from freewheel.trainer import optim, state
from freewheel.trainer.batching import (
    MiniBatch,
    PlanSettings,
    make_samples,
    plan_mini_batch,
    split_groups,
)
from freewheel.trainer.distributed import Ranks, full, shard
from freewheel.trainer.metrics import (
    MISMATCH_MEAN,
    MISMATCH_TOKENS,
    TokenMetrics,
    batch_metrics,
)
from freewheel.trainer.policy import Policy
from freewheel.trainer.probe import choose_forward
from freewheel.trainer.trained import make_trained
from freewheel.trainer.trajectories import write_trajectories
from freewheel.trainer.update import Updater
from freewheel.types import TrainerInfo, TrainRequest, TrainResult, Trajectory
from freewheel.weights import WeightBundle, pack_weights

_MAX_COPIES = 2


class TrainerCore:
    """One rank of the trainer.

    Args:
        config: of the run.
        model_path: Hugging Face folder of the initial policy.
        ranks: this process among the trainer's; alone by default.
        total_optimizer_steps: where the schedule ends. Unset: as `actor.optim.total_training_steps`
            or `trainer.total_training_steps` gives.

    Raises:
        ConfigError: the schedule needs a number of steps and there is none.
    """

    def __init__(
        self,
        config: Config,
        model_path: Path,
        *,
        ranks: Ranks | None = None,
        total_optimizer_steps: int | None = None,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._trained = make_trained(config, model_path)
        self._checkpoint: Path | None = None
        self._ranks = ranks or Ranks()
        self._total_steps = total_optimizer_steps or optim.total_optimizer_steps(config)
        optim.check_schedule(config.actor.optim, self._total_steps)
        self._copies: dict[int, state.StateCopy] = {}
        self._lock = threading.Lock()
        self._source: WeightSource | None = None
        self._has_moved = True
        """Whether the weights are others than those exported last."""

    def start(self, checkpoint: Path | None) -> TrainerInfo:
        """Build model and optimizer, fresh or from a folder that `write_state` wrote.

        Raises:
            StartupError: the device is not there.
            CheckpointError: the model or the checkpoint cannot be read.
        """
        self._device = _device(self._config, self._ranks)
        if self._device.type == "cpu":
            torch.set_num_threads(self._config.actor.num_threads)
        self._ranks.join(self._device)
        self._checkpoint = checkpoint
        if self._config.rollout.weight_transfer == "nixl" and self._ranks.is_main:
            self._source = WeightSource(self._config)
        self._policy = self._build_policy(self._trained.load(checkpoint))
        optimizer = optim.make_optimizer(self._policy, self._config.actor.optim)
        progress = state.Progress(step=0, optimizer_steps=0, rng={})
        if checkpoint is not None:
            progress = state.load_progress(checkpoint)
            state.load_moments(checkpoint, self._model, optimizer, progress.optimizer_steps)
            state.restore_random_state(checkpoint, progress.rng)
        else:
            torch.manual_seed(self._config.trainer.seed)
        self._step = progress.step
        self._updater = Updater(
            config=self._config,
            policy=self._policy,
            optimizer=optimizer,
            ranks=self._ranks,
            device=self._device,
            total_steps=self._total_steps,
            optimizer_steps=progress.optimizer_steps,
        )
        return TrainerInfo(
            step=self._step,
            num_parameters=sum(p.numel() for p in self._model.parameters()),
            device=str(self._device),
        )

    def train_step(self, request: TrainRequest, groups: list[list[Trajectory]]) -> TrainResult:
        """Train on whole groups, one optimizer step for each mini-batch and pass.

        Args:
            request: step, version and groups of a mini-batch; its payloads are not looked at.
            groups: what the payloads refer to, in order.

        Raises:
            TrainingDivergedError: loss or gradient is not finite; names step, mini-batch, value and
                samples. The weights are those of before that optimizer step.
            InvariantError: there is no trajectory at all.
            EngineMismatchError: `health.max_logprob_difference` is exceeded.
        """
        started = time.perf_counter()
        if not any(groups):
            raise InvariantError(f"step {request.step}: no trajectory to train on")
        mini_batches = self._plan(groups, request.mini_batch_groups)
        tokens = TokenMetrics(
            is_threshold=self._config.algorithm.rollout_correction.rollout_is_threshold,
            version=None if self._has_moved else request.policy_version,
        )
        self._has_moved = True
        metrics = self._updater.run(request.step, mini_batches, tokens)
        self._check_mismatch(request, metrics)
        self._step = request.step
        metrics |= batch_metrics(
            groups,
            [sample.advantage for mini in mini_batches for sample in mini.samples],
            max_response_length=self._config.rollout.max_response_length,
            policy_version=request.policy_version,
        )
        wall_s = time.perf_counter() - started
        metrics["timing_s/update_actor"] = wall_s
        metrics["perf/throughput"] = (
            metrics["perf/total_num_tokens"] / wall_s / self._ranks.world_size
        )
        return TrainResult(step=request.step, metrics=metrics, wall_s=wall_s)

    def export_weights(self) -> WeightBundle | RemoteWeights:
        """The current weights in the rollout engine's number format, tied ones once.

        With `rollout.weight_transfer=nixl` a copy that stays here until `drop_weights`.

        Of an adapter its factors in float32: replicas merge, and convert what they have merged.
        The bundle may be the trainer's own memory: whoever reads it after the next step, as an
        engine does until it is settled, needs a copy. Sending it to another process makes one.
        Collective over ranks; only rank 0's bundle holds tensors.
        """
        gathered = (
            (name, full(tensor.detach())) for name, tensor in self._trained.named(self._model)
        )
        kept = ((name, tensor) for name, tensor in gathered if self._ranks.is_main)
        is_adapter = self._trained.is_adapter
        dtype = None if is_adapter else _rollout_dtype(self._config, self._device)
        if self._source is not None and dtype is not None:
            weights = self._source.publish(kept, dtype=dtype)
        else:
            weights = pack_weights(kept, dtype=dtype)
        self._has_moved = False
        return weights

    def drop_weights(self, publication: int) -> None:
        """Let a publication go that nobody needs any more. May run beside any other call."""
        if self._source is not None:
            self._source.drop(publication)

    def copy_state(self, step: int) -> None:
        """Copy model, optimizer, schedule and random state to CPU memory. Collective over ranks.

        Raises:
            InvariantError: two copies wait to be written already.
        """
        with self._lock:
            if len(self._copies) >= _MAX_COPIES:
                raise InvariantError(
                    f"step {step}: copies of steps {sorted(self._copies)} are not written yet"
                )
        progress = state.Progress(
            step=step, optimizer_steps=self._updater.optimizer_steps, rng=state.random_state()
        )
        copy = state.copy_state(
            self._model,
            self._updater.optimizer,
            progress,
            weights=self._trained.named(self._model),
            keep=self._ranks.is_main,
        )
        if self._ranks.is_main:
            with self._lock:
                self._copies[step] = copy

    def restored_weights(self, version: int) -> WeightBundle:
        """A version that the checkpoint carries beside the trainer's own weights; rank 0 only.

        Raises:
            CheckpointError: it does not carry it, or it cannot be read.
        """
        if self._checkpoint is None:
            raise InvariantError("there is no checkpoint to restore a published version from")
        return state.read_version(self._checkpoint, version)

    def write_state(
        self,
        step: int,
        folder: Path,
        trajectories: Sequence[list[Trajectory]],
        held: Mapping[int, WeightBundle | RemoteWeights] | None = None,
    ) -> None:
        """Write the copy taken at `step`, and these groups, into an existing folder; rank 0 only.

        `held` are the published versions that a resumed run needs beside the trainer's weights. May
        run in another thread beside any other call. Frees the copy, also when it fails.

        Raises:
            InvariantError: there is no copy of that step.
            WeightsLostError: a held version lay in the memory of a trainer that is gone; the copy
                stays.
            CheckpointError: a file cannot be written, or the folder is not there.
        """
        with self._lock:
            copy = self._copies.get(step)
        if copy is None:
            raise InvariantError(f"step {step}: no copy of the trainer's state was taken")
        bundles = self._on_host(held or {})
        try:
            _check_there(folder)
            # Tokenizer files come from the model's folder: a checkpoint that the run was resumed
            # from is deleted when newer ones are complete.
            weights = self._trained.write(copy, folder, self._model)
            state.write_copy(copy, folder, self._model, self._model_path, weights)
            for version, bundle in bundles.items():
                state.write_version(folder, version, bundle)
            write_trajectories(folder / TRAJECTORIES, trajectories)
            sync_tree(folder)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{folder}: step {step} cannot be written: {error}") from error
        finally:
            with self._lock:
                del self._copies[step]

    def _on_host(self, held: Mapping[int, WeightBundle | RemoteWeights]) -> dict[int, WeightBundle]:
        bundles: dict[int, WeightBundle] = {}
        lost: dict[int, WeightsLostError] = {}
        for version, weights in held.items():
            try:
                bundles[version] = self._copy_on_host(weights)
            except WeightsLostError as error:
                lost[version] = error
        if lost:
            reasons = ", ".join(f"version {version}: {error}" for version, error in lost.items())
            raise WeightsLostError(f"published weights are gone: {reasons}", tuple(lost))
        return bundles

    def _copy_on_host(self, weights: WeightBundle | RemoteWeights) -> WeightBundle:
        if isinstance(weights, WeightBundle):
            return weights
        if self._source is None:
            raise WeightsLostError(f"this trainer has no {weights.agent}")
        return self._source.on_host(weights)

    def close(self) -> None:
        """Part from the other ranks. Idempotent."""
        self._ranks.leave()

    @property
    def _model(self) -> PreTrainedModel:
        return self._policy.model

    def _check_mismatch(self, request: TrainRequest, metrics: dict[str, float]) -> None:
        """End the run if engine and trainer no longer agree on what the same weights say."""
        limit, mean = self._config.health.max_logprob_difference, metrics.get(MISMATCH_MEAN)
        # Not "greater": a mean that is not a number agrees with nothing.
        if limit is None or mean is None or mean <= limit:
            return
        raise EngineMismatchError(
            f"step {request.step}: logprobs of engine {self._config.rollout.engine} and trainer "
            f"differ by {mean:.4g} on average over {metrics[MISMATCH_TOKENS]:.0f} tokens sampled "
            f"under the trainer's own weights (version {request.policy_version}); allowed: "
            f"{limit:g} (health.max_logprob_difference)"
        )

    def _build_policy(self, model: PreTrainedModel) -> Policy:
        actor, rollout = self._config.actor, self._config.rollout
        torch.nn.Module.to(model, self._device)
        # Recorded logprobs have no dropout in them, so neither has training. Only layers that
        # recompute their activations need to know that this is training.
        model.train(actor.gradient_checkpointing)
        _disable_dropout(model)
        if actor.gradient_checkpointing:
            _recompute_activations(model)
        policy = Policy(
            model,
            temperature=rollout.temperature,
            filters=Filters(top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p),
            autocast_dtype=torch.bfloat16 if actor.dtype == "bfloat16" else None,
            entropy_grad=actor.entropy_coeff > 0,
        )
        choose_forward(policy, device=self._device)
        shard(policy, self._ranks)
        return policy

    def _plan(self, groups: list[list[Trajectory]], mini_batch_groups: int) -> list[MiniBatch]:
        config = self._config
        settings = PlanSettings(
            max_tokens=config.actor.ppo_max_token_len,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            all_with_grad=config.actor.entropy_coeff > 0,
        )
        return [
            plan_mini_batch(
                make_samples(
                    part,
                    normalize_by_std=config.algorithm.norm_adv_by_std_in_grpo,
                    loss_agg_mode=config.actor.loss_agg_mode,
                ),
                settings,
                self._device,
            )
            for part in split_groups(groups, mini_batch_groups)
        ]


def _check_there(folder: Path) -> None:
    """The control plane made it, perhaps on another machine.

    Raises:
        CheckpointError: it is not there.
    """
    if not folder.exists():
        raise CheckpointError(
            f"{folder}: is not there for the trainer: trainer.run_dir has to have the same path on "
            "all nodes (a shared file system)"
        )


def _device(config: Config, ranks: Ranks) -> torch.device:
    kind = config.actor.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"trainer rank {ranks.rank}: actor.device=cuda, but there is no GPU")
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", ranks.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _rollout_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.rollout.dtype != "auto":
        return torch.bfloat16 if config.rollout.dtype == "bfloat16" else torch.float32
    kind = config.rollout.device if config.rollout.device != "auto" else device.type
    return torch.bfloat16 if kind == "cuda" else torch.float32


def _recompute_activations(model: PreTrainedModel) -> None:
    # transformers renamed it in version 5.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _disable_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
