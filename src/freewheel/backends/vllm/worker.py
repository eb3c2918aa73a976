"""What runs in vLLM's own processes: it takes weights in, and ends with the replica.

vLLM imports this module because `WorkerExtension` is its `worker_extension_cls`; the import puts
the weight transfer backend in its place. Invariant: an update either has every weight of the model
or fails; the replica never lets the engine go on after one that failed.
"""

import importlib
import mmap
import os
import select
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from freewheel.backends.vllm.settings import BACKEND
from freewheel.remote_weights import Place, WeightReader

# vLLM is not installed where most of Freewheel is checked, so its types are not known.
_base: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
_factory: Any = importlib.import_module("vllm.distributed.weight_transfer.factory")
_reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")


class WorkerExtension:
    """Nothing is added to vLLM's worker; the class is there so that its module is imported."""


@dataclass(kw_only=True)
class InitInfo(_base.WeightTransferInitInfo):
    """There is no connection to set up."""


@dataclass(kw_only=True)
class UpdateInfo(_base.WeightTransferUpdateInfo):
    """One chunk of weights, as `VllmEngine` describes it.

    `tensors` has name, number format, shape, offset and size in bytes of each. They lie in the
    segment at `path`, or at `place` (`remote_weights.Place`) in the trainer's memory.
    """

    num_bytes: int
    tensors: list[list[Any]]
    path: str = ""
    place: dict[str, Any] | None = None


class FreewheelTransfer(_base.WeightTransferEngine):
    """Reads weights, from shared memory or the trainer's, into the model, layer by layer.

    With tensor parallelism every worker reads all of them and keeps its part.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _reader: WeightReader | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded anew; until the end of it, it cannot compute."""
        self._missing = {name for name, _ in self.model.named_parameters()}
        self._is_checked = self.model_config.quantization is None
        _reload.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one chunk. The tensors are copied: layers keep them until they are complete."""
        loaded = self.model.load_weights(self._tensors(update_info))
        if loaded is None:
            self._is_checked = False
        else:
            self._missing -= loaded

    def finish_weight_update(self) -> None:
        """Put the weights to use.

        Raises:
            RuntimeError: the chunks did not have all weights of the model.
        """
        if self._is_checked and self._missing:
            raise RuntimeError(f"the update has no {', '.join(sorted(self._missing)[:4])}")
        if self._reader is not None:
            self._reader.forget()
        _reload.finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _refresh_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""

    def _tensors(self, info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of a chunk's tensors on the device, by name."""
        flat = _map(info) if info.place is None else self._fetch(info, Place(**info.place))
        for name, dtype, shape, offset, num_bytes in info.tensors:
            view = flat[offset : offset + num_bytes].view(getattr(torch, dtype)).view(tuple(shape))
            yield name, view.to(self.device, copy=True)

    def _fetch(self, info: UpdateInfo, place: Place) -> torch.Tensor:
        """Bytes of a chunk out of the trainer's memory, on the device."""
        if self._reader is None:
            self._reader = WeightReader(self.device)
        ranges = [(offset, num_bytes) for *_, offset, num_bytes in info.tensors]
        return self._reader.read(place, ranges, info.num_bytes)


def _map(info: UpdateInfo) -> torch.Tensor:
    """Bytes of a chunk in shared memory."""
    with open(info.path, "rb") as file:
        memory = mmap.mmap(file.fileno(), info.num_bytes, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _refresh_tied_heads(model: torch.nn.Module) -> None:
    """Pack the output head anew where it shares the embedding's weights.

    On CPUs vLLM computes with a packed copy of the head's weight, and a reload, which finds no
    weights for a tied head, leaves that copy as it was.
    """
    embedding: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    modules: list[Any] = list(model.modules())
    heads = [module for module in modules if isinstance(module, embedding.ParallelLMHead)]
    shared = {
        module.weight.data_ptr()
        for module in modules
        if isinstance(module, embedding.VocabParallelEmbedding) and module not in heads
    }
    for head in heads:
        if head.weight.data_ptr() in shared:
            head.quant_method.process_weights_after_loading(head)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: vLLM itself would run on."""
    parent = os.getppid()
    try:
        descriptor = os.pidfd_open(parent)
    except OSError:
        descriptor = -1
    if descriptor < 0 or os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


_factory.WeightTransferEngineFactory.register_engine(BACKEND, FreewheelTransfer)
threading.Thread(target=_end_with_parent, name="freewheel-parent", daemon=True).start()
