"""What stage 05 alone does. What 02 to 05 promise together: tools/test_wrappers.py."""

import torch
from bucketed import BucketedDDP
from torch import nn


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
