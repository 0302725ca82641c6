"""What stage 05 alone does. What 02 to 05 promise together: tools/test_wrappers.py."""

from functools import partial

import pytest
import torch
from bucketed import BucketedDDP
from torch import nn

from tools import testing
from tools.check import checks_of_wrappers


def with_buckets(bucket_size_mb, module):
    return BucketedDDP(module, bucket_size_mb)


@pytest.mark.parametrize("bucket_size_mb", [0.0001, float("inf")])
def test_bucket_sizes(ranks, bucket_size_mb):
    wrapper = partial(with_buckets, bucket_size_mb)  # which leaves the checks no choice
    checks = [
        checks_of_wrappers.trains_several_dtypes,
        checks_of_wrappers.keeps_one_order_on_any_branch,
        checks_of_wrappers.averages_what_one_rank_uses,
    ]
    assert not testing.failed(testing.judged(ranks, wrapper, checks, 3))


def buckets_of_layers(bucket_size_mb):
    layers = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(7)]
    layers[2] = nn.Linear(40, 40, bias=False, dtype=torch.float64)
    layers[4] = nn.Linear(4, 4, bias=False)
    model = BucketedDDP(nn.Sequential(*layers), bucket_size_mb)
    numbers = {layer.weight: number for number, layer in enumerate(model.module)}
    return [[numbers[parameter] for parameter in bucket.parameters] for bucket in model.buckets]


def test_buckets_are_filled_in_reverse_order(ranks):
    """Layers of 128 bytes; layer 2 is larger than a bucket, layer 4 is of another dtype."""
    for bucket_size_mb, expected in (
        (256 / 2**20, [[6, 5], [4], [3], [2], [1, 0]]),
        (0, [[6], [5], [4], [3], [2], [1], [0]]),
        (None, [[6, 5, 3, 2, 1, 0], [4]]),
    ):
        assert ranks(2).run(buckets_of_layers, bucket_size_mb) == [expected] * 2
