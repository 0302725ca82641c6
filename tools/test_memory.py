"""The accountant of memory: tensors whose sizes are known, of this process and of gloo."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from common.memory import held_bytes, peak_bytes

CPU = torch.device("cpu")


def test_peak_is_the_most_at_any_time():
    def takes_and_gives_back():
        first = torch.empty(1000)
        second = torch.empty(3000)  # the peak, with the first
        del second
        return first, torch.empty(500)

    assert peak_bytes(takes_and_gives_back, CPU) == 16_000


def test_what_was_there_before_does_not_count():
    old = [torch.empty(5000)]

    def replaces():
        old.clear()
        old.append(torch.empty(2000))

    assert peak_bytes(replaces, CPU) == 8000


def in_a_group():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    assert held_bytes([whole, distribute_tensor(whole, mesh, [Shard(0)])]) == 32 + 16

    received = torch.empty(500_000)
    sent = torch.ones(1_000_000)
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    peaks = [peak_bytes(lambda: reduce_scatter(received, sent), CPU) for _ in range(3)]
    assert 4_000_000 <= min(peaks) < 4_100_000  # gloo's is an all-reduce of a copy


def test_shards_and_collectives(ranks):
    ranks(2).run(in_a_group)
