"""What a check has found, in words: the gradients that one process expects, and how others differ.

A check is a function that takes the user's class. It raises Failed or NotTried, or it passes; what
it returns are facts, a list of lines. The first line of its docstring is the promise.
"""

import itertools
from collections import Counter

import torch
from torch import nn


class Failed(Exception):
    """What was seen, and what that mostly means."""

    def __init__(self, seen: str, means: str):
        super().__init__(seen)
        self.seen = seen
        self.means = means


class NotTried(Exception):
    """Why a check says nothing about this class."""


class Net(nn.Module):
    """A model of the checks. Some take another way on every rank."""

    rank = 0


def new(build, seed: int = 0) -> nn.Module:
    """The same model on all ranks, in float64 unless it says otherwise."""
    torch.manual_seed(seed)
    model = build()
    return model if getattr(build, "keeps_dtypes", False) else model.double()


def loss_of(model: nn.Module, step: int, part: int, rank: int) -> torch.Tensor:
    """The loss of a rank's share of a batch; a step has several parts where it accumulates."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return model(inputs).square().mean()


def gradients_of_ranks(twin: Net, step: int, parts: int, world_size: int) -> list[list[dict]]:
    """[part][rank]{name: gradient}, all computed by this process alone; zeros where there is none.

    The twin is left with the mean over the ranks, added up over the parts.
    """
    gradients = []
    mean = {}
    for part in range(parts):
        gradients.append([])
        for rank in range(world_size):
            twin.rank = rank
            twin.zero_grad()
            loss_of(twin, step, part, rank).backward()
            gradients[-1].append(gradients_of(twin))
            for name, gradient in gradients[-1][-1].items():
                mean[name] = mean.get(name, 0) + gradient / world_size
    for name, parameter in twin.named_parameters():
        parameter.grad = mean.get(name)
    return gradients


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients of what is trained, zeros where there is none."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = gradient.detach().clone()
    return gradients


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for rounding: the difference is measured by the size of the whole tensor."""
    tolerance = 1e-10 if found.dtype == torch.float64 else 1e-6
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= tolerance * expected.norm())


SUMMED = "summed, not averaged: nothing divides by the number of ranks"
DIVIDED_TWICE = "divided twice by the number of ranks"
NOT_REDUCED = "never reduced, or read before it arrived: is the all-reduce called, and waited for?"
NOT_ADDED = "divided, but not added up: the all-reduce was given a copy, or is not waited for"
ZERO = "set to zero, or taken from a buffer that nobody has filled"
OF_ANOTHER_RANK = "copied from a rank, instead of averaged over all"
SWAPPED = "order: gradients are put back in another order than they were taken"
MIXED = "order: ranks call in different orders, and calls are matched by their order alone"
ROUNDED = "rounded to float32 on its way: a buffer has that dtype"
OVERWRITTEN = "overwritten: a gradient has to be added to what is there"
SCALED = "scaled by a constant"
MISSING = "taken away, or never there when it was looked for"
NOT_A_NUMBER = "memory that was never filled, or a division by zero"
UNKNOWN = "half arrived, if a check above says so; or print it beside the mean of all ranks"

MOST_MIXED = 6  # ranks of which every way to mix two gradients is tried


