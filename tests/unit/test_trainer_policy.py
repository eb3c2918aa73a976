"""The policy's log-probabilities are the stock model's on each sequence alone, however it runs."""

import pytest
import torch
from transformers import PreTrainedModel

from freewheel.trainer import policy as policy_module
from freewheel.trainer.attention import PACKED, UnsupportedAttentionError, packed_attention
from freewheel.trainer.batching import MicroBatch, make_samples, pack
from freewheel.trainer.policy import Forward, Policy
from freewheel.trainer.probe import choose_forward
from tests.unit.trainer_models import CONFIGS, make_groups, make_model

CPU = torch.device("cpu")
PADDED = {"gemma2-softcap", "mamba"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_micro(seed: int = 0) -> MicroBatch:
    groups = make_groups(3, 3, seed=seed, response=(3, 12), vocabulary=61)
    samples = make_samples(groups, normalize_by_std=True, loss_agg_mode="token-mean")
    ordered = sorted(samples, key=lambda sample: -sample.num_input_tokens)
    return pack(ordered, with_grad=True, counts=True, device=CPU)


def stock_logprobs(model: PreTrainedModel, micro: MicroBatch, temperature: float) -> torch.Tensor:
    """One sequence at a time, in the model's own way."""
    logits = torch.cat(
        [
            model(input_ids=ids[None], use_cache=False).logits[0]
            for ids in micro.input_ids[0].split(list(micro.lengths))
        ]
    )
    distribution = torch.log_softmax(logits[micro.rows_N] / temperature, -1)
    return distribution.gather(-1, micro.targets_N[:, None]).squeeze(-1)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_gradients_equal_the_stock_model(name: str, temperature: float) -> None:
    model, stock = make_model(CONFIGS[name]), make_model(CONFIGS[name])
    policy = Policy(model, temperature=temperature)
    how = choose_forward(policy, device=CPU)
    assert how.packed is (name not in PADDED)
    micro = make_micro()
    logprobs, _ = policy(micro)
    expected = stock_logprobs(stock, micro, temperature)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=2e-5)
    direction = torch.linspace(-1, 1, logprobs.numel())
    (logprobs * direction).sum().backward()
    (expected * direction).sum().backward()
    for (key, mine), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            assert mine.grad is not None, key
            scale = float(theirs.grad.abs().max())
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=3e-4 * scale + 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("how", [(True, True), (True, False), (False, True), (False, False)])
def test_every_way_to_run_gives_the_same(how: tuple[bool, bool]) -> None:
    model = make_model(CONFIGS["llama"])
    micro = make_micro()
    expected = stock_logprobs(model, micro, 1.0)
    policy = Policy(model)
    policy.how = Forward(packed=how[0], split=how[1])
    model.set_attn_implementation(PACKED if policy.how.packed else "sdpa")
    torch.testing.assert_close(policy(micro)[0], expected, rtol=1e-4, atol=2e-5)


def test_a_sequence_does_not_see_its_neighbours() -> None:
    policy = Policy(make_model(CONFIGS["llama"]))
    choose_forward(policy, device=CPU)
    micro = make_micro()
    before = policy(micro)[0]
    first = micro.samples_N == micro.samples_N[0]
    micro.input_ids[0, : micro.lengths[0]] = (micro.input_ids[0, : micro.lengths[0]] + 7) % 61
    after = policy(micro)[0]
    assert torch.equal(before[~first], after[~first])
    assert not torch.equal(before[first], after[first])


def test_chunks_of_the_head_change_neither_values_nor_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for limit in (policy_module.MAX_LOGITS_BYTES, 4 * 61 * 5):
        monkeypatch.setattr(policy_module, "MAX_LOGITS_BYTES", limit)
        policy = Policy(make_model(CONFIGS["llama"]), entropy_grad=True)
        choose_forward(policy, device=CPU)
        logprobs, entropy = policy(make_micro())
        (logprobs.sum() + entropy.square().sum()).backward()
        gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
        results.append((logprobs.detach(), entropy.detach(), *gradients))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_model_with_state_across_tokens_is_not_packed() -> None:
    """Forcing it shows what the probe protects from."""
    model = make_model(CONFIGS["mamba"])
    micro = make_micro()
    policy = Policy(model)
    policy.how = Forward(packed=False, split=True)
    good = policy(micro)[0]
    row = model(input_ids=micro.input_ids, use_cache=False).logits[0][micro.rows_N]
    bad = torch.log_softmax(row, -1).gather(-1, micro.targets_N[:, None]).squeeze(-1)
    assert float((good - bad).abs().max()) > 1e-2


def test_bfloat16_stays_near_float32() -> None:
    micro = make_micro()
    exact = Policy(make_model(CONFIGS["llama"]))
    rough = Policy(make_model(CONFIGS["llama"]), autocast_dtype=torch.bfloat16)
    for policy in (exact, rough):
        choose_forward(policy, device=CPU)
    logprobs, _ = rough(micro)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in rough.parameters() if p.grad is not None)
    difference = (logprobs - exact(micro)[0]).detach().abs()
    assert 0 < float(difference.max()) < 0.3


def test_attention_refuses_what_it_does_not_compute() -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    module = torch.nn.Module()
    with pytest.raises(UnsupportedAttentionError, match="softcap"):
        packed_attention(module, tensor, tensor, tensor, None, softcap=30.0)
    with pytest.raises(UnsupportedAttentionError, match="without packing"):
        packed_attention(module, tensor, tensor, tensor, None)


def test_greedy_temperature_counts_as_one() -> None:
    assert Policy(make_model(CONFIGS["llama"]), temperature=0.0).temperature == 1.0
