"""The embedded inference engine: continuous batching in torch, on CPU and CUDA."""

from freewheel.engine.async_engine import AsyncEngine as AsyncEngine
from freewheel.engine.torch_engine import TorchEngine as TorchEngine

__all__ = ["AsyncEngine", "TorchEngine"]
