"""Weights read out of another process's memory: whole, of the right version, or an error."""

import psutil
import pytest
import torch
from safetensors.torch import load_file

from freewheel.config.sections import Config, RayConfig
from freewheel.errors import WeightsLostError
from freewheel.remote_weights import (
    Place,
    RemoteWeights,
    WeightReader,
    WeightSource,
    network_environment,
)
from freewheel.trainer.core import TrainerCore
from freewheel.weights import unpack_weights
from tests.contract.subjects import make_model
from tests.remote_source import source_process
from tests.unit.trainer_models import make_groups, save_model
from tests.unit.trainer_runs import make_config, step

pytest.importorskip("nixl")
pytestmark = pytest.mark.vllm  # only there is NIXL installed

CPU = torch.device("cpu")


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    shapes = {"a": (3, 5), "b": (700, 300), "c": (1,), "d": (64, 33)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def fetch(reader: WeightReader, weights: RemoteWeights, start: int = 0) -> dict[str, torch.Tensor]:
    """The tensors from `start` on, as an engine reads a chunk of them."""
    ranges, end = [], 0
    for spec in weights.specs[start:]:
        ranges.append((end, spec.num_bytes))
        end += -(-spec.num_bytes // 64) * 64
    flat = reader.read(Place(**weights.place(start, len(weights.specs))), ranges, end).clone()
    return {
        spec.name: flat[at : at + size].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, (at, size) in zip(weights.specs[start:], ranges, strict=True)
    }


@pytest.fixture
def source() -> WeightSource:
    return WeightSource(Config())


@pytest.fixture
def reader() -> WeightReader:
    return WeightReader(CPU)


def check(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("segment_bytes", [1 << 12, 1 << 28])
def test_what_is_read_is_what_was_published(source, reader, dtype, segment_bytes, monkeypatch):
    monkeypatch.setattr("freewheel.remote_weights._SEGMENT_BYTES", segment_bytes)
    published = source.publish(tensors(1).items(), dtype=dtype)
    for start in (0, 2):
        got = fetch(reader, published, start)
        assert list(got) == ["a", "b", "c", "d"][start:]
        check(got, tensors(1))
    check(unpack_weights(source.on_host(published)), tensors(1))


def test_integers_keep_their_format_and_tied_tensors_are_sent_once(source, reader):
    weight, steps = torch.randn(4, 4), torch.tensor([7])
    named = {"embed": weight, "steps": steps, "head": weight}
    published = source.publish(named.items(), dtype=torch.bfloat16)
    assert [spec.name for spec in published.specs] == ["embed", "steps"]
    check(fetch(reader, published), named)


def test_a_version_stays_until_it_is_dropped(source, reader):
    first = source.publish(tensors(1).items(), dtype=torch.float32)
    second = source.publish(tensors(2).items(), dtype=torch.float32)
    for weights, version in ((first, 1), (second, 2), (first, 1)):
        check(fetch(reader, weights), tensors(version))
    source.drop(first.publication)
    source.drop(first.publication)
    with pytest.raises(WeightsLostError):
        source.on_host(first)
    check(fetch(reader, second), tensors(2))


def test_memory_is_used_again(source, reader):
    places = set()
    for version in range(6):
        weights = source.publish(tensors(version).items(), dtype=torch.float32)
        check(fetch(reader, weights), tensors(version))
        reader.forget()
        places.add(weights.addresses)
        source.drop(weights.publication)
    assert len(places) == 1


def test_a_publication_that_fails_gives_its_memory_back(source, reader):
    def broken():
        yield from tensors(1).items()
        raise ValueError("the gather failed")

    with pytest.raises(ValueError, match="the gather failed"):
        source.publish(broken(), dtype=torch.float32)
    weights = source.publish(tensors(2).items(), dtype=torch.float32)
    check(fetch(reader, weights), tensors(2))
    assert not source._free


def test_weights_of_another_source_are_lost(source):
    weights = WeightSource(Config()).publish(tensors(1).items(), dtype=torch.float32)
    source.publish(tensors(1).items(), dtype=torch.float32)
    with pytest.raises(WeightsLostError, match="is not in the memory of"):
        source.on_host(weights)


@pytest.fixture
def other_process():
    """A source in a process of its own, and what it published."""
    with source_process(3) as made:
        yield made


def test_weights_of_a_process_that_is_gone_are_lost(reader, other_process):
    process, weights = other_process
    check(fetch(reader, weights), dict(make_model(3).named_parameters()))
    process.kill()
    process.wait()
    for _ in range(2):
        with pytest.raises(WeightsLostError, match="in the memory of"):
            fetch(reader, weights)
        reader.forget()


def test_it_listens_on_this_machine_alone_unless_a_cluster_is_joined(other_process, monkeypatch):
    process, _ = other_process
    for connection in psutil.Process(process.pid).net_connections(kind="inet"):
        assert connection.laddr.ip in ("127.0.0.1", "::1"), connection
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert network_environment(Config()) == {"UCX_NET_DEVICES": "lo"}
    assert network_environment(Config(ray=RayConfig(address="10.0.0.1:6379"))) == {}
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert network_environment(Config()) == {}


@pytest.fixture
def core(tmp_path) -> TrainerCore:
    """A trainer that keeps what it publishes."""
    config = make_config(rollout={"engine": "vllm", "weight_transfer": "nixl"})
    core = TrainerCore(config, save_model(tmp_path / "model"), total_optimizer_steps=10)
    core.start(None)
    return core


def test_a_checkpoint_carries_versions_out_of_the_trainer_s_memory(core, reader, tmp_path):
    held = {0: core.export_weights()}
    step(core, 1, make_groups(seed=1))
    held[1] = core.export_weights()
    before = [fetch(reader, weights) for weights in held.values()]
    step(core, 2, make_groups(seed=2))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    core.copy_state(2)
    core.write_state(2, folder, [], held)
    for version, weights in enumerate(before):
        written = load_file(folder / f"trainer/version_{version:06d}.safetensors")
        assert written.keys() == weights.keys()
        check(weights, written)
    assert not torch.equal(before[0]["model.norm.weight"], before[1]["model.norm.weight"])


def test_a_checkpoint_asks_for_a_version_again_that_went_with_another_trainer(core, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    core.copy_state(1)
    with source_process(3) as (_, elsewhere):
        pass
    with pytest.raises(WeightsLostError) as caught:
        core.write_state(1, folder, [], {4: elsewhere, 5: core.export_weights()})
    assert caught.value.versions == (4,)
    assert not list(folder.iterdir())
    core.write_state(1, folder, [], {4: core.export_weights()})
    assert (folder / "trainer/version_000004.safetensors").is_file()
