"""What a check has found: a sentence of what was seen, and one of what that usually means.

A check is a function that takes the user's class. It raises Failed or NotTried, or it passes; a
text that it returns is shown. The first line of its docstring is the promise.
"""

import torch
import torch.distributed as dist

PASSED, FAILED, NOT_TRIED, STUCK = "passed", "failed", "not tried", "stuck"
MIXED = "order: ranks call in different orders, and calls are matched by their order alone"
NOT_REDUCED = "never reduced, or read before it arrived: is the all-reduce called, and waited for?"
NOT_WAITED = "read before it arrived: an asynchronous call is not waited for, or not every one"
OF_TORCH = "an error from within torch: no line of the class was being run"
UNUSABLE = "it cannot be called as the checks call it"


class Failed(Exception):
    """Failed(seen, means): what was seen, what that usually means."""


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


def ratio_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By which factor the one is most like the other."""
    return ((found * expected).sum() / expected.square().sum()).item()


def fail(what: str, seen: str, means: str, names: list[str], found: dict) -> None:
    """Failed: the named ones of the found tensors are not what is expected."""
    some = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
    raise Failed(f"{len(names)} of {len(found)} {what} ({some}) {seen}", means)


def check_arrived(found: dict[str, torch.Tensor]) -> None:
    """Failed, if one of them holds NaN, which is what the network that is late leaves."""
    unread = [name for name, tensor in found.items() if tensor.isnan().any()]
    if unread:
        fail("tensors", "hold NaN", NOT_WAITED, unread, found)


def check_equal_ranks(tensors: list[torch.Tensor], kind: str, means: str) -> None:
    """Failed, on all ranks, unless all hold the same values, to the last bit."""
    local = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    check_arrived({kind: local})
    of_ranks = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, local)
    for rank, theirs in enumerate(of_ranks):
        if not torch.equal(theirs, of_ranks[0]):
            apart = (theirs - of_ranks[0]).abs().max().item()
            raise Failed(f"{kind} of rank {rank} differ from rank 0's by up to {apart:.0e}", means)
