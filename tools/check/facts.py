"""What a step sends, beside torch's DDP: a fact, without a verdict."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from common.timing import CollectiveCounter
from tools.check import models


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


def step_of(wrap, when_all_are_there=None):
    """A training step of 12 layers, 12 MB in float32; calls that when the last gradient is."""
    layers = [models.linear(512, 512) for _ in range(12)]
    last = next(layers[0].parameters())
    last.register_post_accumulate_grad_hook(when_all_are_there or (lambda _: None))
    model = models.wrap(wrap, nn.Sequential(*layers), replaces_defaults=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        model(torch.ones(64, 512)).square().mean().backward()
        models.finish(model)
        optimizer.step()
        optimizer.zero_grad()

    return step


def sent_by(wrap) -> str:
    counter, early = CallsAndBytes(), []
    step = step_of(wrap, lambda _: early.append(counter.count))
    for _ in range(2):  # torch's DDP arranges its buckets anew in its second step
        step()
    with counter:
        step()
    calls = f"{counter.count} calls, {counter.bytes / 2**20:.1f} MB in all"
    return calls + (f", {early[-1]} of them before the last gradient is there" if early else "")


def communication(mine):
    """a step of a model of 12 layers, 12 MB"""
    return f"{sent_by(mine)}; torch's DDP: {sent_by(DistributedDataParallel)}"
