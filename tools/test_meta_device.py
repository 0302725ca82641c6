"""Training steps of 02 to 06, ZeRO2 and FSDP on a device whose tensors nobody may ask for a value.

The device is `meta`, which has shapes and no values, in torch's fake process group, which sends
nothing. `.item()`, `bool()` and an `if` on a tensor are errors there. On a GPU they would make the
host wait between forward and finish, and nothing would overlap: so there torch is told to raise. A
tensor made on the CPU by mistake ends in an error, too.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from bucketed import BucketedDDP
from flat_ddp import FlatDDP
from fsdp import FSDP
from naive_ddp import NaiveDDP
from overlap_ddp import OverlapDDP
from sharded_optimizer import ShardedOptimizer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from zero2 import ZeRO2

from common.ladder import SIZES, LanguageModel

on_old_torch = torch.__version__ < "2.12"
DEVICES = [
    pytest.param("meta", marks=pytest.mark.skipif(on_old_torch, reason="no collectives on meta")),
    pytest.param("cuda", marks=pytest.mark.cuda),
]
WRAPPERS = [NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP, FSDP]
WRAPPERS.append(partial(ZeRO2, bucket_size_mb=0.1))


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """This process is rank 1 of 4; what all ranks tell each other is what this one says."""

    def as_all_say(everyones, mine, group=None):
        everyones[:] = [mine] * len(everyones)

    monkeypatch.setattr(dist, "all_gather_object", as_all_say)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield torch.device(request.param)
    dist.destroy_process_group()


@contextmanager
def nobody_asks(device):
    """Whoever asks a tensor for its value gets an error, on meta always and on a GPU here."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def language_model(device):
    """A model with a layer that is never used, and its tokens."""
    with device:
        model = LanguageModel(*SIZES["nano"][:5])
        model.add_module("unused", nn.Linear(3, 3))
        return model, torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_ask_no_tensor_for_its_value(device, wrapper):
    """Nor in clipping, where a wrapper has its own; ZeRO2 has more buckets than buffers."""
    model, tokens = language_model(device)
    model = wrapper(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with nobody_asks(device):
        for _ in range(3):
            model(tokens).sum().backward()
            model.finish_gradient_synchronization()
            if hasattr(model, "clip_grad_norm_"):
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}


def test_the_sharded_optimizer_asks_no_tensor_for_its_value(device):
    model, tokens = language_model(device)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
    with nobody_asks(device):
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).sum().backward()
            optimizer.step()
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}
