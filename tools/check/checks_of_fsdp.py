"""What FSDP has to do: train as a wrapper does, while a rank keeps only its part of the weights.

Whole weights are read with gather_full_params(), or from torch's DTensors.
"""

from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from common.report import held_bytes
from tools.check import checks_of_wrappers as wrappers
from tools.check import models
from tools.check.checks_of_wrappers import can_be_used, trains_with_sgd
from tools.check.findings import NOT_REDUCED, Failed, NotTried, is_close
from tools.check.models import finish, new, wrap


def large():
    return nn.Sequential(*[models.layers.Linear(64, 64) for _ in range(4)])


def keeps_a_part_of_the_weights(mine):
    """between steps a rank keeps its part of the weights and gradients, and not the whole"""
    model = wrap(mine, new(large))
    whole = held_bytes(large().parameters())
    model(torch.ones(2, 64)).sum().backward()
    finish(model)
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for kind, tensors in (("parameters", parameters), ("gradients", gradients)):
        share = held_bytes(tensors) / whole
        if share > 1 / dist.get_world_size() + 0.1:  # biases may stay whole
            means = f"the {kind} are not split, or only those of layers of your own (LAYERS=)"
            raise Failed(f"of the {kind} a rank keeps {share:.0%}", means)


def computes_in_another_dtype(mine):
    """compute_dtype=torch.bfloat16 computes in it, and keeps float32 weights and gradients"""
    if "compute_dtype" not in signature(mine).parameters:
        raise NotTried("there is no argument compute_dtype")
    x = torch.linspace(-1, 1, 512).view(8, 64)
    expected = new(large).bfloat16()(x.bfloat16()).float()
    model = mine(new(large), compute_dtype=torch.bfloat16)
    output = model(x).float()
    output.square().mean().backward()
    finish(model)
    if not is_close(output, expected):
        means = "the weights or the inputs are not cast before the forward"
        raise Failed("the output is not bfloat16's", means)
    if any(weight.grad is None for weight in model.parameters()):
        raise Failed("a weight has no gradient after the finish", NOT_REDUCED)
    dtypes = {tensor.dtype for each in model.parameters() for tensor in (each, each.grad)}
    if dtypes != {torch.float32}:
        raise Failed(f"weights and gradients have {dtypes}", "the optimizer loses small updates")


COURSE = [
    can_be_used,
    keeps_a_part_of_the_weights,
    trains_with_sgd,
    wrappers.trains_tied_and_frozen_weights,
    computes_in_another_dtype,
]
MEANING = [
    wrappers.accumulates_without_no_sync,
    wrappers.trains_after_two_forwards,
    wrappers.evaluates_in_between,
]
BEYOND = [wrappers.starts_with_the_parameters_of_rank_0]  # torch's FSDP does not
HAS_TO_HOLD = [*COURSE, *MEANING]
