"""06, to be written first: make check MINE=06_sharded_optimizer/exercise.py:ShardedOptimizer"""

import torch


class ShardedOptimizer(torch.optim.Optimizer):
    """`optimizer_cls(params, **options)`, with the state of each parameter on one rank only."""

    def __init__(self, params, optimizer_cls, **options):
        """Keep what the local optimizer is made of; the base class calls add_param_group."""
        self.optimizer_cls = optimizer_cls
        self.local = None  # an optimizer_cls of the parameters that this rank owns
        super().__init__(params, options)

    def add_param_group(self, param_group: dict) -> None:
        """Choose an owner for each parameter, the same on all ranks; add its own to `local`."""
        raise NotImplementedError

    def step(self, closure=None):
        """Step `local`, with the options in self.param_groups; owners send the new values."""
        raise NotImplementedError