def explanations(name: str, found: torch.Tensor, parts: list[list[dict]], rank: int):
    """(seen, meaning) for everything that this gradient might be instead of the mean."""
    of_ranks = [sum_of_parts(parts, each) for each in range(len(parts[0]))]
    ranks = len(of_ranks)
    own = of_ranks[rank]
    mean = {key: sum(each[key] for each in of_ranks) / ranks for key in own}
    usual = [
        (torch.zeros_like(found), "zero", ZERO),
        (ranks * mean[name], f"{ranks} times the mean", SUMMED),
        (after_every_part(ranks, parts, name), f"{ranks} times the mean, every time", SUMMED),
        (mean[name] / ranks, f"1/{ranks} of the mean", DIVIDED_TWICE),
        (after_every_part(1 / ranks, parts, name), f"1/{ranks}, every time", DIVIDED_TWICE),
        (own[name], "this rank's own", NOT_REDUCED),
        (own[name] / ranks, f"1/{ranks} of this rank's own", NOT_ADDED),
        (mean_of(parts[-1], name), "the mean of the last backward alone", OVERWRITTEN),
    ]
    for other, theirs in enumerate(of_ranks):
        usual.append((theirs[name], f"rank {other}'s own", OF_ANOTHER_RANK))
    for other in own:
        if own[other].shape == own[name].shape and other != name:
            usual.append((mean[other], f"the gradient of {other}", SWAPPED))
            seen = f"made of some ranks' {name} and the others' {other}"
            for names in itertools.product((name, other), repeat=min(ranks, MOST_MIXED)):
                if len(set(names)) == 1:
                    continue
                mixed = sum(each[key] for each, key in zip(of_ranks, names, strict=False))
                usual += [(mixed, seen, MIXED), (mixed / ranks, seen, MIXED)]
    for candidate, seen, means in usual:
        if is_close(found, candidate):
            yield seen, means
    if not torch.isfinite(found).all():
        yield "not finite", NOT_A_NUMBER
        return
    expected = mean[name]
    factor = ((found * expected).sum() / expected.square().sum()).item()
    if found.numel() > 1 and is_close(found, factor * expected):
        yield f"{factor:.3g} times the mean", SCALED
    distance = ((found - expected).norm() / expected.norm()).item()
    if distance < 1e-6:
        yield "the mean, but for a float32's rounding", ROUNDED
    yield "not the mean", UNKNOWN


def sum_of_parts(parts: list[list[dict]], rank: int) -> dict[str, torch.Tensor]:
    return {name: sum(part[rank][name] for part in parts) for name in parts[0][rank]}


def mean_of(of_ranks: list[dict], name: str) -> torch.Tensor:
    return sum(each[name] for each in of_ranks) / len(of_ranks)


def after_every_part(factor: float, parts: list[list[dict]], name: str) -> torch.Tensor:
    """The sum of the means, if all that is there gets this factor after every backward."""
    result = torch.zeros(())
    for of_ranks in parts:
        result = factor * (result + mean_of(of_ranks, name))
    return result


def check_gradients(found: dict, parts: list[list[dict]], rank: int) -> None:
    """Failed, unless these are the means over the ranks; says which are not, and how they differ.

    found: {name: gradient or None} of what is trained; parts: what gradients_of_ranks returns.
    """
    wrong = {}  # name -> all that its gradient might be
    for name, gradient in found.items():
        expected = sum(mean_of(of_ranks, name) for of_ranks in parts)
        if gradient is None:
            if expected.any():
                wrong[name] = [("None", MISSING)]
        elif not is_close(gradient.detach().to(expected.dtype), expected):
            wrong[name] = list(explanations(name, gradient.detach(), parts, rank))
    if not wrong:
        return
    # A gradient may be two things at once. It is what most of the others are, too.
    votes = Counter(means for possible in wrong.values() for _, means in possible)
    names = {}  # (seen, meaning) -> the parameters
    for name, possible in wrong.items():
        best = max(possible, key=lambda explanation: votes[explanation[1]])
        names.setdefault(best, []).append(name)
    groups = sorted(names.items(), key=lambda group: -len(group[1]))
    (_, means), _ = groups[0]
    raise Failed("; ".join(in_words(each, seen, found) for (seen, _), each in groups[:3]), means)


def in_words(names: list[str], seen: str, found: dict) -> str:
    """Which gradients are what."""
    if len(names) == 1:
        return f"the gradient of {names[0]} is {seen}"
    some = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    return f"{len(names)} of {len(found)} gradients ({some}) are {seen}"
