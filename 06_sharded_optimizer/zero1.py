"""06, as the ZeRO paper has its first stage: gradients go to the owners alone, 2 Ψ instead of 3 Ψ.

It is measured beside ShardedOptimizer by sharded_optimizer.py.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class ZeRO1:
    """Sharded like ShardedOptimizer; gradients must not be averaged before."""

    def __init__(self, params, optimizer_cls, **options):
        world_size = dist.get_world_size()
        largest_first = sorted(params, key=torch.numel, reverse=True)
        self.parts = [largest_first[owner::world_size] for owner in range(world_size)]
        self.own = self.parts[dist.get_rank()]
        self.local = optimizer_cls(self.own, **options)

    def zero_grad(self):
        for part in self.parts:
            for parameter in part:
                parameter.grad = None

    @torch.no_grad()
    def step(self):
        gradients = [parameters_to_vector([p.grad for p in part]) for part in self.parts]
        mean = self.reduce_scatter(gradients)
        vector_to_parameters(mean, [parameter.grad for parameter in self.own])
        self.local.step()
        for owner, part in enumerate(self.parts):
            values = parameters_to_vector(part)
            dist.broadcast(values, owner)
            vector_to_parameters(values, part)

    def reduce_scatter(self, gradients):
        """Send each owner its part; this rank gets all ranks' gradients of its own."""
        own = gradients[dist.get_rank()]
        received = own.new_empty(len(gradients), len(own))
        sizes = [len(own)] * len(gradients), [len(part) for part in gradients]
        dist.all_to_all_single(received.view(-1), torch.cat(gradients), *sizes)
        return received.mean(0)
