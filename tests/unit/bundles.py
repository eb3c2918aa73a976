"""Bundles of weights in tests: a bundle may be the memory of a model that goes on."""

from dataclasses import replace

import numpy as np

from freewheel.weights import WeightBundle


def all_bytes(bundle: WeightBundle) -> np.ndarray:
    """A copy of all tensors, one after the other, uint8 (num_bytes,)."""
    return np.concatenate(bundle.arrays)


def kept(bundle: WeightBundle) -> WeightBundle:
    """The bundle as it is now, whatever the trainer does next."""
    return replace(bundle, arrays=tuple(array.copy() for array in bundle.arrays))
