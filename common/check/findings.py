"""What a check has found, in words: how a gradient differs from the mean over the ranks.

A check is a function that takes the user's class. It raises Failed or NotTried, or it passes; a
text that it returns is a fact. The first line of its docstring is the promise.
"""

from collections import Counter

import torch
import torch.distributed as dist

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
NOT_WAITED = "read before it arrived: an asynchronous call is not waited for, or not every one"
UNUSABLE = "it cannot be called as the checks call it"
UNKNOWN = "what a check above says; else print it beside the mean of all ranks"


class Failed(Exception):
    """Failed(seen, means, evidence): what was seen, what that mostly means, its numbers."""


class NotTried(Exception):
    """Why a check says nothing about this class."""


def need(model, name: str) -> None:
    if not hasattr(model, name):
        raise NotTried(f"there is no {name}()")


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for rounding: the difference is measured by the size of the whole tensor."""
    # A gradient in float32 is read from the step that it made, which is rounded, too.
    tolerance = 1e-10 if found.dtype == torch.float64 else 1e-3
    return bool((found - expected).norm() <= tolerance * expected.norm())


def evidence_of(name: str, found: torch.Tensor, expected: torch.Tensor) -> dict:
    """On this rank: the element that is furthest from what is expected, and the ratio of all."""
    found, expected = found.detach().double().flatten(), expected.detach().double().flatten()
    furthest = (found - expected).abs().nan_to_num(nan=torch.inf).argmax()
    return {
        "parameter": name,
        "rank": dist.get_rank(),
        "seen": found[furthest].item(),
        "expected": expected[furthest].item(),
        "ratio": ratio_of(found, expected),
    }


def ratio_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By which factor the one is most like the other."""
    return ((found * expected).sum() / expected.square().sum()).item()


def check_arrived(tensors: dict[str, torch.Tensor]) -> None:
    """Failed, if one of them holds NaN, which is what the network that is late leaves."""
    unread = [name for name, tensor in tensors.items() if tensor.isnan().any()]
    if unread:
        seen = f"NaN in {len(unread)} of {len(tensors)} ({', '.join(unread[:2])})"
        evidence = [evidence_of(name, tensors[name], tensors[name]) for name in unread]
        raise Failed(seen, NOT_WAITED, evidence)


def check_equal_ranks(tensors: list[torch.Tensor], kind: str, means: str) -> None:
    """Failed, on all ranks, unless all hold the same values, to the last bit."""
    mine = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    check_arrived({kind: mine})
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    for rank, theirs in enumerate(of_ranks):
        if not torch.equal(theirs, of_ranks[0]):
            apart = (theirs - of_ranks[0]).abs().max().item()
            seen = f"{kind} of rank {rank} differ from rank 0's by up to {apart:.0e}"
            raise Failed(seen, means, [evidence_of(kind, mine, of_ranks[0])])


def check_gradients(found: dict, gradients: dict) -> None:
    """Failed, unless these are the means over the ranks; says which are not, and how they differ.

    found: {name: gradient}; gradients: what gradients_of_ranks returns.
    """
    check_arrived(found)
    mean = {name: of_ranks.sum(0).mean(0) for name, of_ranks in gradients.items()}
    wrong = [name for name in found if not is_close(found[name], mean[name])]
    if not wrong:
        return
    told = {name: explain(name, found[name], gradients) for name in wrong}
    # A gradient may look like two things at once. It is what most of the others are, too.
    means = Counter(means for _, means in told.values()).most_common(1)[0][0]
    names = [name for name in wrong if told[name][1] == means]
    some = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    seen = f"{len(names)} of {len(found)} gradients ({some}): {told[names[0]][0]}"
    if len(names) < len(wrong):
        seen += f"; {len(wrong) - len(names)} more are wrong in another way"
    raise Failed(seen, means, [evidence_of(name, found[name], mean[name]) for name in wrong])


def explain(name: str, found: torch.Tensor, gradients: dict) -> tuple[str, str]:
    """What a gradient is that is not the mean, and what that means."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_ranks = gradients[name].sum(0)  # of all parts
    mean = of_ranks.mean(0)
    possible = [
        (of_ranks[rank], "this rank's own", NOT_REDUCED),
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
