"""What a step sends, beside torch's DDP: a fact, without a verdict."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.timing import CollectiveCounter
from tools.check import models


def calls_of(mine) -> str:
    """Of a training step of 12 layers, 12 MB in float32."""
    counter, early = CollectiveCounter(), [0]
    layers = [models.linear(512, 512) for _ in range(12)]
    last = next(layers[0].parameters())
    last.register_post_accumulate_grad_hook(lambda _: early.append(getattr(counter, "count", 0)))
    model = models.wrap(mine, nn.Sequential(*layers), replaces_defaults=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        model(torch.ones(64, 512)).square().mean().backward()
        models.finish(model)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # torch's DDP arranges its buckets anew in its second step
        step()
    with counter:
        step()
    return f"{counter.count} calls, {early[-1]} of them before the last gradient is there"


def communication(mine):
    """a step of a model of 12 layers, 12 MB"""
    return f"{calls_of(mine)}; torch's DDP: {calls_of(DistributedDataParallel)}"
