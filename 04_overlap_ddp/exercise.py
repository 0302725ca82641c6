"""04, to be written first: make check MINE=04_overlap_ddp/exercise.py:OverlapDDP"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


def broadcast_from_rank_0(module: nn.Module, process_group=None) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), group=process_group, group_src=0)


class OverlapDDP(nn.Module):
    """Average gradients with one all-reduce per parameter, during backward."""

    def __init__(self, module: nn.Module):
        """Hooks start the all-reduces of complete gradients, in one order, the last first."""
        super().__init__()
        self.module = module
        self.synchronizing = True  # False within no_sync()
        broadcast_from_rank_0(module)
        raise NotImplementedError

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Start the all-reduces that backward did not (of zeros), and wait for all."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self):
        """Return a context within which gradients are only added up, and nothing is sent."""
        before = self.synchronizing
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = before
