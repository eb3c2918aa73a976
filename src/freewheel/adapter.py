"""A LoRA adapter on its way from the trainer to a replica, and its merge into the base weights.

What is published for a matrix W of the base model are two thin factors in W's own orientation, so
that whoever merges needs to know nothing of the layer: W + scaling * left @ right. Replicas and
checkpoints merge by the same function from the same folder, so all of them get the same weights.

Shapes: M rows and N columns of a matrix, R rank of the adapter.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from freewheel.base_weights import read_base
from freewheel.config.sections import Config
from freewheel.engine.loading import rollout_dtype
from freewheel.errors import InvariantError
from freewheel.weights import WeightBundle, pack_weights, unpack_weights

LEFT = ".lora_left"
RIGHT = ".lora_right"
"""Behind the name of a matrix: its factors, (M, R) and (R, N)."""


class AdapterMerger:
    """Turns published adapters into whole bundles, which any engine loads. One a replica.

    The base weights are views of the model's files, without a copy where these hold the engine's
    number format; a version makes anew only the matrices that the adapter touches.

    Args:
        config: `model` gives the scaling, `rollout` the engine's number format.
        model_path: Hugging Face folder of the initial policy.

    Raises:
        CheckpointError: the folder holds no weights that fit its model.
    """

    def __init__(self, config: Config, model_path: Path) -> None:
        self._scaling = config.model.lora_scaling
        self._dtype = rollout_dtype(config.rollout)
        self._base = read_base(model_path, trust_remote_code=config.model.trust_remote_code)

    def merge(self, bundle: WeightBundle) -> WeightBundle:
        """The whole weights of a version, from the bundle of its adapter.

        Raises:
            InvariantError: the adapter is of another model.
        """
        adapter = unpack_weights(bundle)
        self._convert_untouched(adapter)
        return pack_weights(merged(self._base, adapter, self._scaling), dtype=self._dtype)

    def _convert_untouched(self, adapter: Mapping[str, torch.Tensor]) -> None:
        """Change the number format of what no adapter touches, once; the files' views go."""
        for name, tensor in self._base.items():
            if tensor.is_floating_point() and name + LEFT not in adapter:
                self._base[name] = tensor.to(self._dtype)


def merged(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], scaling: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """All weights by name in the order of `base`; what the adapter does not touch is no copy.

    Args:
        base: the base model's weights by name.
        adapter: float32 factors by name, as published.
        scaling: of the product: alpha / rank.

    Raises:
        InvariantError: the adapter has factors for a matrix that the base has not, or only one.

    Source: Hu et al. 2021 (arXiv:2106.09685), equation 3.
    """
    known = {name + suffix for name in base for suffix in (LEFT, RIGHT)}
    unknown = sorted(set(adapter) - known)
    if unknown:
        raise InvariantError(f"{len(unknown)} tensors of no known matrix: {unknown[0]}, ...")
    for name, tensor in base.items():
        yield name, _merged_matrix(name, tensor, adapter, scaling)


def _merged_matrix(
    name: str, weight_MN: torch.Tensor, adapter: Mapping[str, torch.Tensor], scaling: float
) -> torch.Tensor:
    left_MR, right_RN = adapter.get(name + LEFT), adapter.get(name + RIGHT)
    if left_MR is None and right_RN is None:
        return weight_MN
    if left_MR is None or right_RN is None:
        raise InvariantError(f"{name}: the adapter has only one of its two factors")
    shape = (left_MR.shape[0], right_RN.shape[1])
    if weight_MN.shape != shape:
        raise InvariantError(f"{name} is {tuple(weight_MN.shape)}, the adapter's product {shape}")
    # In float32 also where the engine computes in less: rounded once, as a whole version would be.
    return (left_MR @ right_RN).mul_(scaling).add_(weight_MN)
