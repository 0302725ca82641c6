"""What stage 05 alone does. What 02 to 05 promise together: common/testing/test_wrappers.py."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from bucketed import BucketedDDP
from torch import nn

from common.check import checks_of_wrappers
from common.testing import harness, test_wrappers


def with_buckets(bucket_size_mb, module):
    return BucketedDDP(module, bucket_size_mb)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("bucket_size_mb", [0.0001, 0.001, 1.0, float("inf")])
def test_bucket_sizes(ranks, world_size, bucket_size_mb):
    wrapper = partial(with_buckets, bucket_size_mb)  # which leaves the checks no choice
    ranks(world_size).run(test_wrappers.accumulates_like_one_process, wrapper, 1, True)
    checks = [checks_of_wrappers.trains_with_sgd, checks_of_wrappers.trains_several_dtypes]
    assert not harness.failed(harness.judged(ranks, wrapper, checks, world_size))


def buckets_of_layers(bucket_size_mb):
    layers = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(7)]
    layers[2] = nn.Linear(40, 40, bias=False, dtype=torch.float64)
    layers[4] = nn.Linear(4, 4, bias=False)
    model = BucketedDDP(nn.Sequential(*layers), bucket_size_mb)
    numbers = {layer.weight: number for number, layer in enumerate(model.module)}
    return [[numbers[parameter] for parameter in bucket.parameters] for bucket in model.buckets]


@pytest.mark.parametrize(
    "bucket_size_mb, expected",
    [
        # Layers of 128 bytes; layer 2 is larger than a bucket, layer 4 is of another dtype.
        (256 / 2**20, [[6], [5, 3], [4], [2], [1, 0]]),
        (25 * 256 / 2**20, [[6, 5], [4], [3], [2], [1, 0]]),
        (float("inf"), [[6, 5, 3, 2, 1, 0], [4]]),
        (None, [[6, 5, 3, 2, 1, 0], [4]]),
    ],
)
def test_buckets_are_filled_in_reverse_order(ranks, bucket_size_mb, expected):
    assert ranks(1).run(buckets_of_layers, bucket_size_mb) == [expected]


def drops_a_step_of_single_buckets():
    """A gradient that waits for an unused one before it, in a bucket of its own, is zeroed away."""
    net = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    net.forward = lambda x: net["used"](x)
    model = BucketedDDP(net, 0.00001)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    model.finish_gradient_synchronization()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())


def test_drops_a_step_of_single_buckets(ranks):
    ranks(2).run(drops_a_step_of_single_buckets)


def refused_bucket_size(bucket_size_mb):
    with pytest.raises(ValueError, match=f"bucket_size_mb={bucket_size_mb} is not above 0"):
        BucketedDDP(nn.Linear(3, 3), bucket_size_mb)


@pytest.mark.parametrize("bucket_size_mb", [0, -1.0, float("nan")])
def test_refuses_a_bucket_size(ranks, bucket_size_mb):
    ranks(1).run(refused_bucket_size, bucket_size_mb)


def averages_gradients_of_another_dtype():
    """bfloat16 weights, float32 gradients (torch 2.9 and newer), one of them unused on rank 1."""
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    model = BucketedDDP(net)
    model.module.forward = lambda x: net[rank](x)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    model.finish_gradient_synchronization()
    assert [p.grad.dtype for p in net.parameters()] == 6 * [torch.float32]
    assert [p.grad.unique().tolist() for p in net.parameters()] == [[0.5]] * 4 + [[0.0]] * 2


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a newer torch")
def test_averages_gradients_of_another_dtype(ranks):
    ranks(2).run(averages_gradients_of_another_dtype)
