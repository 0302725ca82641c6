"""What a wrapper has to do. FSDP has to do most of it, too.

Gradients are read from the steps of SGD, because FSDP does not keep them whole, and because a
wrapper may keep them anywhere.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from users_class import method_of

from tools.check import models
from tools.check.findings import (
    UNUSABLE,
    Failed,
    NotTried,
    check_arrived,
    failure_of,
    may_be_refused,
)
from tools.check.gradients import check_gradients, gradients_of_ranks
from tools.check.models import (
    PLAIN,
    WIDTHS_WITH_A_REST,
    Plain,
    finish,
    gather_of,
    loss_of,
    new,
    public_names,
    trained,
    why_not_reduced,
    wrap,
)

LR = 0.1
sgd = partial(torch.optim.SGD, lr=LR)
MAIN = "main gradients are float32, and are judged in it"
NAMES = "gather_full_params() has to return all parameters, whole, under the module's own names"
COPIED = (
    "a copy is reduced: contiguous() and flatten() copy such a gradient, so copy the result back"
)
CLIPPED = "its norm is that of a rank's part, or counts N times what every rank has whole"
SPLIT_TWICE = "a tied weight is split once for each of its names: make one shard of it"
WEIGHTS = "it reduces weights, not gradients: a hook has to take the .grad of its parameter"


def loss_here(model, step: int, part: int = 0) -> torch.Tensor:
    return loss_of(model, step, part, dist.get_rank())


def backward_each(model, step, parts=1):
    """Compute the gradients of so many micro-batches, with a finish after each."""
    for part in range(parts):
        loss_here(model, step, part).backward()
        finish(model)


def backward_without_sync(model, step, parts):
    if not hasattr(model, "no_sync"):
        raise NotTried("there is no no_sync()")
    with model.no_sync():
        loss_here(model, step, 0).backward()
    loss_here(model, step, 1).backward()
    finish(model)


def weights_of(model, twin: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights, whole, by their names in the twin; a call of all ranks."""
    like = dict(twin.named_parameters())
    if gather := gather_of(model):
        found = gather()
    elif gather := method_of(model, ["gather"]):
        gather()
        found = dict(model.module.named_parameters())
    else:
        weights = [weight.detach() for weight in model.parameters()]
        weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in weights]
        found = dict(zip(like, weights, strict=False))
    for name, weight in like.items():
        if name not in found or found[name].shape != weight.shape:
            seen = f"there is no whole {name}, of the shape {tuple(weight.shape)}"
            raise Failed(seen, f"{NAMES}; it has {', '.join(public_names(model)) or 'no methods'}")
    names = {weight: name for name, weight in like.items()}
    for other, weight in twin.named_parameters(remove_duplicate=False):
        whole = found[names[weight]]
        if not torch.equal(found.get(other, whole).nan_to_num(), whole.nan_to_num()):
            seen = f"{names[weight]} and {other} are one weight, and have come apart"
            raise Failed(seen, SPLIT_TWICE)
    return {name: found[name].detach().clone() for name in like}


def follow_one_process(mine, layout, build=Plain, **options):
    """Train the user's model on shares of batches, and a twin in this process on all of them."""
    return follow(wrap(mine, new(build, layout)), new(build, layout), **options)


def follow(model, twin, backward=backward_each, parts=1, steps=4, unreduced="", rounds=""):
    """Raise Failed unless steps with shares of batches do what the twin does with all of them.

    unreduced: what it means that a gradient is a rank's own, if it is not the usual; rounds: the
    dtype in which gradients may be averaged. Returns what has to be said of right gradients.
    """
    said = ""
    optimizer = sgd(trained(model))
    twin_optimizer = sgd(twin.parameters())
    after = weights_of(model, twin)
    for step in range(steps):
        before = after
        backward(model, step, parts)
        gradients = gradients_of_ranks(twin, step, parts)
        optimizer.step()
        twin_optimizer.step()
        optimizer.zero_grad()
        after = weights_of(model, twin)
        found = {name: (before[name] - after[name]) / LR for name in gradients}
        if check_gradients(found, gradients, unreduced or why_not_reduced(model), rounds):
            said = MAIN
    return said


def can_be_used(mine, layout=PLAIN):
    """it returns a module that computes, and a step goes through"""
    model = wrap(mine, new(Plain, layout))
    if not isinstance(model, nn.Module):
        raise Failed(f"returns {type(model).__name__}, and no torch.nn.Module", UNUSABLE)
    backward_each(model, step=0)


def starts_with_the_parameters_of_rank_0(mine, layout=PLAIN):
    """all ranks start with the parameters of rank 0"""
    twin = new(Plain, layout)
    found = weights_of(wrap(mine, new(Plain, layout, seed=dist.get_rank())), twin)
    check_arrived(found)
    wrong = [name for name in found if not torch.equal(found[name], twin.get_parameter(name))]
    if wrong:
        means = "the constructor does not broadcast the parameters from rank 0"
        raise failure_of(wrong, found, "weights", "are not those of rank 0", means)


