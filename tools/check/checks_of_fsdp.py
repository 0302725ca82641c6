"""What FSDP has to do: train as a wrapper does, while a rank keeps only its part of the weights.

Whole weights are read with gather_full_params(), or from torch's DTensors. A class without either
is judged by the outputs of its forward alone.
"""

import sys
from contextlib import suppress
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from common.report import held_bytes
from tools.check import checks_of_wrappers as wrappers
from tools.check import models
from tools.check.checks_of_wrappers import OUTPUT, check_weights, output_of
from tools.check.findings import Failed, NotTried, need
from tools.check.models import Plain, finish, new, wrap
from tools.check.runner import is_of_user


def large():
    return nn.Sequential(*[models.linear(64, 64, bias=False) for _ in range(4)])


def can_be_used(mine):
    """it returns a module that computes, and a step goes through"""
    calls = wrappers.can_be_used(mine)
    dtypes = {weight.dtype for weight in wrap(mine, new(Plain)).parameters()}
    if dtypes != {models.dtype}:
        seen = f"of {models.dtype} weights it keeps {dtypes}"
        raise Failed(seen, "the optimizer has other weights")
    return calls


def share_of(tensors) -> float:
    """Which part of the weights of large() this rank keeps."""
    return held_bytes(tensors) / sum(weight.nbytes for weight in large().parameters())


def own_layers(mine) -> str:
    """If none of torch's layers are split: the module of a Linear that the user's files have."""
    with suppress(Exception):  # the checks will say
        if share_of(wrap(mine, new(large)).parameters()) < 1:
            return ""
    for module in list(sys.modules.values()):
        with suppress(Exception):  # a module can be anything
            layer = vars(module)["Linear"]
            is_own = is_of_user(module.__file__) and not layer.__module__.startswith("torch.")
            if is_own and isinstance(layer(2, 2), nn.Module):
                return layer.__module__
    return ""


def splits_weights(mine):
    """some weights are split over the ranks"""
    if share_of(wrap(mine, new(large)).parameters()) >= 1:
        seen = "a rank keeps all weights of linear layers"
        means = "they are not split: none, or only those of layers of your own (LAYERS=)"
        raise Failed(seen, means)


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
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for kind, tensors in (("parameters", parameters), ("gradients", gradients)):
        share = share_of(tensors)
        if share > 1.1 / dist.get_world_size():
            seen = f"of the {kind} a rank keeps {100 * share:.0f} %"
            raise Failed(seen, f"the {kind} are not split: a rank should own 1/N of them")


def gathers_full_parameters(mine):
    """gather_full_params() returns all parameters, whole, under the module's own names"""
    model, twin = wrap(mine, new(Plain)), new(Plain)
    need(model, "gather_full_params")
    for name, weight in wrappers.weights_of(model, twin).items():
        if not torch.equal(weight, twin.get_parameter(name)):
            raise Failed(f"{name} has other values", "parts put together wrongly")
    others = [name for name in model.gather_full_params() if name not in twin.state_dict()]
    if others:
        raise Failed(f"{others[0]} is no name in the module", wrappers.NAMES)


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
    if not (output - expected).norm() < (output - exact).norm() / 2:
        means = "the weights or the inputs are not cast before the forward"
        raise Failed("the output is not bfloat16's", means)
    dtypes = {tensor.dtype for each in model.parameters() for tensor in (each, each.grad)}
    if dtypes != {torch.float32}:
        raise Failed(f"weights and gradients have {dtypes}", "the optimizer loses small updates")


COURSE = [
    can_be_used,
    splits_weights,
    computes_what_the_module_computes,
    gathers_full_parameters,
    wrappers.leaves_weights_to_the_optimizer,
    wrappers.gradients_are_the_mean,
    wrappers.trains_with_sgd,
    wrappers.ranks_stay_equal,
    wrappers.reduces_tied_weights_once,
    wrappers.leaves_frozen_parameters_alone,
    computes_in_another_dtype,
]
MEANING = [
    keeps_a_part_of_the_parameters,
    wrappers.trains_a_module_that_is_used_twice,
    wrappers.accumulates_without_no_sync,
    wrappers.trains_after_two_forwards,
    wrappers.evaluates_in_between,
]
HAS_TO_HOLD = [*COURSE, *MEANING]
BEYOND = [wrappers.starts_with_the_parameters_of_rank_0, wrappers.skips_what_nobody_uses]
