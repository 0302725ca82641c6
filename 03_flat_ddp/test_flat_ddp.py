"""What stage 03 alone does. What 02 to 05 promise together: common/testing/test_wrappers.py."""

import pytest
import torch
import torch.distributed as dist
from flat_ddp import FlatDDP
from torch import nn

from common.timing import CollectiveCounter


def all_reduces_of_a_finish(dtypes):
    model = FlatDDP(nn.ModuleList(nn.Linear(3, 3, dtype=dtype) for dtype in dtypes))
    loss = sum(layer(torch.ones(2, 3, dtype=layer.weight.dtype)).sum() for layer in model.module)
    loss.backward()
    with CollectiveCounter() as counter:
        model.finish_gradient_synchronization()
    return counter.count


@pytest.mark.parametrize(
    "dtypes, calls", [([torch.float32] * 4, 1), ([torch.float32, torch.float64] * 2, 2)]
)
def test_one_all_reduce_per_dtype(ranks, dtypes, calls):
    assert ranks(2).run(all_reduces_of_a_finish, dtypes) == [calls] * 2


def averages_in_kept_memory():
    """One flat tensor for all steps, made again when parameters are frozen, unfrozen or cast."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model = FlatDDP(net)
    addresses = []

    def step():
        net.zero_grad()
        inputs = torch.full((2, 3), 1.0 + dist.get_rank(), dtype=net[0].weight.dtype)
        model(inputs).sum().backward()
        model.finish_gradient_synchronization()
        assert net[1].bias.grad.tolist() == [2.0] * 3
        expected = [3.0] * 3 if net[0].bias.requires_grad else None
        rows = net[0].weight.grad
        assert (rows is None) == (expected is None)
        if rows is not None:
            column = net[1].weight.sum(0) * expected[0]  # two rows, of 1.5 on average
            torch.testing.assert_close(rows, column[:, None].expand(3, 3))
        addresses.append({kind: flat.data_ptr() for kind, flat in model.flats.items()})

    for _ in range(3):
        step()
    assert addresses[0] == addresses[1] == addresses[2]
    net[0].requires_grad_(False)
    step()
    net[0].requires_grad_(True)
    step()
    net.float()
    step()
    assert len(addresses[-1]) == 2


def test_averages_in_kept_memory(ranks):
    ranks(2).run(averages_in_kept_memory)


def averages_gradients_of_another_dtype():
    """Weights of one dtype, gradients of two: each flat tensor takes its own."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).bfloat16()
    net[0].weight.grad_dtype = torch.float32
    model = FlatDDP(net)
    for layer in net:  # 1.001 has no place in bfloat16
        layer.weight.grad = torch.full((2, 2), 1.001 + dist.get_rank()).to(
            layer.weight.grad_dtype or layer.weight.dtype
        )
    with CollectiveCounter() as counter:
        model.finish_gradient_synchronization()
    assert counter.count == 2
    assert net[0].weight.grad.dtype == torch.float32 and net[1].weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(net[0].weight.grad, torch.full((2, 2), 1.501), rtol=0, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a newer torch")
def test_averages_gradients_of_another_dtype(ranks):
    ranks(2).run(averages_gradients_of_another_dtype)
