"""What stage 02 alone does. What 02 to 05 promise together: tools/test_wrappers.py."""

import torch
from naive_ddp import NaiveDDP
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode


def all_reduces_of_a_finish():
    """Of five parameters one is frozen."""
    model = NaiveDDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1, bias=False)))
    model.module[0].bias.requires_grad_(False)  # also after wrapping: this stage looks each time
    with CommDebugMode() as in_backward:
        model(torch.ones(2, 3)).sum().backward()
    with CommDebugMode() as in_finish:
        model.finish_gradient_synchronization()
    return in_backward.get_total_counts(), in_finish.get_total_counts()


def test_one_all_reduce_per_parameter_after_backward(ranks):
    assert ranks(2).run(all_reduces_of_a_finish) == [(0, 4)] * 2
