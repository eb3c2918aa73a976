"""Workers as Ray actors. Nothing else of the control plane imports Ray."""

from freewheel.backends.ray.backend import RayBackend as RayBackend
from freewheel.backends.ray.cores import Cores as Cores

__all__ = ["Cores", "RayBackend"]
