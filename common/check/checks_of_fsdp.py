"""What FSDP has to do: train as a wrapper does, while a rank keeps only its part of the weights.

Whole weights are read with gather_full_params(), or from torch's DTensors. A class without either
is judged by the outputs of its forward alone.
"""

from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from common.check import checks_of_wrappers as wrappers
from common.check.checks_of_wrappers import OUTPUT, check_weights, output_of, wrap
from common.check.facts import communication
from common.check.findings import Failed, NotTried, need
from common.check.models import Plain, finish, new
from common.report import held_bytes


def large():
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])


def computes_what_the_module_computes(mine):
    """a forward gives what the module gives that is not split"""
    means = "the forward computes with other weights: which are gathered, and in which order?"
    found = {OUTPUT: output_of(wrap(mine, new(Plain)))}
    check_weights(found, new(Plain), means)


def keeps_a_part_of_the_parameters(mine):
    """between steps a rank keeps its part of the weights, and not the whole"""
    model = wrap(mine, new(large))
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        finish(model)
    parameters = list(model.parameters())
    whole = sum(parameter.nbytes for parameter in large().parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for kind, tensors in (("parameters", parameters), ("gradients", gradients)):
        share = held_bytes(tensors) / whole
        if share > 1.1 / dist.get_world_size():
            seen = f"of the {kind} a rank keeps {100 * share:.0f} %"
            raise Failed(seen, f"the {kind} are not split: a rank should own 1/N of them")


def gathers_full_parameters(mine):
    """gather_full_params() returns all parameters, whole, under the module's own names"""
    model = wrap(mine, new(Plain))
    need(model, "gather_full_params")
    found = model.gather_full_params()
    for name, expected in new(Plain).named_parameters():
        if name not in found:
            raise Failed(f"{name} is not among {', '.join(found)}", "the names are the wrapper's")
        if not torch.equal(found[name], expected):
            raise Failed(f"{name} has other values or another shape", "parts put together wrongly")


def computes_in_another_dtype(mine):
    """compute_dtype=torch.bfloat16 computes in it, and keeps float32 weights and gradients"""
    if "compute_dtype" not in signature(mine).parameters:
        raise NotTried("there is no argument compute_dtype")
    x = torch.linspace(-1, 1, 512).view(8, 64)
    with torch.no_grad():
        exact = new(large)(x)
        expected = new(large).bfloat16()(x.bfloat16()).float()
    model = mine(new(large), torch.bfloat16)
    output = model(x).float()
    output.square().mean().backward()
    finish(model)
    distance = ((output - expected).norm() / (exact - expected).norm()).item()
    if not distance < 0.5:  # exact ones are 1 away
        seen = f"the output is {distance:.1f} times as far from bfloat16's as float32's is"
        raise Failed(seen, "the weights or the inputs are not cast before the forward")
    dtypes = {tensor.dtype for each in model.parameters() for tensor in (each, each.grad)}
    if dtypes != {torch.float32}:
        raise Failed(f"weights and gradients have {dtypes}", "the optimizer loses small updates")


HAS_TO_HOLD = [
    computes_what_the_module_computes,
    keeps_a_part_of_the_parameters,
    gathers_full_parameters,
    wrappers.gradients_are_the_mean,
    wrappers.trains_with_sgd,
    wrappers.trains_with_adam,
    wrappers.ranks_stay_equal,
    wrappers.reduces_tied_weights_once,
    wrappers.leaves_frozen_parameters_alone,
    wrappers.trains_a_module_that_is_used_twice,
    wrappers.accumulates_without_no_sync,
    wrappers.trains_after_two_forwards,
    wrappers.evaluates_in_between,
    computes_in_another_dtype,
]
BEYOND = [wrappers.starts_with_the_parameters_of_rank_0, wrappers.skips_what_nobody_uses]
FACTS = [communication]
