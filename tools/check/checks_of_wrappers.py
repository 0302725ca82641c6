"""What a wrapper has to do, and what is beyond: torch's DDP does not do that by default either.

FSDP has to do most of it, too. Gradients are read from the steps of SGD, because FSDP does not keep
them whole, and because a wrapper may keep them anywhere.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from tools.check import models
from tools.check.findings import (
    UNUSABLE,
    Failed,
    NotTried,
    check_arrived,
    check_equal_ranks,
    fail,
    is_close,
    need,
)
from tools.check.gradients import check_gradients, gradients_of_ranks
from tools.check.models import Plain, finish, loss_of, new, why_not_reduced, wrap

LR = 0.1
sgd = partial(torch.optim.SGD, lr=LR)
# It reads gradients and parameters front to back, however their elements are ordered.
fused_sgd = partial(torch.optim.SGD, lr=LR, fused=True)
OUTPUT = "the output"
NAMES = "gather_full_params() has to return all parameters, whole, under the module's own names"
WEIGHTS = (
    "it reduces weights, not gradients: a hook is given the parameter, and has to take its .grad"
)


def loss_here(model, step: int, part: int = 0) -> torch.Tensor:
    return loss_of(model, step, part, dist.get_rank())


def backward_each(model, step, parts=1):
    """So many micro-batches, a finish after each."""
    for part in range(parts):
        loss_here(model, step, part).backward()
        finish(model)


def backward_twice_before_finish(model, step, parts):
    if not models.finish_of(model):
        raise NotTried("it has no finish")
    for part in range(parts):
        loss_here(model, step, part).backward()
    finish(model)


def backward_without_sync(model, step, parts):
    need(model, "no_sync")
    with model.no_sync():
        loss_here(model, step, 0).backward()
    loss_here(model, step, 1).backward()
    finish(model)


def backward_of_two_forwards(model, step, parts):
    (loss_here(model, step, 0) + loss_here(model, step, 1)).backward()
    finish(model)


def evaluate_and_backward(model, step, parts):
    model.eval()
    output_of(model)
    model.train()
    backward_each(model, step)


def output_of(model) -> torch.Tensor:
    inputs = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6)
    with torch.no_grad():
        return model(inputs)


def weights_of(model, twin: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, whole, by their names in the twin; a call of all ranks.

    Where nobody can tell them, what a forward gives, which says less.
    """
    like = dict(twin.named_parameters())
    if hasattr(model, "gather_full_params"):
        found = model.gather_full_params()
        for name, weight in like.items():
            if not found or name not in found or found[name].shape != weight.shape:
                seen = f"gather_full_params() has no {name} of the shape {tuple(weight.shape)}"
                raise Failed(seen, NAMES)
        return {name: found[name].detach().clone() for name in like}
    weights = [parameter.detach() for parameter in model.parameters()]
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in weights]
    if [weight.shape for weight in weights] != [weight.shape for weight in like.values()]:
        return {OUTPUT: output_of(model)}
    return {name: weight.clone() for name, weight in zip(like, weights, strict=True)}


def check_weights(found: dict, twin: nn.Module, means: str) -> None:
    """Failed, unless these are the twin's."""
    check_arrived(found)
    twin.rank = dist.get_rank()
    expected = {OUTPUT: output_of(twin)} if OUTPUT in found else dict(twin.named_parameters())
    wrong = [name for name in expected if not is_close(found[name], expected[name])]
    if wrong:
        apart = (found[wrong[0]] - expected[wrong[0]]).norm() / expected[wrong[0]].norm()
        seen = f"are not those of one process, by {apart:.0e} of it"
        fail("weights", seen, means, wrong, found)


def follow_one_process(mine, build=Plain, **options):
    """Train the user's model on shares of batches, and a twin in this process on all of them."""
    follow(wrap(mine, new(build)), new(build), **options)


def follow(
    model,
    twin: nn.Module,
    backward=backward_each,
    parts=1,
    make_optimizer=sgd,
    set_to_none=True,
    steps=4,
):
    """Failed, unless some steps with shares of batches do what the twin does with all of them."""
    optimizer = make_optimizer(model.parameters())
    twin_optimizer = make_optimizer(twin.parameters())
    after = weights_of(model, twin)
    for step in range(steps):
        before = after
        backward(model, step, parts)
        gradients = gradients_of_ranks(twin, step, parts)
        optimizer.step()
        twin_optimizer.step()
        optimizer.zero_grad(set_to_none)
        after = weights_of(model, twin)
        if OUTPUT in after:
            check_weights(after, twin, "its steps are not those of the mean gradients")
        else:
            found = {name: (before[name] - after[name]) / LR for name in gradients}
            check_gradients(found, gradients, why_not_reduced(model))


def can_be_used(mine):
    """it returns a module that computes, and a step goes through"""
    model = wrap(mine, new(Plain))
    if not isinstance(model, nn.Module):
        seen = f"returns {type(model).__name__}, and no torch.nn.Module"
        raise Failed(f"{seen} (a function to be called after backward(): KIND=function)", UNUSABLE)
    group = dist.group.WORLD  # the late network counts, and gloo does not
    before = getattr(group, "collectives", 0)
    loss_here(model, 0).backward()
    early = getattr(group, "collectives", 0) - before
    finish(model)
    calls = getattr(group, "collectives", 0) - before
    return f"{calls} calls in a step of our small model, {early} of them during backward"


def starts_with_the_parameters_of_rank_0(mine):
    """all ranks start with the parameters of rank 0"""
    twin = new(Plain)
    found = weights_of(wrap(mine, new(Plain, seed=dist.get_rank())), twin)
    check_weights(found, twin, "the constructor does not broadcast the parameters from rank 0")


