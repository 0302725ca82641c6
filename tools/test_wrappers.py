"""What stages 02 to 05 promise of their wrappers, on real ranks of gloo.

What they share with any wrapper are the checks of `make check`. The rest is ours alone: a function
that takes a wrapper is a promise, and runs on every rank.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from bucketed import BucketedDDP
from flat_ddp import FlatDDP
from fsdp import FSDP
from naive_ddp import NaiveDDP
from overlap_ddp import OverlapDDP
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tools.check.checks_of_wrappers import BEYOND, HAS_TO_HOLD, follow
from tools.testing import failed, judged

WRAPPERS = [NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP]


def small_net():
    first = nn.Linear(6, 8)
    second = nn.Linear(8, 8)
    last = nn.Linear(8, 4)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).double()


def ones():
    return torch.ones(2, 6, dtype=torch.float64)


def broadcasts_whatever_the_strides(wrapper):
    """Parameters and buffers, in another memory format or not dense in memory."""
    module = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    module.not_dense = nn.Parameter(torch.zeros(6, 6)[:, :3])
    module.register_buffer("strided", torch.zeros(6, 6)[:, ::2])
    for tensor in module.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + dist.get_rank())
    wrapper(module)
    for name, tensor in module.state_dict().items():
        assert (tensor == torch.arange(tensor.numel()).view(tensor.shape)).all(), name


def wraps_only_once(wrapper):
    """By whatever it is wrapped, and wherever in the module."""
    for inner in (wrapper, DistributedDataParallel, FSDP):
        wrapped = inner(nn.Linear(3, 1))
        for module in (wrapped, nn.Sequential(nn.Linear(3, 3), wrapped)):
            with pytest.raises(ValueError, match="wrapped only once"):
                wrapper(module)


def averages_before_it_sums(wrapper):
    """Two ranks with a float16 gradient of 40,000 each: the mean exists, the sum does not."""
    net = nn.Linear(4, 1, bias=False).half()
    model = wrapper(net)
    output = model(torch.full((1, 4), 200.0).half())
    (output * torch.tensor(200.0).half()).sum().backward()
    model.finish_gradient_synchronization()
    assert net.weight.grad.tolist() == [[40_000.0] * 4]


def drops_a_step_with_zero_grad(wrapper):
    """zero_grad() before the finish and after it: the next step is clean."""
    net = small_net()
    if wrapper is BucketedDDP:
        wrapper = partial(wrapper, bucket_size_mb=0.0001)  # a bucket for each, so that some wait
    model = wrapper(net)
    model(ones()).sum().backward()
    model.zero_grad()
    model.finish_gradient_synchronization()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())
    model.zero_grad()
    follow(model, copy.deepcopy(net))


def trains_as_a_copy(wrapper):
    """A deep copy has no hooks: it averages all after backward."""
    model = wrapper(small_net())
    follow(model, copy.deepcopy(model.module))
    copied = copy.deepcopy(model)
    follow(copied, copy.deepcopy(model.module))
    follow(model, copy.deepcopy(model.module))


def refuses_a_gradient_that_comes_twice(wrapper):
    """A forgotten finish, a graph that is kept, a no_sync() that comes too late."""
    for second in (nullcontext(), wrapper(nn.Linear(1, 1)).no_sync()):
        model = wrapper(nn.Linear(3, 1))
        x = torch.ones(2, 3)
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with second, pytest.raises(RuntimeError, match="no_sync"):
            loss.backward()
        with pytest.raises(RuntimeError, match="twice"):
            model(x).sum().backward()
        model.finish_gradient_synchronization()
        model.zero_grad()
        model(x).sum().backward()
        model.finish_gradient_synchronization()


def refuses_parameters_frozen_or_replaced_later(wrapper):
    for change in ("freeze", "unfreeze", "replace"):
        net = small_net()
        net[4].requires_grad_(change != "unfreeze")
        model = wrapper(net)
        if change == "replace":
            net[0] = nn.Linear(6, 8).double()
        net[0].requires_grad_(change != "freeze")
        net[4].requires_grad_(True)
        model(ones()).sum().backward()
        with pytest.raises(RuntimeError, match="frozen or replaced"):
            model.finish_gradient_synchronization()
        net.requires_grad_(True).zero_grad()
        follow(wrapper(net), copy.deepcopy(net))  # the hooks of the old one do nothing any more


UNUSUAL_USE = [  # of all four wrappers
    broadcasts_whatever_the_strides,
    wraps_only_once,
    averages_before_it_sums,
    drops_a_step_with_zero_grad,
    trains_as_a_copy,
]
UNUSUAL_USE_OF_HOOKS = [  # of the two that communicate during backward
    refuses_a_gradient_that_comes_twice,
    refuses_parameters_frozen_or_replaced_later,
]
FULL = pytest.mark.full
RANKS = [3, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL)]


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_has_to_hold_holds_and_what_is_beyond_too(late_ranks, world_size, wrapper):
    """Every check of `make check`."""
    verdicts = judged(late_ranks, wrapper, [*HAS_TO_HOLD, *BEYOND], world_size)
    assert not failed(verdicts), verdicts


def test_what_has_to_hold_holds_for_torch_ddp(late_ranks):
    """What is beyond has to be asked for."""
    assert not failed(judged(late_ranks, DistributedDataParallel, HAS_TO_HOLD))
    mine = partial(DistributedDataParallel, find_unused_parameters=True)
    beyond = judged(late_ranks, mine, BEYOND)
    assert not failed(beyond)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("promise", UNUSUAL_USE)
def test_unusual_use(ranks, promise, wrapper):
    ranks(2).run(promise, wrapper)


@pytest.mark.parametrize("wrapper", [OverlapDDP, BucketedDDP])
@pytest.mark.parametrize("promise", UNUSUAL_USE_OF_HOOKS)
def test_unusual_use_of_hooks(ranks, promise, wrapper):
    ranks(2).run(promise, wrapper)
