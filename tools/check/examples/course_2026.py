"""An FSDP as a course of 2026 asks for it: Linear and Embedding are split, and may be cast."""

import torch
import torch.distributed as dist
from torch import nn


def padded(tensor):
    ranks = dist.get_world_size()
    return nn.functional.pad(tensor.detach().flatten(), (0, -tensor.numel() % ranks))


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context, shard, shape, dtype, reduce):
        context.reduce = reduce
        whole = torch.empty(dist.get_world_size() * len(shard), dtype=dtype)
        dist.all_gather_into_tensor(whole, shard.to(dtype))
        return whole[: shape.numel()].view(shape)

    @staticmethod
    def backward(context, gradient):
        return context.reduce(gradient), None, None, None


class FSDP(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.dtype = module, compute_dtype or torch.float32
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, 0)
        self.layers = [each for each in module.modules() if isinstance(each, self.split)]
        shards = {}
        for layer in self.layers:
            weight = layer._parameters.pop("weight")
            own = padded(weight).chunk(dist.get_world_size())[dist.get_rank()].clone()
            shard = shards.setdefault(weight, nn.Parameter(own, weight.requires_grad))
            layer.shard, layer.shape = shard, weight.shape
            layer.register_forward_pre_hook(self.gather)
            layer.register_forward_hook(self.free)

    split = nn.Linear, nn.Embedding

    def gather(self, layer, inputs):
        weight = Gathered.apply(layer.shard, layer.shape, self.dtype, self.reduce)
        layer.__dict__["weight"] = weight
        if layer._parameters.get("bias") is not None:
            layer.__dict__["bias"] = layer._parameters["bias"].to(self.dtype)
        return tuple(each.to(self.dtype) if each.is_floating_point() else each for each in inputs)

    def free(self, layer, *_):
        del layer.__dict__["weight"]
        layer.__dict__.pop("bias", None)

    def reduce(self, gradient):
        """Return this rank's part of the ranks' mean, in float32."""
        whole = padded(gradient.float())
        part = torch.empty(len(whole) // dist.get_world_size())
        dist.reduce_scatter_tensor(part, whole)
        return part / dist.get_world_size()

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for name, parameter in self.module.named_parameters():
            if not name.endswith("shard") and parameter.requires_grad:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def gather_full_params(self):
        whole = {name: each.detach() for name, each in self.module.named_parameters()}
        for name, layer in self.module.named_modules():
            if layer in self.layers:
                given = layer.shard, layer.shape, torch.float32, self.reduce
                whole[f"{name}.weight"] = Gathered.apply(*given).detach()
        return whole


class SumsIn16Bits(FSDP):
    """Divides by the number of ranks in float32 alone."""

    def reduce(self, gradient):
        part = super().reduce(gradient)
        return part if gradient.dtype == torch.float32 else part * dist.get_world_size()