def starts_with_the_buffers_of_rank_0(mine, layout=PLAIN):
    """all ranks start with the buffers of rank 0"""
    inner = new(Plain, layout)
    inner.offset.fill_(7 + dist.get_rank())
    wrap(mine, inner)
    if inner.offset != 7:
        means = "the constructor does not broadcast the buffers from rank 0"
        raise Failed("a buffer is not that of rank 0", means)


def leaves_weights_to_the_optimizer(mine, layout=PLAIN):
    """weights change in optimizer.step() alone, and not in backward or the finish"""
    twin = new(Plain, layout)
    model = wrap(mine, new(Plain, layout))
    optimizer = sgd(trained(model))
    for step in range(2):  # ranks that average weights have the same ones in the first
        before = weights_of(model, twin)
        backward_each(model, step)
        after = weights_of(model, twin)
        check_arrived(after)
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        if moved:
            raise failure_of(moved, after, "weights", "have changed before step()", WEIGHTS)
        optimizer.step()
        optimizer.zero_grad()


def trains_with_sgd(mine, layout=PLAIN):
    """in each of four steps the gradients are the mean over the samples of all ranks"""
    return follow_one_process(mine, layout)


def trains_tied_and_frozen_weights(mine, layout=PLAIN):
    """a tied weight is averaged once; frozen ones (requires_grad=False) stay as they are"""
    return follow_one_process(mine, layout, models.TiedAndFrozen)


def averages_what_one_rank_uses(mine, layout=PLAIN):
    """a parameter that only one rank uses counts as zero on the others; one that no rank uses"""
    return follow_one_process(mine, layout, models.Unused)


def trains_several_dtypes(mine, layout=PLAIN):
    """parameters of several dtypes"""
    # After a step the float32 weights differ in their last bit, and so do all gradients after it.
    return follow_one_process(mine, layout, models.SeveralDtypes, steps=1)


def averages_what_is_not_contiguous(mine, layout=PLAIN):
    """a weight that is not contiguous in memory: transposed, or channels_last"""
    with may_be_refused():  # as gloo's send() refuses it
        return follow_one_process(mine, layout, models.Transposed, steps=1, unreduced=COPIED)


def keeps_one_order_on_any_branch(mine, layout=PLAIN):
    """ranks on different branches: gradients get ready in another order; more than 25 MB of them"""
    return follow_one_process(mine, layout, models.Branches, steps=1)


def accumulates_with_no_sync(mine, layout=PLAIN):
    """accumulation with no_sync(): the mean of the sums"""
    return follow_one_process(mine, layout, backward=backward_without_sync, parts=2)


def accumulates_without_no_sync(mine, layout=PLAIN):
    """accumulation without no_sync(), a finish after each backward: the mean of the sums"""
    return follow_one_process(mine, layout, parts=2)


def trains_sizes_that_ranks_cannot_divide(mine, layout=PLAIN):
    """sizes that the ranks cannot divide: what a shard leaves over arrives, too"""
    with may_be_refused():
        for width in WIDTHS_WITH_A_REST:
            said = follow_one_process(mine, layout._replace(rows=7, width=width), steps=1)
    return said


def clips_by_the_norm_of_all(mine, layout=PLAIN):
    """its own clip_grad_norm_(): the norm is that of the whole mean gradient, on all ranks"""
    model = wrap(mine, new(Plain, layout))
    twin = new(Plain, layout)
    if not hasattr(model, "clip_grad_norm_"):
        raise NotTried("there is no clip_grad_norm_(), and torch's sees a rank's part alone")
    optimizer = sgd(trained(model))
    before = weights_of(model, twin)
    backward_each(model, step=0)
    gradients_of_ranks(twin, step=0, parts=1)
    most = nn.utils.get_total_norm([weight.grad for weight in twin.parameters()]) / 2
    model.clip_grad_norm_(most.item())
    optimizer.step()
    after = weights_of(model, twin)
    found = {name: (before[name] - after[name]) / LR for name in before}
    check_arrived(found)
    norm = nn.utils.get_total_norm(found.values())
    if abs(norm - most) > 1e-3 * most:
        seen = f"clipped to {most:.3g}, the whole gradient has the norm {norm:.3g}"
        raise Failed(seen, CLIPPED)


RANKS = 3  # some all-reduces are right on 2, 4, 8 only
COURSE = [
    can_be_used,
    starts_with_the_parameters_of_rank_0,
    leaves_weights_to_the_optimizer,
    trains_with_sgd,
    trains_tied_and_frozen_weights,
]
MEANING = [
    starts_with_the_buffers_of_rank_0,
    trains_several_dtypes,
    averages_what_is_not_contiguous,
    keeps_one_order_on_any_branch,
    accumulates_with_no_sync,
    accumulates_without_no_sync,
]
BEYOND = [averages_what_one_rank_uses]  # torch's DDP has to be asked for it
HAS_TO_HOLD = [*COURSE, *MEANING]
