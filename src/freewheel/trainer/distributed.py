"""One trainer or several ranks that act as one: FSDP2 over gloo (CPU) or NCCL (CUDA).

Every rank gets the same groups and takes its share of the sequences. Denominators of the loss are
those of the whole mini-batch, so gradients are summed over ranks, not averaged. Whatever is
gathered is gathered by every rank (it is a collective) and kept by rank 0.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from freewheel.trainer.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the trainer's. `init_method`: torch's, such as `tcp://host:port`."""

    rank: int = 0
    world_size: int = 1
    init_method: str = ""

    @property
    def is_main(self) -> bool:
        """Rank 0 reports, exports and writes."""
        return self.rank == 0

    def join(self, device: torch.device) -> None:
        """Meet the other ranks."""
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=self.init_method,
                rank=self.rank,
                world_size=self.world_size,
                device_id=device if device.type == "cuda" else None,
            )

    def leave(self) -> None:
        """Part from the other ranks. Idempotent."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Largest over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor


def shard(policy: Policy, ranks: Ranks) -> None:
    """Shard the parameters over the ranks, in place: each decoder layer a unit, the rest one."""
    if ranks.world_size == 1:
        return
    mesh = dist.device_mesh.init_device_mesh(
        next(policy.parameters()).device.type, (ranks.world_size,)
    )
    for layer in _layers(policy.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo has no scaled reduction; with a factor of 1 none is needed.
            module.set_force_sum_reduction_for_comms(True)


def drop_gathered(policy: Policy) -> None:
    """Forget gathered parameters, before the optimizer changes the shards.

    A pass without backward leaves the outermost unit gathered, and what reads it next would see the
    weights of before the step.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that the model's authors name as units; without names the whole model is one."""
    names: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from the ranks if it is sharded. A collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The whole `value` placed and sharded as `parameter` is."""
    if isinstance(parameter, DTensor):
        value = value.to(parameter.device)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
