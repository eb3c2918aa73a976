"""LoRA: what is trained, published and merged; what a checkpoint holds; what is refused."""

import importlib
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freewheel.adapter import LEFT, RIGHT, AdapterMerger, merged
from freewheel.base_weights import read_base
from freewheel.config import check_config
from freewheel.config.sections import Config, ModelConfig, OptimConfig
from freewheel.control.run_state import structure
from freewheel.engine.loading import load_model
from freewheel.engine.torch_engine import TorchEngine
from freewheel.errors import CheckpointError, ConfigError, InvariantError
from freewheel.preflight import look
from freewheel.trainer import lora, state
from freewheel.trainer.core import TrainerCore
from freewheel.types import Generation, TrainRequest, Trajectory
from freewheel.weights import WeightBundle, pack_weights, unpack_weights
from tests.unit.engine_models import request, run
from tests.unit.test_preflight_user_code import config as shipped_config
from tests.unit.trainer_models import CONFIGS, make_groups, make_model, save_model
from tests.unit.trainer_runs import make_config, step

# A name that transformers has changed and peft still uses.
PEFT_ASKS_TRANSFORMERS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.")
MODELS = ["llama", "llama-untied", "qwen2", "gpt2"]


@pytest.fixture(scope="module", params=MODELS)
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def make_lora_config(rollout: dict[str, object] | None = None, **model: object) -> Config:
    config = make_config(optim=OptimConfig(lr=1e-2), rollout=rollout)
    return replace(config, model=ModelConfig(**{"lora_rank": 4, "lora_alpha": 12, **model}))


def make_core(model: Path, checkpoint: Path | None = None, **changes: object) -> TrainerCore:
    core = TrainerCore(make_lora_config(**changes), model)
    core.start(checkpoint)
    return core


def trained_core(model: Path, steps: int = 2) -> TrainerCore:
    core = make_core(model)
    for number in range(1, steps + 1):
        step(core, number, make_groups(seed=number))
    return core


def write(core: TrainerCore, number: int, folder: Path) -> Path:
    folder.mkdir()
    core.copy_state(number)
    core.write_state(number, folder, [])
    return folder


def tensors_of(bundle: WeightBundle) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in unpack_weights(bundle).items()}


def whole(model: Path, bundle: WeightBundle) -> dict[str, torch.Tensor]:
    """What a replica has after a version has come."""
    return tensors_of(AdapterMerger(make_lora_config(), model).merge(bundle))


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_only_its_matrices(
    any_model: Path,
) -> None:
    base = read_base(any_model, trust_remote_code=False)
    core = make_core(any_model)
    first = core.export_weights()
    touched = {name.removesuffix(LEFT) for name in tensors_of(first) if name.endswith(LEFT)}
    assert touched
    assert all(torch.equal(base[n], tensor) for n, tensor in whole(any_model, first).items())
    step(core, 1, make_groups(seed=1))
    second = whole(any_model, core.export_weights())
    assert second.keys() == base.keys()
    assert {n for n, tensor in second.items() if not torch.equal(tensor, base[n])} == touched


def test_engine_and_trainer_agree_under_an_adapter(any_model: Path) -> None:
    core = trained_core(any_model)
    config = make_lora_config(rollout={"max_prompt_length": 16, "kv_cache_bytes": 1 << 24})
    engine = TorchEngine(config, load_model(config, any_model).without_eos())
    engine.update_weights(3, AdapterMerger(config, any_model).merge(core.export_weights()))
    prompts = [[5, 6, 7], [9, 8]]
    requests = [
        request(f"{place}-{member}", prompt, max_tokens=9, seed=member)
        for place, prompt in enumerate(prompts)
        for member in range(4)
    ]
    results = run(engine, requests)
    groups = [
        [
            trajectory(prompt, results[f"{place}-{member}"], group_id=place, reward=float(member))
            for member in range(4)
        ]
        for place, prompt in enumerate(prompts)
    ]
    metrics = core.train_step(
        TrainRequest(step=3, policy_version=3, payloads=(), mini_batch_groups=2, num_tokens=1),
        groups,
    ).metrics
    assert metrics["engine_mismatch/num_tokens"] == 2 * 4 * 9
    assert metrics["engine_mismatch/logprobs_diff_max"] < 1e-4


