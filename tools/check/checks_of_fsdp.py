"""What FSDP has to do: train as a wrapper does, while a rank keeps only its part of the weights.

Whole weights are read with gather_full_params(), or from torch's DTensors.
"""

import re
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from common.report import held_bytes
from tools.check import checks_of_wrappers as wrappers
from tools.check.checks_of_wrappers import can_be_used, trains_with_sgd, weights_of
from tools.check.findings import (
    NOT_REDUCED,
    OWN_PART,
    Failed,
    NotTried,
    Warned,
    is_close,
    may_be_refused,
    storages,
)
from tools.check.gradients import check_gradients
from tools.check.models import PLAIN, Plain, embedding, finish, new, of_user, wrap

NOT_SPLIT = "none of torch's layers was split"
OWN_LAYERS = "if yours splits layers of its own, say LAYERS=my.model"
NOT_FREED = "weights or gradients are not split, or whole ones are not freed after backward"
ROUNDED = (
    "shards are cut from weights already cast, or cast back: the optimizer's small steps are lost"
)
IN_16_BITS = "small gradients are lost where many are added: reduce in float32, after a cast"
NOT_WHOLE = "it is no checkpoint: save what gather_full_params() returns"


def large(layout, layers=16):
    return nn.Sequential(*[layout.layers.Linear(64, 64) for _ in range(layers)])


def short(layout):
    return large(layout, layers=2)


def of_tokens(layout):
    return nn.Sequential(embedding(layout, 64, 64), *short(layout))


def keeps_a_part_of_the_weights(mine, layout=PLAIN):
    """between steps a rank keeps its part of the weights and gradients, and not the whole"""
    before = storages()
    model = wrap(mine, new(large, layout))
    model(torch.ones(2, 64)).sum().backward()
    finish(model)
    new_bytes = sum(size for address, size in storages().items() if address not in before)
    whole = held_bytes(large(layout).parameters())
    if held_bytes(model.parameters()) == whole and layout.layers is nn:
        raise NotTried(NOT_SPLIT, OWN_LAYERS)
    shards = 2 / dist.get_world_size()
    if new_bytes > (shards + 0.4) * whole:  # biases may stay whole, and buffers for some layers
        seen = f"shards and their gradients are {shards:.0%} of the weights' bytes"
        raise Failed(f"{seen}, and a rank keeps {new_bytes / whole:.0%}", NOT_FREED)


def computes_in_float16(mine, layout=PLAIN):
    """compute_dtype=torch.float16 computes in it; weights and gradients stay float32, unrounded"""
    compute_in(torch.float16, mine, layout, of_tokens, tokens_of)


def computes_in_another_dtype(mine, layout=PLAIN):
    """compute_dtype=torch.bfloat16 computes in it; weights and gradients stay float32, unrounded"""
    compute_in(torch.bfloat16, mine, layout, of_tokens, tokens_of)


def casts_inputs_to_another_dtype(mine, layout=PLAIN):
    """compute_dtype=torch.bfloat16 casts inputs, too, where the first layer is no embedding"""
    compute_in(torch.bfloat16, mine, layout, short, floats_of)


def tokens_of(rank: int) -> torch.Tensor:
    return torch.arange(64) * (1 + rank) % 64


def floats_of(rank: int) -> torch.Tensor:
    return torch.linspace(-1 - rank, 1, 512).view(8, 64)


def name_of_dtype(mine) -> str:
    """Return the argument in whose dtype it computes: compute_dtype, or what looks like it."""
    alike = []
    for name, argument in signature(mine).parameters.items():
        is_dtype = argument.default is None or isinstance(argument.default, torch.dtype)
        if is_dtype and re.fullmatch(r"(?!reduc)(\w+_)?d?type", name):
            alike.append(name)
    if not alike:
        raise NotTried("there is no argument compute_dtype")
    return max(alike, key=lambda name: "compute" in name)


def compute_in(dtype: torch.dtype, mine, layout, build, inputs_of) -> None:
    """Raise Failed unless a step's gradients are the mean of what each rank computes in a dtype."""
    option = {name_of_dtype(mine): dtype}
    twin = new(build, layout)
    given = torch.cat([weight.detach().flatten() for weight in twin.parameters()])
    with may_be_refused():
        model = mine(new(build, layout), **option)
    before = weights_of(model, twin)
    output = model(inputs_of(dist.get_rank())).float()
    output.square().sum().backward()
    finish(model)
    outputs, gradients = in_one_process(twin.to(dtype), dtype, inputs_of)
    if not is_close(output, outputs[dist.get_rank()]):
        means = "the weights or the inputs are not cast before the forward"
        raise Failed(f"the output is not that of {dtype}", means)
    if any(weight.grad is None for weight in model.parameters()):
        raise Failed("a weight has no gradient after the finish", NOT_REDUCED)
    dtypes = {tensor.dtype for each in model.parameters() for tensor in (each, each.grad)}
    if dtypes != {torch.float32}:
        raise Failed(f"weights and gradients have {dtypes}", "the optimizer loses small updates")
    for weight in model.parameters():
        local = getattr(weight, "to_local", lambda weight=weight: weight)().detach()
        if not torch.isin(local[local != 0], given).all():  # shards may be padded with zeros
            raise Failed("before the first step weights are no longer those that it got", ROUNDED)
    wrappers.sgd(model.parameters()).step()
    after = weights_of(model, twin)
    found = {name: (before[name] - after[name]) / wrappers.LR for name in before}
    if check_gradients(found, gradients, NOT_REDUCED, may_round_to="bfloat16"):
        raise Warned(f"gradients are averaged in {dtype}, as torch's unless asked", IN_16_BITS)


