"""The trainer scores under the filters that the engine samples with."""

import dataclasses

import numpy as np
import pytest
import torch

from freewheel.sampling_filters import NO_FILTERS, Filters
from freewheel.trainer.core import TrainerCore
from freewheel.trainer.losses import selected_logprobs_and_entropy
from freewheel.trainer.policy import Policy
from freewheel.types import SamplingParams, Trajectory
from tests.unit.engine_models import make_engine, make_model, model_logprobs, request, run
from tests.unit.trainer_runs import make_config, step

FILTERS = [
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def rollouts(folder, **sampling) -> list[list[Trajectory]]:
    """Two groups of 4 as the engine samples and records them."""
    engine = make_engine("llama_tied", folder)
    texts = [[5, 9, 30], [44, 7]]
    wanted = [
        request(f"{g}-{i}", prompt, seed=8 * g + i, **sampling)
        for g, prompt in enumerate(texts)
        for i in range(4)
    ]
    results = run(engine, wanted)
    groups: list[list[Trajectory]] = [[], []]
    for number, item in enumerate(wanted):
        generation, prompt = results[item.request_id], texts[number // 4]
        before = len(prompt)
        groups[number // 4].append(
            Trajectory(
                sample_id=item.request_id,
                group_id=number // 4,
                reward=float(number % 3),
                token_ids=np.concatenate([item.prompt_token_ids, generation.token_ids]),
                loss_mask=np.arange(before + len(generation.token_ids)) >= before,
                rollout_logprobs=np.concatenate([np.zeros(before), generation.logprobs]).astype(
                    np.float32
                ),
                versions=np.concatenate([[-1] * before, generation.versions]).astype(np.int32),
            )
        )
    return groups


def trainer(folder, *, temperature: float = 1.0, **rollout) -> TrainerCore:
    make_model("llama_tied").save_pretrained(folder)
    config = make_config(temperature=temperature, rollout=rollout, ppo_max_token_len=200)
    core = TrainerCore(config, folder)
    core.start(None)
    return core


@pytest.mark.parametrize("sampling", FILTERS)
def test_recorded_logprobs_are_the_trainers(sampling, tmp_path):
    groups = rollouts(tmp_path, **sampling)
    metrics = step(trainer(tmp_path, **sampling), 1, groups).metrics
    assert metrics["training/rollout_probs_diff_max"] < 1e-4
    without = trainer(tmp_path, temperature=sampling.get("temperature", 1.0))
    assert step(without, 1, groups).metrics["training/rollout_probs_diff_max"] > 1e-2


def test_a_token_that_the_filters_would_remove_now_keeps_a_finite_ratio(tmp_path):
    """Sampled without filters, trained with hard ones: as after a large change of the weights."""
    groups = rollouts(tmp_path)
    core = trainer(tmp_path, top_k=6)
    metrics = step(core, 1, groups).metrics
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/pg_clipfrac"] > 0


@pytest.mark.parametrize("sampling", FILTERS)
def test_the_kept_tokens_are_those_of_the_reference(sampling):
    logits = torch.randn(40, 61, generator=torch.Generator().manual_seed(3)) * 3
    targets = logits.argmax(-1)
    filters = Filters(**{k: v for k, v in sampling.items() if k != "temperature"})
    temperature = sampling.get("temperature", 1.0)
    before = logits.clone()
    kept = filters.apply_but_to(targets, logits / temperature)
    assert torch.equal(logits, before)

    class Fixed:
        """A model whose logits are these rows."""

        def __call__(self, sequence):
            return type("Output", (), {"logits": logits[None, : sequence.shape[1]]})

    params = SamplingParams(max_tokens=1, **sampling)
    expected = model_logprobs(Fixed(), [0], targets[:-1].tolist(), params)
    found = torch.log_softmax(kept, -1).gather(1, targets[:, None]).squeeze(1)[:-1]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_the_gradient_is_that_of_the_kept_tokens_alone():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = logits.argmin(-1)
    kept = Filters(top_k=3).apply_but_to(targets, logits)
    assert (kept > -torch.inf).sum(-1).tolist() == [4, 4, 4]
    logprobs, entropies = selected_logprobs_and_entropy(kept, targets, entropy_grad=True)
    (logprobs.sum() + entropies.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(logits.grad != 0, kept > -torch.inf)
    assert logits.grad.sum().item() == pytest.approx(0, abs=1e-5)


def test_greedy_rollouts_have_no_filters():
    policy = Policy(make_model("llama_tied"), temperature=0.0, filters=Filters(top_k=3))
    assert policy.filters == NO_FILTERS
    assert not NO_FILTERS.any
    assert not Filters(top_k=-1).any
    assert all(dataclasses.replace(NO_FILTERS, **f).any for f in FILTERS[:3])
