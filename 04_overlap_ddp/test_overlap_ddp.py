"""What stage 04 alone does. What 02 to 05 promise together: tools/test_wrappers.py."""

import torch
import torch.distributed as dist
from overlap_ddp import OverlapDDP
from torch import nn

from common.timing import CollectiveCounter


def launched_in_backward():
    """How many all-reduces backward launches, and how many the finish has left to do."""
    model = OverlapDDP(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))))
    with CollectiveCounter() as in_backward:
        model(torch.ones(2, 3)).sum().backward()
    with CollectiveCounter() as in_finish:
        model.finish_gradient_synchronization()
    return in_backward.count, in_finish.count


def test_every_all_reduce_starts_in_backward(ranks):
    assert ranks(2).run(launched_in_backward) == [(6, 0)] * 2


def lengths_in_order_of_launching():
    """Even ranks use the layers in the other order: their gradients arrive in the other order."""
    layers = nn.ModuleList(nn.Linear(width, width, bias=False) for width in (3, 4, 3))
    model = OverlapDDP(layers)
    first, last = (0, 2) if dist.get_rank() == 0 else (2, 0)
    layers.forward = lambda x: layers[last](layers[first](x))  # nobody uses the one between
    model(torch.ones(2, 3)).sum().backward()
    launched = len(model.in_flight)
    while model.waiting:
        model._launch_next()
    order = [gradient.numel() for _, gradient, _ in model.in_flight]
    model.finish_gradient_synchronization()
    return launched, order


def test_launches_in_the_order_of_the_parameters_and_not_of_arrival(ranks):
    """Backward launches the last layer; what waits for the unused one is left to the finish."""
    assert ranks(2).run(lengths_in_order_of_launching) == [(1, [9, 16, 9])] * 2
