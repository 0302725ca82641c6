"""FSDP, to be written first: make check MINE=06_sharded_optimizer/fsdp/exercise.py:FSDP"""

import torch
from torch import nn


class FSDP(nn.Module):
    """Keep 1/N of each weight, of its gradient and of its optimizer state; biases stay whole."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None):
        """Take rank 0's values, keep this rank's shard of each weight, and register hooks.

        Before a layer computes its weight is put together (all-gather), in forward and in backward;
        after it its memory is given up. A gradient's shards are reduced to their owners
        (reduce-scatter). compute_dtype: weights travel and compute in it; shards stay as they are.
        """
        super().__init__()
        self.module = module
        raise NotImplementedError

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Wait for all shards of gradients; average the gradients of what stays whole."""
        raise NotImplementedError

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return all parameters, whole, on every rank, under the module's own names."""
        raise NotImplementedError
