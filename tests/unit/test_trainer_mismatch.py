"""Engine and trainer compared on the tokens that the trainer's very weights sampled."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from freewheel.config import check_config
from freewheel.config.sections import Config, DataConfig, HealthConfig, ModelConfig, RolloutConfig
from freewheel.engine.sampling import _draw as _engine_draw
from freewheel.errors import ConfigError, EngineMismatchError
from freewheel.trainer.core import TrainerCore
from freewheel.types import SamplingParams, TrainRequest
from tests.unit.test_trainer_core import sequence_logprobs
from tests.unit.trainer_models import make_groups, save_model
from tests.unit.trainer_runs import make_config

MEAN, MAX = "engine_mismatch/logprobs_diff_mean", "engine_mismatch/logprobs_diff_max"
TOKENS, K3 = "engine_mismatch/num_tokens", "engine_mismatch/k3_kl"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def _core(model_path, limit=None):
    config = dataclasses.replace(make_config(), health=HealthConfig(max_logprob_difference=limit))
    core = TrainerCore(config, model_path)
    core.start(None)
    return core


def _groups(model_path, offset, version=3):
    """Recorded with the model's own logprobs plus `offset`, each second token under `version`."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    groups = make_groups(2, 4)
    for trajectory in (t for group in groups for t in group):
        exact = sequence_logprobs(model, trajectory, 1.0)[0].detach().numpy()
        trajectory.rollout_logprobs[trajectory.loss_mask] = exact + offset
        places = np.flatnonzero(trajectory.loss_mask)
        trajectory.versions[places[::2]] = version
        # The others were sampled by other weights: whatever they say is no mismatch.
        trajectory.rollout_logprobs[places[1::2]] -= 5.0
    return groups


def _train(core, groups, number=1, version=3):
    request = TrainRequest(
        step=number, policy_version=version, payloads=(), mini_batch_groups=2, num_tokens=1
    )
    return core.train_step(request, groups).metrics


def test_it_is_measured_on_the_trainers_own_version_alone(model_path):
    core = _core(model_path)
    core.export_weights()
    groups = _groups(model_path, 0.25)
    metrics = _train(core, groups)
    fresh = sum(int((t.versions == 3).sum()) for group in groups for t in group)
    assert metrics[TOKENS] == fresh
    assert metrics[MEAN] == pytest.approx(0.25, abs=1e-4)
    assert metrics[MAX] == pytest.approx(0.25, abs=1e-4)
    # log ratio -0.25: exp(-0.25) + 0.25 - 1.
    assert metrics[K3] == pytest.approx(0.028801, abs=1e-4)
    assert metrics["training/rollout_probs_diff_max"] > 0


def test_weights_that_moved_since_the_last_publication_say_nothing(model_path):
    core = _core(model_path)
    groups = _groups(model_path, 0.25)
    before = _train(core, groups)
    core.export_weights()
    after = _train(core, groups, number=2)
    moved = _train(core, groups, number=3)
    for metrics in (before, moved):
        assert metrics[TOKENS] == 0
        assert not {MEAN, MAX, K3} & set(metrics)
    assert MEAN in after


def test_only_the_first_mini_batch_counts(model_path):
    core = _core(model_path)
    core.export_weights()
    groups = _groups(model_path, 0.0)
    request = TrainRequest(step=1, policy_version=3, payloads=(), mini_batch_groups=1, num_tokens=1)
    metrics = core.train_step(request, groups).metrics
    assert metrics[TOKENS] == sum(int((t.versions == 3).sum()) for t in groups[0])
    assert metrics[MAX] < 1e-4


def test_beyond_the_limit_the_run_ends(model_path):
    core = _core(model_path, limit=0.2)
    core.export_weights()
    assert _train(core, _groups(model_path, 0.1))[MEAN] == pytest.approx(0.1, abs=1e-4)
    core = _core(model_path, limit=0.2)
    core.export_weights()
    groups = _groups(model_path, 0.25)
    with pytest.raises(EngineMismatchError, match=r"0\.25 on average .* allowed: 0\.2") as caught:
        _train(core, groups)
    assert caught.value.exit_code == 13


def _limited(**rollout):
    return Config(
        data=DataConfig(train_files="a.jsonl"),
        model=ModelConfig(path="m"),
        rollout=RolloutConfig(**rollout),
        health=HealthConfig(max_logprob_difference=0.1),
    )


def test_no_limit_where_there_is_no_distribution_to_compare():
    with pytest.raises(ConfigError, match=r"health\.max_logprob_difference = 0\.1, rollout\.temp"):
        check_config(_limited(temperature=0.0))


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0.5, "top_k": 5}]
)
def test_a_limit_goes_with_filters_under_which_the_trainer_scores_too(filters):
    check_config(_limited(**filters))


def test_filters_are_no_mismatch(model_path):
    """What the engine draws and records under filters, the trainer finds the same."""
    rollout = RolloutConfig(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
    config = dataclasses.replace(
        make_config(), rollout=rollout, health=HealthConfig(max_logprob_difference=1e-3)
    )
    core = TrainerCore(config, model_path)
    core.start(None)
    core.export_weights()
    groups = make_groups(2, 4)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for trajectory in (t for group in groups for t in group):
        _draw(model, trajectory, rollout)
    metrics = _train(core, groups)
    assert metrics[TOKENS] > 0
    assert metrics[MAX] < 1e-4


def _draw(model, trajectory, rollout):
    """Replace the sampled tokens by such as the embedded engine draws, and its logprobs."""
    sampling = SamplingParams(
        max_tokens=1,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        seed=7,
    )
    places = np.flatnonzero(trajectory.loss_mask)
    for place in places:
        prefix = torch.tensor(trajectory.token_ids[None, :place], dtype=torch.long)
        with torch.inference_mode():
            logits = model(prefix).logits[0, -1:].float().clone()
            token_ids, logprobs = _engine_draw(logits, torch.rand(1), sampling)
        trajectory.token_ids[place] = int(token_ids[0])
        trajectory.rollout_logprobs[place] = float(logprobs[0])
    trajectory.versions[places] = 3
