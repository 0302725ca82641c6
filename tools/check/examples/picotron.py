"""A wrapper in picotron's way: hooks add gradients to main gradients in float32, in buckets."""

import torch
import torch.distributed as dist
from torch import nn


class Bucket:
    def __init__(self, parameters):
        self.parameters, self.work = parameters, None
        self.flat = torch.zeros(sum(each.numel() for each in parameters), dtype=torch.float32)
        pieces = self.flat.split([each.numel() for each in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.main_grad = piece.view_as(parameter)

    def launch(self):
        self.flat /= dist.get_world_size()
        self.work = dist.all_reduce(self.flat, async_op=True)


class DataParallel(nn.Module):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__()
        self.module = module
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, 0)
        trained = [each for each in module.parameters() if each.requires_grad]
        self.buckets, members = [], []
        for parameter in reversed(trained):
            members.append(parameter)
            if 4 * sum(each.numel() for each in members) >= bucket_cap_mb * 2**20:
                self.buckets.append(Bucket(members))
                members = []
        if members:
            self.buckets.append(Bucket(members))
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.accumulate)

    def accumulate(self, parameter):
        parameter.main_grad += parameter.grad
        parameter.grad = None

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        for bucket in self.buckets:
            bucket.launch()
        for bucket in self.buckets:
            bucket.work.wait()
            for parameter in bucket.parameters:
                parameter.grad = parameter.main_grad.to(parameter.dtype, copy=True)
            self.reset(bucket)

    def reset(self, bucket):
        bucket.flat.zero_()


class NeverResets(DataParallel):
    """Adds every step's gradients to those of the last one."""

    def reset(self, bucket):
        pass
