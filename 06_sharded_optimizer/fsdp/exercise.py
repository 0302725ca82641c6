"""FSDP, to be written first, in three steps.

    make check MINE=06_sharded_optimizer/fsdp/exercise.py:FSDP

tries steps 1 and 2 as soon as they are written, and everything after step 3. The hooks are
registered, and every rank has rank 0's values. No call needs to be asynchronous.
"""

import torch
import torch.distributed as dist
from torch import nn


class ShardedWeight:
    """Keep 1/N of one layer's weight; N divides the weight's elements.

    `unsharded` is the whole weight, and what autograd differentiates; it has memory only while it
    is in use. The optimizer sees `local_shard`.
    """

    def __init__(self, weight: nn.Parameter, layers: list[nn.Module]):
        """Cut the weight of these layers, of several where it is tied."""
        n, rank = dist.get_world_size(), dist.get_rank()
        self.unsharded = weight.detach().clone().requires_grad_(weight.requires_grad)
        shard = weight.detach().view(n, -1)[rank].clone()
        self.local_shard = nn.Parameter(shard, weight.requires_grad)
        for layer in layers:
            layer.weight = self.local_shard
            layer.register_forward_pre_hook(self.before_forward)
            layer.register_forward_hook(self.after_forward)
            layer.register_forward_hook(self.expect_backward)
        if weight.requires_grad:
            self.unsharded.register_post_accumulate_grad_hook(self.gradient_is_there)
        self.reshard()

    def unshard(self) -> None:
        """Step 1: give `unsharded` memory, and gather all shards into its `.data`."""
        raise NotImplementedError

    def reshard(self) -> None:
        """Step 1: free the memory of `unsharded`."""
        raise NotImplementedError

    def before_forward(self, layer: nn.Module, inputs) -> None:
        """Step 1, hook 1: put the weight together; let layer.weight be `unsharded`."""
        raise NotImplementedError

    def after_forward(self, layer: nn.Module, inputs, output) -> None:
        """Step 1, hook 2: let layer.weight be `local_shard` again, and free the weight."""
        raise NotImplementedError

    def expect_backward(self, layer: nn.Module, inputs, output) -> None:
        if output.requires_grad:
            output.register_hook(self.before_backward)

    def before_backward(self, gradient: torch.Tensor) -> None:
        """Step 2, hook 3: the layer's backward is next, and needs the whole weight again."""
        raise NotImplementedError

    def gradient_is_there(self, unsharded: torch.Tensor) -> None:
        """Step 3, hook 4: add the mean of all ranks to local_shard.grad (reduce-scatter), and free.

        Free the whole gradient, too.
        """
        raise NotImplementedError


class FSDP(nn.Module):
    """Keep 1/N of each weight, of its gradient and of its optimizer state; biases stay whole."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        layers_of = {}
        for layer in module.modules():
            weight = getattr(layer, "weight", None)
            if weight is not None and weight.ndim >= 2:
                layers_of.setdefault(weight, []).append(layer)
        self.weights = [ShardedWeight(weight, layers) for weight, layers in layers_of.items()]

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Step 3: average the gradients of what stays whole; free what is not free yet."""
        raise NotImplementedError

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Step 3: return all parameters, whole, on every rank, under the module's own names."""
        raise NotImplementedError