def trajectory(
    prompt: list[int], sampled: Generation, *, group_id: int, reward: float
) -> Trajectory:
    ids = np.concatenate([prompt, sampled.token_ids]).astype(np.int32)
    mask = np.arange(ids.size) >= len(prompt)
    logprobs = np.zeros(ids.size, dtype=np.float32)
    logprobs[mask] = sampled.logprobs
    return Trajectory(
        sample_id=sampled.request_id,
        group_id=group_id,
        reward=reward,
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        versions=np.where(mask, 3, -1).astype(np.int32),
    )


def test_only_the_adapter_is_published(llama: Path) -> None:
    core = make_core(llama)
    bundle = core.export_weights()
    assert all(name.endswith((LEFT, RIGHT)) for name in tensors_of(bundle))
    trainable = sum(p.numel() for p in core._model.parameters() if p.requires_grad)
    assert sum(t.numel() for t in tensors_of(bundle).values()) == trainable
    moments = sum(p.numel() for g in core._updater.optimizer.param_groups for p in g["params"])
    assert moments == trainable
    full = TrainerCore(make_config(), llama)
    full.start(None)
    assert set(tensors_of(full.export_weights())) == set(whole(llama, bundle))


@PEFT_ASKS_TRANSFORMERS
def test_merging_gives_what_pefts_own_merge_gives(any_model: Path, tmp_path: Path) -> None:
    core = trained_core(any_model)
    folder = write(core, 2, tmp_path / "checkpoint")
    stock = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(stock, folder / "adapter").merge_and_unload()
    expected = dict(theirs.named_parameters())
    ours = whole(any_model, core.export_weights())
    assert ours.keys() == expected.keys()
    base = read_base(any_model, trust_remote_code=False)
    moved = max(float((ours[n] - base[n]).abs().max()) for n in base)
    assert moved > 1e-2
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-6, atol=1e-6)


@PEFT_ASKS_TRANSFORMERS
def test_a_checkpoint_loads_in_transformers_and_in_peft(any_model: Path, tmp_path: Path) -> None:
    core = trained_core(any_model)
    folder = write(core, 2, tmp_path / "checkpoint")
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    core._model.set_attn_implementation("eager")  # the trainer's own takes packed rows alone
    with torch.no_grad():
        ours = core._model(input_ids=ids, use_cache=False)
        loaded = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(any_model, dtype=torch.float32)
        before = base(input_ids=ids).logits.log_softmax(-1)
        adapted = peft.PeftModel.from_pretrained(base, folder / "adapter")
        logprobs = [m(input_ids=ids).logits.log_softmax(-1) for m in (loaded, adapted)]
    expected = ours.logits.log_softmax(-1)
    for found in logprobs:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert float((before - expected).abs().max()) > 1e-2
    assert len(AutoTokenizer.from_pretrained(folder / "hf")) > 0
    merged_tensors = read_base(folder / "hf", trust_remote_code=False)
    replica = whole(any_model, core.export_weights())
    assert all(torch.equal(tensor, merged_tensors[name]) for name, tensor in replica.items())
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".parquet"}
    content = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["peft_type"]) == (4, 12, "LORA")


def test_resume_is_bit_identical_to_going_on(any_model: Path, tmp_path: Path) -> None:
    core = trained_core(any_model)
    folder = write(core, 2, tmp_path / "checkpoint")
    torch.manual_seed(1234)
    resumed = make_core(any_model, folder)
    published = [tensors_of(c.export_weights()) for c in (core, resumed)]
    assert all(torch.equal(tensor, published[1][n]) for n, tensor in published[0].items())
    copies = []
    for trainer in (core, resumed):
        for number in (3, 4):
            step(trainer, number, make_groups(seed=number))
        trainer.copy_state(4)
        copies.append(trainer._copies[4])
    assert copies[0].progress == copies[1].progress
    for mine, theirs in (
        (copies[0].model, copies[1].model),
        (copies[0].moments, copies[1].moments),
    ):
        assert list(mine) == list(theirs)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert any(not torch.equal(t, published[0][n]) for n, t in copies[0].model.items())