def starts_with_the_buffers_of_rank_0(mine):
    """all ranks start with the buffers of rank 0"""
    inner = new(models.Normalized)
    for buffer in inner.buffers():
        buffer.fill_(7 + dist.get_rank())
    buffers = dict(wrap(mine, inner).named_buffers())
    check_arrived(buffers)
    wrong = [name for name, buffer in buffers.items() if (buffer != 7).any()]
    if wrong:
        means = "the constructor does not broadcast the buffers from rank 0"
        fail("buffers", "are not those of rank 0", means, wrong, buffers)


def gradients_are_the_mean(mine):
    """after one backward the gradients are the mean over the samples of all ranks"""
    follow_one_process(mine, steps=1)


def leaves_weights_to_the_optimizer(mine):
    """weights change in optimizer.step() alone, and not in backward or the finish"""
    twin = new(Plain)
    model = wrap(mine, new(Plain))
    optimizer = sgd(model.parameters())
    for step in range(2):  # ranks that average weights have the same ones in the first
        before = weights_of(model, twin)
        backward_each(model, step)
        after = weights_of(model, twin)
        check_arrived(after)
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        if moved:
            fail("weights", "have changed before step()", WEIGHTS, moved, after)
        optimizer.step()
        optimizer.zero_grad()


def trains_with_sgd(mine):
    """SGD: after four steps the weights are those of one process with the whole batch"""
    follow_one_process(mine)


def ranks_stay_equal(mine):
    """after four steps all ranks have the same weights, to the last bit"""
    twin = new(Plain)
    model = wrap(mine, new(Plain))
    optimizer = sgd(model.parameters())
    for step in range(4):
        backward_each(model, step)
        optimizer.step()
        optimizer.zero_grad()
    tensors = [output_of(model), *weights_of(model, twin).values()]
    means = "the ranks did not step by the same gradients, or from the same weights"
    check_equal_ranks(tensors, "outputs and weights", means)


def reduces_tied_weights_once(mine):
    """tied weights: one parameter in two places is averaged once"""
    follow_one_process(mine, models.Tied)


def leaves_frozen_parameters_alone(mine):
    """frozen parameters (requires_grad=False) stay as they are, and the others train"""
    follow_one_process(mine, models.Frozen)


def trains_a_module_that_is_used_twice(mine):
    """a module that is used twice in a forward"""
    follow_one_process(mine, models.UsedTwice)


def trains_several_dtypes(mine):
    """parameters of several dtypes"""
    # After a step the float32 weights differ in their last bit, and so do all gradients after it.
    follow_one_process(mine, models.SeveralDtypes, steps=1)


def trains_channels_last(mine):
    """parameters in another memory format (channels_last), and a fused optimizer"""
    follow_one_process(mine, models.ChannelsLast, make_optimizer=fused_sgd)


def keeps_one_order_on_any_branch(mine):
    """ranks on different branches: gradients are ready in another order"""
    follow_one_process(mine, models.Branches)


def averages_all_of_a_large_model(mine):
    """ranks on different branches: a model that is larger than a bucket of 25 MB"""
    follow_one_process(mine, models.SeveralBuckets, steps=1)


def accumulates_with_no_sync(mine):
    """accumulation with no_sync(): the mean of the sums"""
    follow_one_process(mine, backward=backward_without_sync, parts=2)


def accumulates_without_no_sync(mine):
    """accumulation without no_sync(), a finish after each backward: the mean of the sums"""
    follow_one_process(mine, parts=2)


def trains_after_two_forwards(mine):
    """two forwards before a backward"""
    follow_one_process(mine, backward=backward_of_two_forwards, parts=2)


def evaluates_in_between(mine):
    """evaluation (eval() and no_grad()) between the steps"""
    follow_one_process(mine, backward=evaluate_and_backward)


def zeroes_in_place(mine):
    """zero_grad(set_to_none=False): gradients stay, as zeros"""
    follow_one_process(mine, set_to_none=False)


def accumulates_before_one_finish(mine):
    """two backward() before one finish: the mean of the sums"""
    follow_one_process(mine, backward=backward_twice_before_finish, parts=2)


def skips_what_nobody_uses(mine):
    """a parameter that no rank uses"""
    follow_one_process(mine, models.UsedByNobody)


def averages_what_one_rank_uses(mine):
    """a parameter that only one rank uses counts as zero on the others"""
    follow_one_process(mine, models.UsedByRank0)


def keeps_buffers_equal(mine):
    """all ranks evaluate with the same buffers, such as BatchNorm's statistics"""
    model = wrap(mine, new(models.Normalized))
    for step in range(3):
        backward_each(model, step)
    model.eval()
    output_of(model)
    means = "each rank has the statistics of its own share: broadcast them before you evaluate"
    check_equal_ranks(list(model.buffers()), "buffers", means)


COURSE = [
    can_be_used,
    starts_with_the_parameters_of_rank_0,
    leaves_weights_to_the_optimizer,
    gradients_are_the_mean,
    trains_with_sgd,
    ranks_stay_equal,
    reduces_tied_weights_once,
    leaves_frozen_parameters_alone,
]
MEANING = [
    starts_with_the_buffers_of_rank_0,
    trains_a_module_that_is_used_twice,
    trains_several_dtypes,
    trains_channels_last,
    keeps_one_order_on_any_branch,
    averages_all_of_a_large_model,
    accumulates_with_no_sync,
    accumulates_without_no_sync,
    trains_after_two_forwards,
    evaluates_in_between,
    zeroes_in_place,
]
HAS_TO_HOLD = [*COURSE, *MEANING]
BEYOND = [
    accumulates_before_one_finish,
    skips_what_nobody_uses,
    averages_what_one_rank_uses,
    keeps_buffers_equal,
]
