"""What training changes: the model's weights, or an adapter beside them.

Decides what is loaded, published, copied and written; the rest of the trainer knows only a Hugging
Face model of whose parameters some train.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from freewheel.adapter import merged
from freewheel.base_weights import read_base
from freewheel.checkpoint.contents import HF
from freewheel.config.sections import Config
from freewheel.trainer import lora, state


class Trained(Protocol):
    """Either of the two."""

    is_adapter: bool

    def load(self, checkpoint: Path | None) -> PreTrainedModel:
        """The model in float32, on the CPU, as the run begins or as a checkpoint has it.

        Raises:
            CheckpointError: the model or the checkpoint cannot be read.
            ConfigError: this model cannot be trained as configured.
        """
        ...

    def named(self, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that change, by name; sharded where the parameters are."""
        ...

    def write(
        self, copy: state.StateCopy, folder: Path, model: PreTrainedModel
    ) -> dict[str, torch.Tensor]:
        """Write what lies in a checkpoint's folder beside the model; returns all weights of it.

        May run beside training: of `model` only the structure is looked at.
        """
        ...


def make_trained(config: Config, model_path: Path) -> Trained:
    """By `model.lora_rank`."""
    kind = TrainedAdapter if config.model.lora_rank else TrainedModel
    return kind(config, model_path)


class TrainedModel:
    """All weights change."""

    is_adapter = False

    def __init__(self, config: Config, model_path: Path) -> None:
        self._trust = config.model.trust_remote_code
        self._model_path = model_path

    def load(self, checkpoint: Path | None) -> PreTrainedModel:
        """See `Trained`."""
        path = self._model_path if checkpoint is None else checkpoint / HF
        return state.load_model(path, trust_remote_code=self._trust)

    def named(self, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trained`."""
        return state.named_weights(model)

    def write(
        self, copy: state.StateCopy, folder: Path, model: PreTrainedModel
    ) -> dict[str, torch.Tensor]:
        """See `Trained`."""
        return copy.model


class TrainedAdapter:
    """An adapter changes; the model's folder holds what it is merged into."""

    is_adapter = True

    def __init__(self, config: Config, model_path: Path) -> None:
        self._config = config.model
        self._seed = config.trainer.seed
        self._model_path = model_path

    def load(self, checkpoint: Path | None) -> PreTrainedModel:
        """See `Trained`. A checkpoint of other base weights is refused."""
        trust = self._config.trust_remote_code
        model = state.load_model(self._model_path, trust_remote_code=trust)
        lora.inject(model, self._config, seed=self._seed)
        if checkpoint is not None:
            lora.read_adapter(checkpoint, model)
            factors = {name: tensor.detach() for name, tensor in lora.named_factors(model)}
            saved = read_base(checkpoint / HF, trust_remote_code=trust)
            lora.check_base(self._merged(factors), saved, checkpoint)
        return model

    def named(self, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trained`: the factors, as replicas get them."""
        return lora.named_factors(model)

    def write(
        self, copy: state.StateCopy, folder: Path, model: PreTrainedModel
    ) -> dict[str, torch.Tensor]:
        """See `Trained`: the adapter in peft's format; returns the merged model."""
        lora.write_adapter(folder, model, self._config, self._model_path, copy.model)
        return {name: tensor.float() for name, tensor in self._merged(copy.model)}

    def _merged(self, factors: lora.Factors) -> Iterator[tuple[str, torch.Tensor]]:
        """From the folder, not from the model in training, which may be sharded over ranks."""
        trust = self._config.trust_remote_code
        base = read_base(self._model_path, trust_remote_code=trust)
        return merged(base, factors, self._config.lora_scaling)