def test_two_fresh_trainers_of_a_seed_are_the_same(llama: Path) -> None:
    bundles = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        bundles.append(tensors_of(make_core(llama).export_weights()))
    assert all(torch.equal(tensor, bundles[1][name]) for name, tensor in bundles[0].items())


def test_held_versions_are_adapters_that_merge_again(llama: Path, tmp_path: Path) -> None:
    core = trained_core(llama, steps=1)
    held = core.export_weights()
    step(core, 2, make_groups(seed=2))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    core.copy_state(2)
    core.write_state(2, folder, [], {1: held})
    restored = make_core(llama, folder).restored_weights(1)
    assert restored.num_bytes == held.num_bytes
    before, after = whole(llama, held), whole(llama, restored)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_checkpoint_of_other_base_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = write(trained_core(llama), 2, tmp_path / "checkpoint")
    other = shutil.copytree(llama, tmp_path / "other")
    model = make_model(CONFIGS["llama"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 0.01
    model.save_pretrained(other)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.*other base weights"):
        make_core(other, folder)


@pytest.mark.parametrize("damage", ["missing", "broken", "rank"])
def test_a_damaged_adapter_is_named(llama: Path, tmp_path: Path, damage: str) -> None:
    folder = write(trained_core(llama), 2, tmp_path / "checkpoint")
    path = folder / "adapter/adapter_model.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "broken":
        path.write_bytes(path.read_bytes()[:-1])
    changes = {"lora_rank": 5} if damage == "rank" else {}
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        make_core(llama, folder, **changes)


def test_named_layers_alone_get_an_adapter(llama: Path) -> None:
    core = make_core(llama, target_modules=("q_proj", "v_proj"))
    names = {name.rpartition(".weight")[0].split(".")[-1] for name in core_names(core)}
    assert names == {"q_proj", "v_proj"}


def core_names(core: TrainerCore) -> list[str]:
    return list(tensors_of(core.export_weights()))


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama", ("no_such_layer",), "no_such_layer"),
        ("llama", ("lm_head",), "lm_head shares its weights"),
        ("llama", ("embed_tokens",), "embed_tokens is a Embedding; allowed: linear layers"),
        ("mamba", "all-linear", "Mamba"),
    ],
)
def test_layers_that_cannot_be_trained_are_refused(
    tmp_path: Path, name: str, targets: object, message: str
) -> None:
    model = save_model(tmp_path / "model", CONFIGS[name])
    with pytest.raises(ConfigError, match=r"model\.target_modules=") as caught:
        make_core(model, target_modules=targets)
    assert message in str(caught.value)


def test_an_untied_head_may_have_an_adapter(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", CONFIGS["llama-untied"])
    core = make_core(model, target_modules=("lm_head",))
    step(core, 1, make_groups(seed=1))
    base = read_base(model, trust_remote_code=False)
    found = whole(model, core.export_weights())
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, base[name])}
    assert changed == {"lm_head.weight"}


def test_a_missing_peft_is_a_config_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_peft(name: str, package: str | None = None) -> object:
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_peft)
    with pytest.raises(ConfigError, match=r"model\.lora_rank: .*pip install 'freewheel\[lora\]'"):
        make_core(llama)


def test_a_missing_peft_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    config = shipped_config()
    assert look(config).missing == ()
    adapter = replace(config, model=replace(config.model, lora_rank=8))
    assert look(adapter, purpose="validate").missing == ()
    (missing,) = look(adapter).missing
    assert missing == (
        "model.lora_rank=8: peft is not installed; type: pip install 'freewheel[lora]'"
    )


@pytest.mark.parametrize("targets", [(), ("q_proj", "")])
def test_an_adapter_needs_layers(targets: tuple[str, ...]) -> None:
    config = shipped_config()
    model = replace(config.model, lora_rank=8, target_modules=targets)
    with pytest.raises(ConfigError, match=r"model\.target_modules = .*an adapter needs layers"):
        check_config(replace(config, model=model))
    check_config(replace(config, model=replace(model, lora_rank=0)))


def test_what_is_trained_cannot_change_in_a_resumed_run() -> None:
    plain, adapter = Config(), make_lora_config(target_modules=("q_proj",))
    assert structure(plain)["model.lora_rank"] == 0
    found = json.loads(json.dumps(structure(adapter)))
    assert found == structure(adapter)
    assert found["model.target_modules"] == ["q_proj"]
    assert found.items() >= {"model.lora_rank": 4, "model.lora_alpha": 12}.items()


