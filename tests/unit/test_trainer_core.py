"""Trainer steps against a plain float64 loop; determinism, agreement with sampling, divergence."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from freewheel.config.sections import Config, OptimConfig, RolloutConfig, RolloutCorrectionConfig
from freewheel.errors import ConfigError, InvariantError, StartupError, TrainingDivergedError
from freewheel.trainer.core import TrainerCore
from freewheel.trainer.losses import group_advantages
from freewheel.types import Trajectory
from freewheel.weights import unpack_weights
from tests.unit.bundles import all_bytes
from tests.unit.trainer_models import CONFIGS, make_groups, make_model, save_model
from tests.unit.trainer_runs import make_config, step


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_core(config: Config, model_path: Path) -> TrainerCore:
    core = TrainerCore(config, model_path)
    core.start(None)
    return core


def near_groups(model_path: Path, seed: int = 0) -> list[list[Trajectory]]:
    """Groups whose rollout logprobs lie near the model's own, so that few ratios are clipped."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    random = np.random.default_rng(seed)
    groups = make_groups(2, 4, seed=seed)
    with torch.no_grad():
        for trajectory in (t for group in groups for t in group):
            exact = sequence_logprobs(model, trajectory, 1.0)[0].numpy()
            noise = 0.2 * random.normal(size=exact.size)
            trajectory.rollout_logprobs[trajectory.loss_mask] = exact + noise
    return groups


def sequence_logprobs(
    model: PreTrainedModel, trajectory: Trajectory, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the sampled tokens and entropies, by the stock model."""
    ids = torch.from_numpy(trajectory.token_ids).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
    distribution = torch.log_softmax(logits, -1)
    mask = torch.from_numpy(trajectory.loss_mask[1:])
    entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, ids[1:, None]).squeeze(-1)[mask], entropy[mask]


def reference_gradients(
    model_path: Path, config: Config, groups: list[list[Trajectory]]
) -> dict[str, torch.Tensor]:
    """Gradient of the mini-batch's loss in float64, one sequence at a time, from the formulas."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    actor, correction = config.actor, config.algorithm.rollout_correction
    per_sequence: list[torch.Tensor] = []
    for group in groups:
        advantages = group_advantages([t.reward for t in group], normalize_by_std=True)
        for trajectory, advantage in zip(group, advantages, strict=True):
            logprobs, entropy = sequence_logprobs(model, trajectory, config.rollout.temperature)
            rollout = torch.from_numpy(trajectory.rollout_logprobs[trajectory.loss_mask]).double()
            limit = correction.rollout_is_threshold
            bypass = correction.mode == "bypass"
            old = rollout if bypass else logprobs.detach()
            ratio = (logprobs - old).exp()
            weight = torch.ones_like(ratio)
            if correction.rollout_is == "token" and bypass:
                ratio = ratio.clamp(max=limit)
            elif correction.rollout_is == "token":
                weight = (old - rollout).exp().clamp(max=limit)
            clipped = ratio.clamp(1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high)
            loss = weight * torch.maximum(-advantage * ratio, -advantage * clipped)
            per_sequence.append(loss - actor.entropy_coeff * entropy)
    if actor.loss_agg_mode == "token-mean":
        total = torch.cat(per_sequence).mean()
    elif actor.loss_agg_mode == "seq-mean-token-sum":
        total = torch.stack([loss.sum() for loss in per_sequence]).mean()
    else:
        total = torch.stack([loss.mean() for loss in per_sequence]).mean()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("correction", ["bypass", "decoupled"])
@pytest.mark.parametrize(
    ("rollout_is", "entropy_coeff", "temperature"), [("token", 0.0, 1.0), ("none", 0.02, 0.8)]
)
def test_gradients_agree_with_a_float64_loop(
    model_path: Path,
    mode: str,
    correction: str,
    rollout_is: str,
    entropy_coeff: float,
    temperature: float,
) -> None:
    config = make_config(
        loss_agg_mode=mode,
        entropy_coeff=entropy_coeff,
        temperature=temperature,
        grad_clip=1e9,
        correction=RolloutCorrectionConfig(
            mode=correction, rollout_is=rollout_is, rollout_is_threshold=1.1
        ),
    )
    groups = near_groups(model_path)
    core = make_core(config, model_path)
    result = step(core, 1, groups)
    expected = reference_gradients(model_path, config, groups)
    found = {n: p.grad for n, p in core._policy.model.named_parameters()}
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient, rtol=0, atol=2e-5 * scale)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert result.metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def weights_after(
    config: Config, model_path: Path, groups: list[list[Trajectory]], steps: int = 2
) -> dict[str, np.ndarray]:
    core = make_core(config, model_path)
    for number in range(1, steps + 1):
        step(core, number, groups)
    return {name: t.numpy() for name, t in unpack_weights(core.export_weights()).items()}


