"""What a check has found: a sentence of what was seen, one of what that means, and its numbers.

A check is a function that takes the user's class. It raises Failed or NotTried, or it passes; a
text that it returns is a fact. The first line of its docstring is the promise.
"""

import torch
import torch.distributed as dist

MIXED = "order: ranks call in different orders, and calls are matched by their order alone"
NOT_WAITED = "read before it arrived: an asynchronous call is not waited for, or not every one"
OF_TORCH = "an error from within torch: no line of the class was being run"
UNUSABLE = "it cannot be called as the checks call it"


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


def fail(what: str, seen: str, means: str, names: list[str], found: dict, expected: dict) -> None:
    """Failed: so many of the found {name: tensor} are not what is expected."""
    some = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    evidence = [evidence_of(name, found[name], expected[name]) for name in names]
    raise Failed(f"{len(names)} of {len(found)} {what} ({some}) {seen}", means, evidence)


def check_arrived(found: dict[str, torch.Tensor]) -> None:
    """Failed, if one of them holds NaN, which is what the network that is late leaves."""
    unread = [name for name, tensor in found.items() if tensor.isnan().any()]
    if unread:
        fail("tensors", "hold NaN", NOT_WAITED, unread, found, found)


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
