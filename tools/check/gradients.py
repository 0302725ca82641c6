"""The gradients that one process computes for all ranks; how one differs from their mean."""

import torch
import torch.distributed as dist

from tools.check.findings import check_arrived, failure_of, is_close, storages
from tools.check.models import Plain, loss_of

SUMMED = "summed, not averaged: nothing divides by the number of ranks"
DIVIDED_TWICE = "divided twice by the number of ranks"
SWAPPED = "order: gradients are put back in another order than they were taken"
MIXED = "order: ranks call in different orders, and calls are matched by their order alone"
ROUNDED = "rounded to {} on its way: a buffer has that dtype"
PRECISIONS = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}  # relative to the mean
OVERWRITTEN = "overwritten: a gradient has to be added to what is there"
NOT_GATHERED = "these weights do not change on this rank: they are never gathered, or not all are"
UNKNOWN = "what a check above says; else print it beside the mean of all ranks"


def gradients_of_ranks(twin: Plain, step: int, parts: int) -> dict[str, torch.Tensor]:
    """Return {name: [part, rank, *shape] in float64}, computed here; zeros where there is none.

    The twin is left with the mean over the ranks, added up over the parts.
    """
    parameters = dict(twin.named_parameters())
    ranks = range(dist.get_world_size())
    gradients = {}
    for name, parameter in parameters.items():
        gradients[name] = torch.zeros(parts, len(ranks), *parameter.shape, dtype=torch.float64)
    for part in range(parts):
        for twin.rank in ranks:
            twin.zero_grad()
            loss_of(twin, step, part, twin.rank).backward()
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradients[name][part, twin.rank] = parameter.grad
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].mean(1).sum(0).to(parameter.dtype)
    return gradients


def check_gradients(found: dict, gradients: dict, why_not_reduced: str, rounds="") -> bool:
    """Raise Failed unless these are the means over the ranks; say how the first other one differs.

    found: {name: gradient}; gradients: what gradients_of_ranks returns. Returns whether they are
    the means but for the rounding of a dtype: the one that is allowed, or that of main gradients.
    """
    check_arrived(found)
    means = {name: gradients[name].mean(1).sum(0) for name in found}
    unrounded = 1e-4 if rounds else 1e-3  # less than the rounding of float16
    wrong = [name for name in found if not is_close(found[name], means[name], unrounded)]
    dtype = rounds or ("float32" if wrong and keeps_main_gradients(gradients) else "")
    if not wrong:
        return False
    if dtype and all(is_rounded(found[name], means[name], dtype) for name in wrong):
        return True
    seen, means = explain(wrong[0], found[wrong[0]], gradients, why_not_reduced)
    raise failure_of(wrong, found, "gradients", f"are wrong; the first is {seen}", means)


def is_rounded(found: torch.Tensor, mean: torch.Tensor, dtype: str) -> bool:
    return bool((found - mean).norm() < PRECISIONS[dtype] * mean.norm())


def keeps_main_gradients(gradients: dict) -> bool:
    """Say whether float32 memory is held for all of these, as main gradients of 16-bit models."""
    trained = [each[0, 0].numel() for each in gradients.values() if each.any()]
    return sum(storages(torch.float32).values()) >= 4 * sum(trained)


def explain(name: str, found: torch.Tensor, gradients: dict, why_not_reduced: str) -> tuple:
    """Return what a gradient is that is not the mean, and what that means."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    of_ranks = gradients[name].sum(0)  # of all parts
    mean = of_ranks.mean(0)
    possible = [
        (of_ranks[rank], "this rank's own", why_not_reduced),
        (of_ranks[rank] / ranks, f"1/{ranks} of this rank's own", why_not_reduced),
        (gradients[name][-1].mean(0), "the mean of the last backward alone", OVERWRITTEN),
        (ranks * mean, f"{ranks} times the mean", SUMMED),
        (mean / ranks, f"1/{ranks} of the mean", DIVIDED_TWICE),
        (shards_of(of_ranks), "made of each rank's own part", why_not_reduced),
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
    for dtype in PRECISIONS:
        if is_rounded(found, mean, dtype):
            return f"the mean, but for a {dtype}'s rounding", ROUNDED.format(dtype)
    unchanged = ((found == 0) & (mean != 0)).sum()
    if unchanged:
        return f"zero in {unchanged} of {found.numel()} values", NOT_GATHERED
    return "not the mean", UNKNOWN


def shards_of(of_ranks: torch.Tensor) -> torch.Tensor:
    """Return what is gathered if each rank keeps its part of its own gradient."""
    ranks = len(of_ranks)
    parts = [own.flatten().tensor_split(ranks)[rank] for rank, own in enumerate(of_ranks)]
    return torch.cat(parts).view_as(of_ranks[0])
