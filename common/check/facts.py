"""What a step sends and needs, beside torch's DDP: facts, without a verdict."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from common.check import models
from common.check.models import finish
from common.report import peak_bytes
from common.setup import with_bucket_size
from common.timing import CollectiveCounter


class CallsAndBytes(CollectiveCounter):
    """Counts the collectives within it, and the bytes of what they fill."""

    bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        before = self.count
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if self.count > before:
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return result

    def __str__(self):
        return f"{self.count} calls, {self.bytes / 2**20:.1f} MB in all"


class Trained:
    """A wrapped model of 12 layers, 12 MB in float32, and its training step."""

    def __init__(self, wrap):
        layers = [models.linear(512, 512) for _ in range(12)]
        layers[0].weight.register_post_accumulate_grad_hook(self.note_last_gradient)
        self.model = with_bucket_size(wrap, 25.0)(nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.counter = None
        self.early = 0  # calls before the last gradient is there

    def note_last_gradient(self, _):
        if self.counter:
            self.early = self.counter.count

    def step(self) -> None:
        self.model(torch.ones(64, 512)).square().mean().backward()
        finish(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counted_step(self) -> CallsAndBytes:
        for _ in range(2):  # torch's DDP arranges its buckets anew in its second step
            self.step()
        with CallsAndBytes() as self.counter:
            self.step()
        return self.counter


def communication(mine):
    """a step of a model of 12 layers, 12 MB"""
    theirs = Trained(DistributedDataParallel).counted_step()
    return f"{Trained(mine).counted_step()}; torch's DDP: {theirs}"


def overlap(mine):
    """communication that is not hidden under backward"""
    trained = Trained(mine)
    counter = trained.counted_step()
    return f"calls before the last gradient is there: {trained.early} of {counter.count}"


def memory(mine):
    """memory that a step takes for a while, beyond weights"""
    needed = []
    for wrap in (mine, DistributedDataParallel):
        trained = Trained(wrap)
        trained.step()
        needed.append(peak_bytes(trained.step, torch.device("cpu")) / 2**20)
    return "{:.1f} MB; torch's DDP: {:.1f} MB".format(*needed)
