"""An FSDP of the course's Linear alone, of sizes that the ranks divide."""

import torch
import torch.distributed as dist
from a_course.model import Linear

from .mistakes import Right


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(context, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        ranks = dist.get_world_size()
        gradient = gradient.contiguous() / ranks
        dist.all_reduce(gradient)
        return gradient.chunk(ranks)[dist.get_rank()]


def fill(layer, inputs):
    layer.W = Whole.apply(layer.part)


def free(layer, *_):
    del layer.W


class FSDP(Right):
    def __init__(self, module):
        super().__init__(module)
        parts = {}
        for layer in [each for each in module.modules() if isinstance(each, Linear)]:
            weight = layer._parameters.pop("W")
            own = weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
            layer.part = parts.setdefault(weight, torch.nn.Parameter(own, weight.requires_grad))
            layer.register_forward_pre_hook(fill)
            layer.register_forward_hook(free)

    def trained(self):
        named = self.module.named_parameters()
        return [each for name, each in named if each.requires_grad and not name.endswith("part")]

    def gather_full_params(self):
        full = dict(self.module.named_parameters())
        for name, layer in self.module.named_modules():
            if isinstance(layer, Linear):
                full[f"{name}.W"] = Whole.apply(layer.part)
        return full
