"""The gradients that one process computes for all ranks; how one differs from their mean."""

import torch
import torch.distributed as dist

from tools.check.findings import check_arrived, fail, is_close
from tools.check.models import Plain, loss_of

SUMMED = "summed, not averaged: nothing divides by the number of ranks"
DIVIDED_TWICE = "divided twice by the number of ranks"
SWAPPED = "order: gradients are put back in another order than they were taken"
MIXED = "order: ranks call in different orders, and calls are matched by their order alone"
ROUNDED = "rounded to float32 on its way: a buffer has that dtype"
OVERWRITTEN = "overwritten: a gradient has to be added to what is there"
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
        parameter.grad = gradients[name].sum(0).mean(0)
    return gradients


def check_gradients(found: dict, gradients: dict, why_not_reduced: str) -> None:
    """Failed, unless these are the means over the ranks; says how the first other one differs.

    found: {name: gradient}; gradients: what gradients_of_ranks returns.
    """
    check_arrived(found)
    wrong = [name for name in found if not is_close(found[name], gradients[name].sum(0).mean(0))]
    if wrong:
        seen, means = explain(wrong[0], found[wrong[0]], gradients, why_not_reduced)
        fail("gradients", f"are wrong; the first is {seen}", means, wrong, found)


def explain(name: str, found: torch.Tensor, gradients: dict, why_not_reduced: str) -> tuple:
    """What a gradient is that is not the mean, and what that means."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_ranks = gradients[name].sum(0)  # of all parts
    mean = of_ranks.mean(0)
    possible = [
        (of_ranks[rank], "this rank's own", why_not_reduced),
        (gradients[name][-1].mean(0), "the mean of the last backward alone", OVERWRITTEN),
        (ranks * mean, f"{ranks} times the mean", SUMMED),
        (mean / ranks, f"1/{ranks} of the mean", DIVIDED_TWICE),
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
    return "not the mean", UNKNOWN
