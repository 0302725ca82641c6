"""What stage 04 alone does. What 02 to 05 promise together: tools/test_wrappers.py."""

from unittest import mock

import torch
import torch.distributed as dist
from overlap_ddp import OverlapDDP
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode


def launched_in_backward():
    """How many all-reduces backward launches, and how many the finish has left to do."""
    model = OverlapDDP(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))))
    with CommDebugMode() as in_backward:
        model(torch.ones(2, 3)).sum().backward()
    with CommDebugMode() as in_finish:
        model.finish_gradient_synchronization()
    return in_backward.get_total_counts(), in_finish.get_total_counts()


def test_every_all_reduce_starts_in_backward(ranks):
    assert ranks(2).run(launched_in_backward) == [(6, 0)] * 2


def lengths_in_order_of_launching():
    """Even ranks use the layers in the other order: their gradients arrive in the other order."""
    layers = nn.ModuleList(nn.Linear(width, width, bias=False) for width in (3, 4, 3))
    model = OverlapDDP(layers)
    first, last = (0, 2) if dist.get_rank() == 0 else (2, 0)
    layers.forward = lambda x: layers[last](layers[first](x))  # nobody uses the one between
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as launched:
        model(torch.ones(2, 3)).sum().backward()
        in_backward = launched.call_count
        model.finish_gradient_synchronization()
    return in_backward, [call.args[0].numel() for call in launched.call_args_list]


def test_launches_in_the_order_of_the_parameters_and_not_of_arrival(ranks):
    """Backward launches the last layer; what waits for the unused one is left to the finish."""
    assert ranks(2).run(lengths_in_order_of_launching) == [(1, [9, 16, 9])] * 2
