"""What FSDP has to do: train as a wrapper does, while a rank keeps only its part of the weights.

Whole weights are read with gather_full_params(), or from torch's DTensors.
"""

from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from common.report import held_bytes
from tools.check import checks_of_wrappers as wrappers
from tools.check.checks_of_wrappers import can_be_used, trains_with_sgd
from tools.check.findings import NOT_REDUCED, Failed, NotTried, alive, is_close
from tools.check.models import PLAIN, embedding, finish, new, wrap

NOT_SPLIT = "none of torch's layers was split"
OWN_LAYERS = "if yours splits layers of its own, say LAYERS=my.model"
NOT_FREED = "weights or gradients are not split, or whole ones are not freed after backward"
ROUNDED = (
    "shards are cut from weights already cast, or cast back: the optimizer's small steps are lost"
)


def large(layout):
    return nn.Sequential(*[layout.layers.Linear(64, 64) for _ in range(8)])


def of_tokens(layout):
    return nn.Sequential(embedding(layout, 64, 64), *large(layout))


def storages() -> dict[int, int]:
    """Return {address: bytes} of the memory of all tensors that Python knows of."""
    tensors = [tensor for tensor in alive(torch.Tensor) if not hasattr(tensor, "to_local")]
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


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


def computes_in_another_dtype(mine, layout=PLAIN):
    """compute_dtype=torch.bfloat16 computes in it; weights and gradients stay float32, unrounded"""
    compute_in_bfloat16(mine, layout, of_tokens, torch.arange(64))


def casts_inputs_to_another_dtype(mine, layout=PLAIN):
    """compute_dtype=torch.bfloat16 casts inputs, too, where the first layer is no embedding"""
    compute_in_bfloat16(mine, layout, large, torch.linspace(-1, 1, 512).view(8, 64))


def compute_in_bfloat16(mine, layout, build, inputs) -> None:
    if "compute_dtype" not in signature(mine).parameters:
        raise NotTried("there is no argument compute_dtype")
    twin = new(build, layout)
    given = torch.cat([weight.detach().flatten() for weight in twin.parameters()])
    cast = inputs.bfloat16() if inputs.is_floating_point() else inputs
    expected = twin.bfloat16()(cast).float()
    model = mine(new(build, layout), compute_dtype=torch.bfloat16)
    output = model(inputs).float()
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
    for weight in model.parameters():
        local = getattr(weight, "to_local", lambda weight=weight: weight)().detach()
        if not torch.isin(local[local != 0], given).all():  # shards may be padded with zeros
            raise Failed("before the first step weights are no longer those that it got", ROUNDED)


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
# torch's FSDP does not take rank 0's values; a course's model begins with an embedding.
BEYOND = [wrappers.starts_with_the_parameters_of_rank_0, casts_inputs_to_another_dtype]
HAS_TO_HOLD = [*COURSE, *MEANING]
