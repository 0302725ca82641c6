"""What a check has found, in words: how a gradient differs from the mean over the ranks.

A check is a function that takes the user's class. It raises Failed or NotTried, or it passes; what
it returns are facts, a list of lines. The first line of its docstring is the promise.
"""

from collections import Counter
from itertools import islice, product

import torch
import torch.distributed as dist


class Failed(Exception):
    """What was seen, and what that mostly means."""

    def __init__(self, seen: str, means: str):
        super().__init__(seen)
        self.seen = seen
        self.means = means


class NotTried(Exception):
    """Why a check says nothing about this class."""


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for rounding: the difference is measured by the size of the whole tensor."""
    # A gradient in float32 is read from the step that it made, which is rounded, too.
    tolerance = 1e-10 if found.dtype == torch.float64 else 1e-3
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= tolerance * expected.norm())


def check_equal_ranks(mine: list[torch.Tensor], kind: str, means: str) -> None:
    """Failed, on all ranks, unless all hold the same values, to the last bit."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [tensor.detach() for tensor in mine])
    for rank, theirs in enumerate(of_ranks):
        pairs = zip(of_ranks[0], theirs, strict=True)
        apart = [(one - other).abs().max() for one, other in pairs if not torch.equal(one, other)]
        if apart:
            seen = f"{len(apart)} of {len(mine)} {kind} differ from those of rank 0"
            raise Failed(f"{seen} on rank {rank}, by up to {max(apart):.0e}", means)


SUMMED = "summed, not averaged: nothing divides by the number of ranks"
DIVIDED_TWICE = "divided twice by the number of ranks"
NOT_REDUCED = "never reduced, or read before it arrived: is the all-reduce called, and waited for?"
NOT_ADDED = "divided, but not added up: the all-reduce was given a copy, or is not waited for"
ZERO = "set to zero, or not there, or taken from a buffer that nobody has filled"
SWAPPED = "order: gradients are put back in another order than they were taken"
MIXED = "order: ranks call in different orders, and calls are matched by their order alone"
ROUNDED = "rounded to float32 on its way: a buffer has that dtype"
OVERWRITTEN = "overwritten: a gradient has to be added to what is there"
SCALED = "scaled by a constant"
UNKNOWN = "half arrived, if a check above says so; or print it beside the mean of all ranks"


def candidates(name: str, parts: list[list[dict]], rank: int):
    """(gradient, seen, meaning) of everything that a gradient might be instead of the mean."""
    of_ranks = [sum_of_parts(parts, each) for each in range(len(parts[0]))]
    ranks = len(of_ranks)
    own = of_ranks[rank]
    total = {key: sum(each[key] for each in of_ranks) for key in own}
    yield 0 * own[name], "zero", ZERO
    yield total[name], f"{ranks} times the mean", SUMMED
    yield after_every_part(ranks, parts, name), f"{ranks} times the mean, every time", SUMMED
    yield total[name] / ranks**2, f"1/{ranks} of the mean", DIVIDED_TWICE
    yield after_every_part(1 / ranks, parts, name), f"1/{ranks}, every time", DIVIDED_TWICE
    yield own[name], "this rank's own", NOT_REDUCED
    yield own[name] / ranks, f"1/{ranks} of this rank's own", NOT_ADDED
    yield mean_of(parts[-1], name), "the mean of the last backward alone", OVERWRITTEN
    for other in own:
        if own[other].shape != own[name].shape or other == name:
            continue
        yield total[other] / ranks, f"the gradient of {other}", SWAPPED
        for names in islice(product((name, other), repeat=ranks), 64):
            if set(names) == {name, other}:
                mixed = sum(each[key] for each, key in zip(of_ranks, names, strict=True))
                seen = f"made of some ranks' {name} and the others' {other}"
                yield mixed, seen, MIXED
                yield mixed / ranks, seen, MIXED


def explanations(name: str, found: torch.Tensor, parts: list[list[dict]], rank: int) -> dict:
    """{meaning: seen} of all that this gradient is, which is not the mean."""
    possible = {}
    for candidate, seen, means in candidates(name, parts, rank):
        if is_close(found, candidate):
            possible.setdefault(means, seen)
    expected = sum(mean_of(of_ranks, name) for of_ranks in parts)
    factor = ((found * expected).sum() / expected.square().sum()).item()
    if found.numel() > 1 and is_close(found, factor * expected):
        possible.setdefault(SCALED, f"{factor:.3g} times the mean")
    if (found - expected).norm() < 1e-6 * expected.norm():
        possible[ROUNDED] = "the mean, but for a float32's rounding"
    return possible or {UNKNOWN: "not the mean"}


def sum_of_parts(parts: list[list[dict]], rank: int) -> dict[str, torch.Tensor]:
    return {name: sum(part[rank][name] for part in parts) for name in parts[0][rank]}


def mean_of(of_ranks: list[dict], name: str) -> torch.Tensor:
    return sum(each[name] for each in of_ranks) / len(of_ranks)


def after_every_part(factor: float, parts: list[list[dict]], name: str) -> torch.Tensor:
    """The sum of the means, if all that is there gets this factor after every backward."""
    result = 0
    for of_ranks in parts:
        result = factor * (result + mean_of(of_ranks, name))
    return result


def check_gradients(found: dict, parts: list[list[dict]], rank: int) -> None:
    """Failed, unless these are the means over the ranks; says which are not, and how they differ.

    found: {name: gradient}; parts: what gradients_of_ranks returns.
    """
    wrong = {}  # name -> {meaning: seen}
    for name, gradient in found.items():
        if not is_close(gradient, sum(mean_of(of_ranks, name) for of_ranks in parts)):
            wrong[name] = explanations(name, gradient, parts, rank)
    if not wrong:
        return
    # A gradient may be two things at once. It is what most of the others are, too.
    votes = Counter(means for possible in wrong.values() for means in possible)
    means = votes.most_common(1)[0][0]
    names = [name for name in wrong if means in wrong[name]]
    some = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    seen = f"{len(names)} of {len(found)} gradients ({some}): {wrong[names[0]][means]}"
    if len(names) < len(wrong):
        seen += f"; {len(wrong) - len(names)} more are wrong in another way"
    raise Failed(seen, means)
