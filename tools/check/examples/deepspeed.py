"""ZeRO-2 in DeepSpeed's way: hooks fill one flat buffer, and a rank steps its part in float32."""

import torch
import torch.distributed as dist
from torch import nn


class ZeroOptimizer:
    """Wraps an optimizer, whose groups then have this rank's part alone."""

    def __init__(self, optimizer):
        self.optimizer, self.members = optimizer, []
        for group in optimizer.param_groups:
            trained = [each for each in group["params"] if each.requires_grad]
            length = self.part_of(sum(each.numel() for each in trained)) * dist.get_world_size()
            flat = self.flatten(trained, length)
            part = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())
            self.members.append((trained, part, torch.zeros_like(flat)))
            group["params"] = [part]
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self.keep)

    def part_of(self, length):
        return -(-length // dist.get_world_size())

    def flatten(self, tensors, length):
        flat = torch.cat([each.detach().flatten().float() for each in tensors])
        return nn.functional.pad(flat, (0, length - len(flat)))

    def keep(self, parameter):
        """Add a gradient to the flat buffer, and give up its own memory."""
        for trained, _, gradients in self.members:
            start = 0
            for each in trained:
                here = gradients[start : start + each.numel()]
                if each is parameter:
                    here += parameter.grad.flatten()[: len(here)]
                start += each.numel()
        parameter.grad = None

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        for _, _, gradients in self.members:
            gradients.zero_()

    @torch.no_grad()
    def step(self):
        for _, part, gradients in self.members:
            part.grad = torch.empty_like(part)
            dist.reduce_scatter_tensor(part.grad, gradients / dist.get_world_size())
        self.optimizer.step()
        for trained, part, gradients in self.members:
            whole = torch.empty_like(gradients)
            dist.all_gather_into_tensor(whole, part.detach())
            gradients.zero_()
            for parameter in trained:
                values, whole = whole[: parameter.numel()], whole[parameter.numel() :]
                parameter.flatten()[: len(values)].copy_(values)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


class Engine:
    """Has model and optimizer in one."""

    def __init__(self, model, optimizer):
        self.module, self.optimizer = model, ZeroOptimizer(optimizer)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()


class LosesTheRest(ZeroOptimizer):
    """Rounds the size of a part down."""

    def part_of(self, length):
        return length // dist.get_world_size()


def zero(params, optimizer_cls, **options):
    return ZeroOptimizer(optimizer_cls(params, **options))


def loses_the_rest(params, optimizer_cls, **options):
    return LosesTheRest(optimizer_cls(params, **options))