def test_same_inputs_give_the_same_bits(model_path: Path) -> None:
    runs = [weights_after(make_config(), model_path, make_groups()) for _ in range(2)]
    assert all(np.array_equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_micro_batches_do_not_change_the_step(
    model_path: Path, gradient_checkpointing: bool
) -> None:
    optim = OptimConfig(lr=1e-3, eps=1e-4)
    large = make_config(ppo_max_token_len=10_000, optim=optim)
    small = make_config(
        ppo_max_token_len=1, optim=optim, gradient_checkpointing=gradient_checkpointing
    )
    one, many = (weights_after(config, model_path, make_groups()) for config in (large, small))
    for name in one:
        np.testing.assert_allclose(one[name], many[name], atol=2e-6)


def test_recorded_logprobs_of_the_sampling_distribution_agree(model_path: Path) -> None:
    """Tokens recorded under temperature 0.7 have, for the trainer, the same probability."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    groups = make_groups()
    with torch.no_grad():
        for trajectory in (t for group in groups for t in group):
            logprobs, _ = sequence_logprobs(model, trajectory, 0.7)
            trajectory.rollout_logprobs[trajectory.loss_mask] = logprobs.numpy()
    core = make_core(make_config(temperature=0.7), model_path)
    metrics = step(core, 1, groups, mini_batch_groups=4).metrics
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)
    wrong = make_core(make_config(temperature=1.0), model_path)
    assert step(wrong, 1, groups).metrics["training/rollout_probs_diff_max"] > 1e-2


def test_metrics_by_hand(model_path: Path) -> None:
    groups = make_groups(2, 3)
    core = make_core(make_config(entropy_coeff=0.0), model_path)
    metrics = step(core, 1, groups).metrics
    flat = [t for group in groups for t in group]
    responses = [int(t.loss_mask.sum()) for t in flat]
    assert metrics["response_length/mean"] == pytest.approx(np.mean(responses))
    assert metrics["response_length/clip_ratio"] == pytest.approx(
        np.mean(np.array(responses) == 11)
    )
    assert metrics["critic/rewards/mean"] == pytest.approx(np.mean([t.reward for t in flat]))
    assert metrics["perf/total_num_tokens"] == sum(t.token_ids.size for t in flat)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    with torch.no_grad():
        pairs = [sequence_logprobs(model, t, 1.0) for t in flat]
    logprobs = torch.cat([pair[0] for pair in pairs]).numpy()
    rollout = np.concatenate([t.rollout_logprobs[t.loss_mask] for t in flat])
    difference = np.abs(np.exp(logprobs) - np.exp(rollout))
    for name, expected in {
        "actor/entropy": float(torch.cat([pair[1] for pair in pairs]).mean()),
        "actor/ppo_kl": np.mean(rollout - logprobs),
        "rollout_corr/kl": np.mean(rollout - logprobs),
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_max": difference.max(),
        "rollout_corr/training_log_ppl": np.mean([-float(pair[0].mean()) for pair in pairs]),
    }.items():
        assert metrics[name] == pytest.approx(expected, rel=1e-4), name


def test_groups_without_signal_move_nothing_but_momentum(model_path: Path) -> None:
    core = make_core(make_config(optim=OptimConfig(lr=1e-3, weight_decay=0.0)), model_path)
    before = all_bytes(core.export_weights())
    groups = [[equal(t) for t in group] for group in make_groups()]
    metrics = step(core, 1, groups).metrics
    assert metrics["actor/grad_norm"] == 0
    assert metrics["actor/entropy"] > 0
    assert np.array_equal(all_bytes(core.export_weights()), before)
    step(core, 2, make_groups())
    moved = all_bytes(core.export_weights())
    step(core, 3, groups)
    assert not np.array_equal(all_bytes(core.export_weights()), moved)


def equal(trajectory: Trajectory) -> Trajectory:
    fields = {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}
    return Trajectory(**{**fields, "reward": 1.0})


def test_training_raises_the_probability_of_what_is_rewarded(model_path: Path) -> None:
    """A bandit: the reward is how many sampled tokens are even."""
    core = make_core(make_config(optim=OptimConfig(lr=2e-2)), model_path)
    random = np.random.default_rng(0)
    shares = []
    for number in range(1, 9):
        groups = make_groups(2, 16, response=(6, 7), seed=number)
        model = core._policy.model
        stock = make_model(CONFIGS["llama"])
        stock.load_state_dict({n: t.detach() for n, t in model.state_dict().items()})
        groups = [[sampled(stock, t, random) for t in group] for group in groups]
        shares.append(np.mean([t.reward for group in groups for t in group]))
        step(core, number, groups)
    assert np.mean(shares[-2:]) > np.mean(shares[:2]) + 0.2


@torch.no_grad()
def sampled(model: PreTrainedModel, like: Trajectory, random: np.random.Generator) -> Trajectory:
    """A response of the same length sampled from the model, with its reward and logprobs."""
    tokens = [int(t) for t in like.token_ids[~like.loss_mask]]
    logprobs = [0.0] * len(tokens)
    for _ in range(int(like.loss_mask.sum())):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        distribution = torch.log_softmax(logits.double(), -1).numpy()
        weights = np.exp(distribution)
        token = int(random.choice(weights.size, p=weights / weights.sum()))
        tokens.append(token)
        logprobs.append(float(distribution[token]))
    response = np.array(tokens)[like.loss_mask]
    fields = {name: getattr(like, name) for name in Trajectory.__dataclass_fields__}
    fields["token_ids"] = np.array(tokens, dtype=np.int32)
    fields["rollout_logprobs"] = np.array(logprobs, dtype=np.float32)
    return Trajectory(**{**fields, "reward": float((response % 2 == 0).mean())})


def test_schedule_follows_optimizer_steps(model_path: Path) -> None:
    optim = OptimConfig(lr=1.0e-3, lr_warmup_steps=2, lr_scheduler_type="linear")
    core = TrainerCore(make_config(optim=optim), model_path, total_optimizer_steps=6)
    core.start(None)
    rates = [step(core, n, make_groups(2)).metrics["actor/lr"] for n in range(1, 8)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0])


def test_a_schedule_without_an_end_is_refused(model_path: Path) -> None:
    config = make_config(optim=OptimConfig(lr_scheduler_type="cosine"))
    with pytest.raises(ConfigError, match=r"cosine.*trainer\.total_training_steps"):
        TrainerCore(config, model_path)


@pytest.mark.parametrize("where", ["rollout_logprobs", "weights", "gradient"])
def test_divergence_names_step_mini_batch_and_samples(model_path: Path, where: str) -> None:
    core = make_core(make_config(), model_path)
    groups = make_groups(4)
    if where == "rollout_logprobs":
        groups[2][1].rollout_logprobs[-1] = np.nan
    elif where == "weights":
        with torch.no_grad():
            core._policy.model.lm_head.weight[3, 4] = torch.nan
    else:
        core._policy.model.model.norm.weight.register_hook(lambda g: g * torch.inf)
    before = all_bytes(core.export_weights())
    expected = r"step 7, mini-batch 1.*s2-1 \(nan\)" if where == "rollout_logprobs" else "step 7"
    with pytest.raises(TrainingDivergedError, match=expected):
        step(core, 7, groups, mini_batch_groups=2)
    if where != "rollout_logprobs":
        assert np.array_equal(all_bytes(core.export_weights()), before)


def test_no_trajectory_is_an_error_of_ours(model_path: Path) -> None:
    core = make_core(make_config(), model_path)
    with pytest.raises(InvariantError, match="step 3"):
        step(core, 3, [[], []])


def test_dropout_is_off(tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIGS["gpt2"])
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
    save_model(tmp_path, config)
    runs = [
        weights_after(
            make_config(gradient_checkpointing=checkpointing, optim=OptimConfig(lr=1e-3, eps=1e-4)),
            tmp_path,
            make_groups(),
        )
        for checkpointing in (True, False)
    ]
    for name in runs[0]:
        np.testing.assert_allclose(runs[0][name], runs[1][name], atol=2e-6)


def test_exported_weights_have_the_engines_format_and_tied_ones_once(model_path: Path) -> None:
    core = make_core(make_config(), model_path)
    names = [spec.name for spec in core.export_weights().specs]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert {spec.dtype for spec in core.export_weights().specs} == {"float32"}
    config = Config(rollout=RolloutConfig(dtype="bfloat16"), actor=make_config().actor)
    assert {s.dtype for s in make_core(config, model_path).export_weights().specs} == {"bfloat16"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(model_path: Path) -> None:
    with pytest.raises(StartupError, match="no GPU"):
        make_core(make_config(device="cuda"), model_path)
