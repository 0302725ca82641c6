"""What stage 03 alone does. What 02 to 05 promise together: tools/test_wrappers.py."""

import torch
import torch.distributed as dist
from flat_ddp import FlatDDP
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode


def all_reduces_of_a_finish(dtypes):
    model = FlatDDP(nn.ModuleList(nn.Linear(3, 3, dtype=dtype) for dtype in dtypes))
    loss = sum(layer(torch.ones(2, 3, dtype=layer.weight.dtype)).sum() for layer in model.module)
    loss.backward()
    with CommDebugMode() as counter:
        model.finish_gradient_synchronization()
    return counter.get_total_counts()


def test_one_all_reduce_per_dtype(ranks):
    assert ranks(2).run(all_reduces_of_a_finish, [torch.float32] * 4) == [1, 1]
    assert ranks(2).run(all_reduces_of_a_finish, [torch.float32, torch.float64] * 2) == [2, 2]


def places_of_the_flat_tensor():
    """Of three steps, in the last of which a layer is frozen."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = FlatDDP(net)
    places = []
    for step in range(3):
        net[0].requires_grad_(step < 2)
        model.zero_grad()
        model(torch.full((2, 3), 1.0 + dist.get_rank())).sum().backward()
        model.finish_gradient_synchronization()
        assert net[1].bias.grad.tolist() == [2.0] * 3
        [flat] = model.flats.values()
        places.append((flat.data_ptr(), flat.numel()))
    return places


def test_averages_in_kept_memory(ranks):
    for first, second, third in ranks(2).run(places_of_the_flat_tensor):
        assert first == second == (third[0], 24) and third[1] == 12
