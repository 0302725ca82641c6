"""What FSDP has to do: train as a wrapper does, while a rank keeps only its part of the weights.

Whole weights are read with gather_full_params(), or from torch's DTensors.
"""

from functools import partial
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from tools.check import checks_of_wrappers as wrappers
from tools.check.checks_of_wrappers import can_be_used, trains_with_sgd
from tools.check.findings import Failed, NotTried, Warned, is_close, may_be_refused, storages
from tools.check.models import PLAIN, embedding, finish, inputs_of, new, tokens_of, wrap

NOT_SPLIT = "none of torch's layers was split"
OWN_LAYERS = "if yours splits layers of its own, say LAYERS=my.model"
NOT_FREED = "weights or gradients are not split, or whole ones are not freed"
NOT_CAST = "the weights are not cast before the forward"
LOW = "both have to be there, in float32: else the optimizer loses small updates"
ROUNDED = (
    "shards are cut from weights already cast, or cast back: the optimizer's small steps are lost"
)
IN_16_BITS = "small gradients are lost where many are added: reduce in float32, after a cast"


def large(layout):
    return nn.Sequential(*[layout.layers.Linear(64, 64) for _ in range(16)])


class OfTokens(nn.Sequential):
    """Has layers alone that an FSDP casts."""

    def __init__(self, layout):
        linear, width = layout.layers.Linear, layout.width
        layers = linear(width, width), linear(width, width)
        super().__init__(embedding(layout, layout.rows, width), *layers)

    def forward(self, x):
        return super().forward(tokens_of(x))


def keeps_a_part_of_the_weights(mine, layout=PLAIN):
    """between steps a rank keeps its part of the weights and gradients, and not the whole"""
    before = storages()
    model = wrap(mine, new(large, layout))
    model(torch.ones(2, 64)).sum().backward()
    finish(model)
    if bytes_of(model) == bytes_of(large(layout)) and layout.layers is nn:
        raise NotTried(NOT_SPLIT, OWN_LAYERS)
    check_freed(before, layout, "a step", shards=2)


def bytes_of(model) -> int:
    return sum(local_part(weight).nbytes for weight in model.parameters())


def local_part(weight: nn.Parameter) -> torch.Tensor:
    """Return what this rank has of a weight: torch's own are DTensors."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def check_freed(before: dict[int, int], layout, after: str, shards=1, twins=0) -> None:
    """Raise Failed if more memory is new than shards, and than twins that are whole."""
    whole = bytes_of(large(layout))
    kept = sum(size for address, size in storages().items() if address not in before) / whole
    needed = shards / dist.get_world_size() + twins
    if kept > needed + 0.4:  # biases may stay whole, and buffers for some layers
        seen = f"after {after} a rank keeps {kept:.0%} of the weights' bytes"
        raise Failed(f"{seen}, and needs {needed:.0%}", NOT_FREED)


def computes_in_another_dtype(mine, layout=PLAIN):
    """compute_dtype=torch.bfloat16 computes in it; weights and gradients stay float32, unrounded"""
    if "compute_dtype" not in signature(mine).parameters:
        raise NotTried("there is no argument compute_dtype")
    dtype = torch.bfloat16
    twin = new(OfTokens, layout)
    given = torch.cat([weight.detach().flatten() for weight in twin.parameters()])
    twin.to(dtype)
    with may_be_refused():
        model = wrap(partial(mine, compute_dtype=dtype), new(OfTokens, layout))

    def backward(model, step, parts):
        inputs = inputs_of(step, 0, dist.get_rank())
        output = model(inputs)
        is_cast = torch.equal(output, output.to(dtype).to(output.dtype))  # perhaps cast back since
        if not is_cast or not is_close(output.float(), twin(inputs).float()):
            raise Failed(f"the output is not that of {dtype}", NOT_CAST)
        output.double().square().mean().backward()
        finish(model)
        tensors = [each for weight in model.parameters() for each in (weight, weight.grad)]
        dtypes = {getattr(each, "dtype", None) for each in tensors}
        if dtypes != {torch.float32}:
            raise Failed(f"weights and gradients have {dtypes}", LOW)
        for weight in model.parameters():
            local = local_part(weight).detach()
            if not torch.isin(local[local != 0], given).all():  # shards may be padded with zeros
                raise Failed("before the first step weights are no longer those it got", ROUNDED)

    if wrappers.follow(model, twin, backward, steps=1, rounds="bfloat16"):
        raise Warned(f"gradients are averaged in {dtype}, as torch's unless asked", IN_16_BITS)


def frees_after_forward(mine, layout=PLAIN):
    """step 1: forward computes with whole weights, and frees them"""
    before = storages()
    model = wrap(mine, new(large, layout))
    inputs = torch.ones(2, 64)
    with torch.no_grad():
        output = model(inputs)
    check_freed(before, layout, "forward")
    if not is_close(output, new(large, layout)(inputs)):
        raise Failed("the output is not that of whole weights", "they are read before they arrive")


def gathers_again_in_backward(mine, layout=PLAIN):
    """step 2: weights that forward has freed are whole again in backward: inputs' gradients"""
    before = storages()
    model = wrap(mine, new(large, layout))
    inputs = torch.ones(2, 64, requires_grad=True)
    loss = model(inputs).square().mean()
    expected = new(large, layout)(inputs).square().mean()
    check_freed(before, layout, "forward", twins=1)
    [found] = torch.autograd.grad(loss, inputs)
    if not is_close(found, torch.autograd.grad(expected, inputs)[0]):
        raise Failed(
            "the inputs' gradient is not that of whole weights", "a weight is gathered late"
        )


STEPS = [frees_after_forward, gathers_again_in_backward, trains_with_sgd]  # of exercise.py
RANKS = 2
COURSE = [can_be_used, trains_with_sgd, computes_in_another_dtype]
MEANING = [
    keeps_a_part_of_the_weights,
    wrappers.trains_tied_and_frozen_weights,
    wrappers.trains_sizes_that_ranks_cannot_divide,
    wrappers.accumulates_without_no_sync,
    wrappers.clips_by_the_norm_of_all,
]
BEYOND = [wrappers.starts_with_the_parameters_of_rank_0]  # torch's does not take its values
HAS_TO_HOLD = [*COURSE, *MEANING]