def in_one_process(twin: nn.Module, dtype: torch.dtype, inputs_of) -> tuple[list, dict]:
    """Return the outputs of all ranks, and gradients as gradients_of_ranks returns them."""
    outputs, of_ranks = [], []
    for rank in range(dist.get_world_size()):
        inputs = inputs_of(rank)
        cast = inputs.to(dtype) if inputs.is_floating_point() else inputs
        outputs.append(twin(cast).float())
        of_ranks.append(torch.autograd.grad(outputs[-1].square().sum(), list(twin.parameters())))
    names = [name for name, _ in twin.named_parameters()]
    stacked = [torch.stack(each)[None].float() for each in zip(*of_ranks, strict=True)]
    return outputs, dict(zip(names, stacked, strict=True))


def loads_what_it_saves(mine, layout=PLAIN):
    """state_dict(), loaded into another model on as many ranks, brings all weights back"""
    twin = new(Plain, layout)
    model, other = wrap(mine, new(Plain, layout)), wrap(mine, new(Plain, layout, seed=1))
    wrappers.backward_each(model, step=0)
    wrappers.sgd(model.parameters()).step()
    with may_be_refused():
        state = dict(model.state_dict())
        if any(p.numel() and not p.untyped_storage().nbytes() for p in state.values()):
            raise Warned("state_dict() has weights whose memory is freed", NOT_WHOLE)
        other.load_state_dict({name: each.clone() for name, each in state.items()})
    found, expected = weights_of(other, twin), weights_of(model, twin)
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    if wrong:
        is_torchs = type(of_user(model)).state_dict is nn.Module.state_dict
        raise (Warned if is_torchs else Failed)(f"{', '.join(wrong)} are not in it", NOT_WHOLE)
    if sum(each.numel() for each in state.values()) < sum(p.numel() for p in twin.parameters()):
        raise Warned("each rank's has its own part of the weights alone", OWN_PART)


def frees_after_forward(mine, layout=PLAIN):
    """step 1: forward computes with whole weights, and frees them"""
    before, model, inputs = storages(), wrap(mine, new(large, layout)), torch.ones(2, 64)
    with torch.no_grad():
        output = model(inputs)
    check_freed(before, layout)
    if not is_close(output, new(large, layout)(inputs)):
        raise Failed("the output is not that of whole weights", "they are read before they arrive")


def gathers_again_in_backward(mine, layout=PLAIN):
    """step 2: weights that forward has freed are whole again in backward: inputs' gradients"""
    before, model = storages(), wrap(mine, new(large, layout))
    inputs = torch.ones(2, 64, requires_grad=True)
    loss, expected = (each(inputs).square().mean() for each in (model, new(large, layout)))
    check_freed(before, layout, twins=1)
    [found] = torch.autograd.grad(loss, inputs)
    if not is_close(found, torch.autograd.grad(expected, inputs)[0]):
        raise Failed(
            "the inputs' gradient is not that of whole weights", "a weight is gathered late"
        )


def check_freed(before: dict[int, int], layout, twins=0) -> None:
    """Raise Failed if there is more new memory than shards, and than twins that are whole."""
    whole = held_bytes(large(layout).parameters())
    new_bytes = sum(size for address, size in storages().items() if address not in before)
    if new_bytes > (1 / dist.get_world_size() + twins + 0.4) * whole:
        raise Failed(
            f"after forward a rank keeps {new_bytes / whole:.0%} of the weights", NOT_FREED
        )


STEPS = [frees_after_forward, gathers_again_in_backward, trains_with_sgd]  # of exercise.py
RANKS = 2
COURSE = [can_be_used, trains_with_sgd, computes_in_float16]
MEANING = [
    keeps_a_part_of_the_weights,
    wrappers.trains_tied_and_frozen_weights,
    wrappers.trains_sizes_that_ranks_cannot_divide,
    computes_in_another_dtype,
    wrappers.accumulates_without_no_sync,
    wrappers.trains_after_two_forwards,
    wrappers.evaluates_in_between,
    loads_what_it_saves,
]
# torch's FSDP does not take rank 0's values; a course's model begins with an embedding.
BEYOND = [wrappers.starts_with_the_parameters_of_rank_0, casts_inputs_to_another_dtype]
HAS_TO_HOLD = [*COURSE, *MEANING]
