"""The gradients that one process computes for all ranks; how one differs from their mean."""

from collections import Counter

import torch
import torch.distributed as dist

from tools.check.findings import MIXED, check_arrived, fail, is_close, ratio_of
from tools.check.models import Plain, loss_of

SUMMED = "summed, not averaged: nothing divides by the number of ranks"
DIVIDED_TWICE = "divided twice by the number of ranks"
NOT_ADDED = "divided, but not added up: the all-reduce was given a copy, or is not waited for"
ZERO = "set to zero, or not there, or taken from a buffer that nobody has filled"
SWAPPED = "order: gradients are put back in another order than they were taken"
ROUNDED = "rounded to float32 on its way: a buffer has that dtype"
OVERWRITTEN = "overwritten: a gradient has to be added to what is there"
SCALED = "scaled by a constant"
UNKNOWN = "what a check above says; else print it beside the mean of all ranks"


def gradients_of_ranks(twin: Plain, step: int, parts: int) -> dict[str, torch.Tensor]:
    """{name: [part, rank, *shape]}, computed by this process alone; zeros where there is none.

    The twin is left with the mean over the ranks, added up over the parts.
    """
    parameters = dict(twin.named_parameters())
    ranks = range(dist.get_world_size())
    gradients = {}
    for name, parameter in parameters.items():
        gradients[name] = parameter.new_zeros(parts, len(ranks), *parameter.shape).detach()
    for part in range(parts):
        for twin.rank in ranks:
            twin.zero_grad()
            loss_of(twin, step, part, twin.rank).backward()
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradients[name][part, twin.rank] = parameter.grad
    for name, parameter in parameters.items():
        parameter.grad = torch.empty_like(parameter)  # in its memory format, for fused optimizers
        parameter.grad.copy_(gradients[name].sum(0).mean(0))
    return gradients


def check_gradients(found: dict, gradients: dict, why_not_reduced: str) -> None:
    """Failed, unless these are the means over the ranks; says which are not, and how they differ.

    found: {name: gradient}; gradients: what gradients_of_ranks returns.
    """
    check_arrived(found)
    wrong = [name for name in found if not is_close(found[name], gradients[name].sum(0).mean(0))]
    if not wrong:
        return
    told = {name: explain(name, found[name], gradients, why_not_reduced) for name in wrong}
    # A gradient may look like two things at once. It is what most of the others are, too.
    means = Counter(means for _, means in told.values()).most_common(1)[0][0]
    names = [name for name in wrong if told[name][1] == means]
    fail("gradients", f"are {told[names[0]][0]}", means, names, found)


def explain(name: str, found: torch.Tensor, gradients: dict, why_not_reduced: str) -> tuple:
    """What a gradient is that is not the mean, and what that means."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_ranks = gradients[name].sum(0)  # of all parts
    mean = of_ranks.mean(0)
    possible = [
        (of_ranks[rank], "this rank's own", why_not_reduced),
        (of_ranks[rank] / ranks, f"1/{ranks} of this rank's own", NOT_ADDED),
        (gradients[name][-1].mean(0), "the mean of the last backward alone", OVERWRITTEN),
    ]
    for other, theirs in gradients.items():
        if other != name and theirs.shape == gradients[name].shape:
            theirs = theirs.sum(0)
            possible.append((theirs.mean(0), f"the gradient of {other}", SWAPPED))
            # Where ranks take two branches, even ones take one and odd ones the other.
            mixed = theirs.clone()
            mixed[rank % 2 :: 2] = of_ranks[rank % 2 :: 2]
            seen = f"made of some ranks' {name} and the others' {other}"
            possible.append((mixed.mean(0), seen, MIXED))
    for candidate, seen, means in possible:
        if is_close(found, candidate):
            return seen, means
    if (found - mean).norm() < 1e-6 * mean.norm():
        return "the mean, but for a float32's rounding", ROUNDED
    factor = ratio_of(found, mean)
    if is_close(found, factor * mean):
        known = {0: ZERO, ranks: SUMMED, round(1 / ranks, 3): DIVIDED_TWICE}
        return f"{factor:.3g} times the mean", known.get(round(factor, 3), SCALED)
    return "not the mean", UNKNOWN
