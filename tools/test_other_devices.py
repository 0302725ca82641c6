"""The training steps of 02 to 06 on a device that is not the CPU.

It is `meta`, which has shapes and no numbers, in torch's fake process group, which sends nothing.
What makes a tensor on the CPU by mistake, or lets it meet one on the device, ends in an error.
"""

import importlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.setup import SIZES
from tools.harness import ROOT
from common.timing import Stopwatch

META = torch.device("meta")
pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="no collectives on meta here")
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
FOLDERS = [*STAGES, "06_sharded_optimizer", "06_sharded_optimizer/fsdp"]


@pytest.fixture(autouse=True)
def fake_group(monkeypatch):
    """This process is rank 1 of 4; what all ranks tell each other is what this one says."""

    def as_all_say(everyones, mine, group=None):
        everyones[:] = [mine] * len(everyones)

    monkeypatch.setattr(dist, "all_gather_object", as_all_say)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(sys, "path", [*(str(ROOT / folder) for folder in FOLDERS), *sys.path])
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def check(tensors, optimizer) -> None:
    """All are there, and the optimizer's moments; its counters of steps may stay on the CPU."""
    tensors = list(tensors)
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value) and value.ndim]
    assert all(tensor.device == META for tensor in tensors)


def language_model(module):
    with META:
        model = module.LanguageModel(*SIZES["nano"][:5])
        return model, torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize("stage", STAGES)
def test_wrappers(stage):
    module = importlib.import_module(stage[3:])
    [wrapper] = [value for name, value in vars(module).items() if name.endswith("DDP")]
    model, tokens = language_model(module)
    model.add_module("unused", nn.Linear(3, 3, device=META))  # gets zeros
    model = wrapper(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        module.train_step(model, optimizer, Stopwatch(META), tokens, tokens)
    model(tokens).sum().backward()
    model.finish_gradient_synchronization()
    check([parameter.grad for parameter in model.parameters()], optimizer)


def test_sharded_optimizer():
    module = importlib.import_module("sharded_optimizer")
    model, tokens = language_model(module)
    optimizer = module.ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).sum().backward()
        module.average_gradients(model)
        optimizer.step()
    check(model.parameters(), optimizer.local)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_fsdp(compute_dtype, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda _: False)  # the ranks agree
    fsdp = importlib.import_module("fsdp")
    model, tokens = language_model(importlib.import_module("sharded_optimizer"))
    model = fsdp.FSDP(model, compute_dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).sum().backward()
        model.finish_gradient_synchronization()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    check([parameter.grad for parameter in model.parameters()], optimizer)
    model.load_full_params(model.gather_full_params())
    check(model.parameters(), optimizer)
