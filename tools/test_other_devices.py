"""The training steps of 02 to 06 on a device that is not the CPU.

It is `meta`, which has shapes and no numbers, in torch's fake process group, which sends nothing.
What makes a tensor on the CPU by mistake, or lets it meet one on the device, ends in an error.
"""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.setup import SIZES
from common.timing import Stopwatch

META = torch.device("meta")
pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="no collectives on meta here")
WRAPPERS = {"naive_ddp": "NaiveDDP", "flat_ddp": "FlatDDP", "overlap_ddp": "OverlapDDP"}
WRAPPERS |= {"bucketed": "BucketedDDP", "fsdp": "FSDP"}


@pytest.fixture(autouse=True)
def fake_group(monkeypatch):
    """This process is rank 1 of 4; what all ranks tell each other is what this one says."""

    def as_all_say(everyones, mine, group=None):
        everyones[:] = [mine] * len(everyones)

    monkeypatch.setattr(dist, "all_gather_object", as_all_say)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def language_model():
    with META:
        model = importlib.import_module("naive_ddp").LanguageModel(*SIZES["nano"][:5])
        return model, torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize("module", WRAPPERS)
def test_wrappers(module, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: False)  # FSDP asks: do ranks differ?
    model, tokens = language_model()
    model.add_module("unused", nn.Linear(3, 3, device=META))  # gets zeros
    model = getattr(importlib.import_module(module), WRAPPERS[module])(model)
    optimizer = torch.optim.AdamW(model.parameters())
    train_step = importlib.import_module("naive_ddp").train_step
    for _ in range(2):
        train_step(model, optimizer, Stopwatch(META), tokens, tokens)
    model(tokens).sum().backward()
    model.finish_gradient_synchronization()
    assert all(parameter.grad.device == META for parameter in model.parameters())


def test_sharded_optimizer():
    module = importlib.import_module("sharded_optimizer")
    model, tokens = language_model()
    optimizer = module.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).sum().backward()
        module.average_gradients(model)
        optimizer.step()
    assert all(parameter.device == META for parameter in model.parameters())
