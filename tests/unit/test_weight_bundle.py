"""What a bundle keeps alive of the tensors that it is made from."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from freewheel.weights import pack_weights, unpack_weights


def test_gathered_tensors_are_let_go_one_by_one():
    storages, alive = [], []

    def gathered():
        for i in range(10):
            alive.append(sum(not storage.expired() for storage in storages))
            tensor = torch.full((64,), float(i))
            storages.append(StorageWeakRef(tensor.untyped_storage()))
            yield f"w{i}", tensor
            del tensor

    bundle = pack_weights(gathered(), dtype=torch.bfloat16)
    assert max(alive) <= 1
    tensors = unpack_weights(bundle)
    assert [tensors[f"w{i}"][0].item() for i in range(10)] == list(range(10))


def test_tied_tensors_are_sent_once_whatever_the_number_format():
    weight, other = torch.ones(4, 3), torch.zeros(4, 3)
    for dtype in (None, torch.bfloat16):
        bundle = pack_weights([("a", weight), ("tied", weight.detach()), ("b", other)], dtype=dtype)
        assert [spec.name for spec in bundle.specs] == ["a", "b"]