def test_the_base_is_a_view_of_the_file_where_the_number_format_is_the_engines(
    llama: Path,
) -> None:
    merger = AdapterMerger(make_lora_config(), llama)
    before = {name: tensor.data_ptr() for name, tensor in merger._base.items()}
    merger.merge(make_core(llama).export_weights())
    assert {name: tensor.data_ptr() for name, tensor in merger._base.items()} == before
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [
        tuple(int(end, 16) for end in parts[0].split("-"))
        for parts in maps
        if parts[-1] == str(llama / "model.safetensors")
    ]
    for pointer in before.values():
        assert any(start <= pointer < stop for start, stop in mapped)


def test_a_bfloat16_engine_gets_what_was_merged_in_float32(llama: Path) -> None:
    bundle = trained_core(llama).export_weights()
    exact = whole(llama, bundle)
    config = make_lora_config(rollout={"dtype": "bfloat16"})
    merger = AdapterMerger(config, llama)
    for _ in range(2):  # the base is converted at the first
        found = tensors_of(merger.merge(bundle))
        assert {t.dtype for t in found.values()} == {torch.bfloat16}
        assert all(torch.equal(t, exact[name].bfloat16()) for name, t in found.items())


def test_replicas_of_a_sharded_folder_merge_the_same(llama: Path, tmp_path: Path) -> None:
    bundle = trained_core(llama).export_weights()
    shards = shutil.copytree(llama, tmp_path / "shards")
    (shards / "model.safetensors").unlink()
    make_model(CONFIGS["llama"]).save_pretrained(shards, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    one, other = whole(llama, bundle), whole(shards, bundle)
    assert list(one) == list(other)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_files_with_other_names_are_read_through_transformers(llama: Path, tmp_path: Path) -> None:
    older = shutil.copytree(llama, tmp_path / "older")
    tensors = read_base(llama, trust_remote_code=False)
    renamed = {name.removeprefix("model."): tensor.clone() for name, tensor in tensors.items()}
    state.save_file(renamed, older / "model.safetensors", metadata={"format": "pt"})
    found = read_base(older, trust_remote_code=False)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"other" + LEFT: torch.zeros(2, 1)}, "other"),
        ({"w" + LEFT: torch.zeros(2, 1)}, "only one of its two factors"),
        ({"w" + LEFT: torch.zeros(3, 1), "w" + RIGHT: torch.zeros(1, 3)}, r"w is \(2, 3\)"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    factors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(InvariantError, match=message):
        dict(merged({"w": torch.zeros(2, 3)}, factors, 1.0))


def test_a_merge_by_hand() -> None:
    base = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "v": torch.ones(2)}
    factors = {"w" + LEFT: torch.tensor([[1.0], [2.0]]), "w" + RIGHT: torch.tensor([[3.0, 5.0]])}
    found = dict(merged(base, factors, 0.5))
    np.testing.assert_array_equal(found["w"].numpy(), [[2.5, 4.5], [6.0, 9.0]])
    np.testing.assert_array_equal(base["w"].numpy(), [[1.0, 2.0], [3.0, 4.0]])
    assert found["v"] is base["v"]


def test_what_is_packed_again_is_unpacked_the_same() -> None:
    factors = {"w" + LEFT: torch.randn(2, 1), "w" + RIGHT: torch.randn(1, 3)}
    back = unpack_weights(pack_weights(factors.items()))
    assert all(torch.equal(tensor, back[name]) for name, tensor in factors.items())


def test_the_adapter_is_written_under_the_base_layers_names(llama: Path, tmp_path: Path) -> None:
    core = trained_core(llama)
    factors = {name: t.detach().clone() for name, t in lora.named_factors(core._model)}
    model = ModelConfig(lora_rank=4, lora_alpha=12)
    lora.write_adapter(tmp_path, core._model, model, llama, factors)
    content = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    targets = content["target_modules"]
    assert targets == [n.removesuffix(".weight" + LEFT) for n in factors if n.endswith(LEFT)]
    assert content["base_model_name_or_path"] == str(llama)
