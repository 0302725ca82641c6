"""ZeRO2, to be written first: make check MINE=06_sharded_optimizer/zero2/exercise.py:ZeRO2

Without overlap, and every weight on its own instead of in buckets. The hooks of 05 and the gather
during forward come after it.
"""

import torch
import torch.distributed as dist
from torch import nn


class Slice:
    """One weight, which every rank has whole, and this rank's slice of it, which it updates."""

    def __init__(self, weight: nn.Parameter):
        """Put the weight into `flat`, with zeros up to a multiple of N, and cut out the slice.

        The weight is a view into `flat`, so what is gathered into `flat` is the weight.
        """
        self.weight = weight
        n, rank = dist.get_world_size(), dist.get_rank()
        size = weight.numel()
        self.flat = torch.zeros(size + -size % n, dtype=weight.dtype, device=weight.device)
        self.flat[:size] = weight.detach().flatten()
        weight.data = self.flat[:size].view(weight.shape)
        self.slice = self.flat.view(n, -1)[rank]
        self.shard = nn.Parameter(self.slice)  # the optimizer's; it has the slice's memory

    def reduce_scatter(self) -> None:
        """Add the mean of all ranks' slices to shard.grad, zeros for a weight without a gradient.

        Free weight.grad.
        """
        raise NotImplementedError

    def all_gather(self) -> None:
        """Fill `flat`, and so the weight, with the slices of all ranks."""
        raise NotImplementedError


class ZeRO2(nn.Module):
    """Keep 1/N of the gradients and of the optimizer's state; the weights stay whole."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        self.slices = [Slice(weight) for weight in trained]
        self.shards = [each.shard for each in self.slices]  # what the optimizer gets

    def forward(self, *inputs, **kwargs):
        """Gather what optimizers have changed, and call the module."""
        raise NotImplementedError

    def finish_gradient_synchronization(self) -> None:
        """Give every shard its gradient. Call it after backward(), before optimizer.step()."""
        raise NotImplementedError

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return all weights, whole and as they are now, under the module's own names."""
        raise NotImplementedError
