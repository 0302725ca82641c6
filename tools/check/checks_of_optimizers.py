"""What a sharded optimizer has to do: the steps of the optimizer that it shards, with less state.

Gradients are the same on all ranks, as DDP leaves them, but in the check that asks who averages.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.utils._pytree import tree_leaves

from tools.check.findings import (
    OWN_PART,
    Failed,
    Warned,
    alive,
    check_arrived,
    is_close,
    may_be_refused,
)
from tools.check.gradients import SUMMED, is_rounded
from tools.check.models import PLAIN, Plain, TiedAndFrozen, divisible, new

NOT_SENT = "new values do not reach all ranks, or not all of them: send them at the end of step()"
OTHER_STEP = "the optimizer inside has another learning rate, other options or other gradients"
NOBODY = "a part of the gradients is averaged by nobody: neither by step() nor by DDP before it"
FORGOTTEN = "after a checkpoint the moments begin at zero: state_dict() has to return them"
OWN_GROUPS = "param_groups has only the parameters that this rank steps"
MASTER = "it steps in float32, and is judged in it"


def parameters_of(build=Plain, layout=None) -> list[nn.Parameter]:
    """Return a model's parameters, by default of sizes that all ranks can divide."""
    return list(new(build, layout or divisible(PLAIN)).parameters())


def gradients_of(owned: list[nn.Parameter], step: int = 0, rank: int = 0) -> list[torch.Tensor]:
    """Return a rank's gradients, others in every step."""
    generator = torch.Generator().manual_seed(100 + 1000 * rank + step)
    return [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in owned]


def backward(owned: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
    """Let a backward set gradients, because a class may have hooks."""
    losses = []
    for parameter, gradient in zip(owned, gradients, strict=True):
        parameter.grad = None
        if parameter.requires_grad:
            losses.append((parameter * gradient).sum())
    sum(losses).backward()


def stepped(mine, owned: list[nn.Parameter], gradients=None, lr=0.03, **options):
    """Return an AdamW of the user's kind that has made a step, by default with equal gradients."""
    optimizer = mine(owned, AdamW, lr=lr, **options)
    backward(owned, gradients or gradients_of(owned))
    optimizer.step()
    return optimizer


def follow(mine, layout=None, groups=list, change=None, **options):
    """Train by it, and twins by AdamW in one process; raise Failed where values differ.

    change(optimizer, step) is called before each step. Returns what has to be said of
    values that are right.
    """
    options = {"lr": 0.03, **options}
    owned, plain, before = (parameters_of(TiedAndFrozen, layout) for _ in range(3))
    sharded = mine(groups(owned), AdamW, **options)
    twin = AdamW(groups(plain), **options)
    said = ""
    for step in range(4):
        for optimizer, trained in ((sharded, owned), (twin, plain)):
            if change:
                change(optimizer, step)
            backward(trained, gradients_of(trained, step))
            optimizer.step()
        check_arrived({f"parameter {number}": each for number, each in enumerate(owned)})
        for number, (found, expected, start) in enumerate(zip(owned, plain, before, strict=True)):
            seen = f"after step {step + 1} parameter {number} is not that of one optimizer: it "
            old = ((found == start) & (expected != start)).sum()
            if old:
                seen += f"has {old} of {found.numel()} values unchanged on this rank"
                raise Failed(seen, NOT_SENT)
            if is_close(found, expected):
                continue
            if not (is_rounded(found, expected, "float32") and held(torch.float32)):
                raise Failed(seen + "has moved elsewhere", OTHER_STEP)
            said = MASTER
        sharded.zero_grad()
        if any(each.grad is not None and each.grad.any() for each in owned):
            raise Failed("some parameters keep their gradient after zero_grad()", OWN_GROUPS)
    return said


def held(dtype: torch.dtype | None = None) -> int:
    """Return how many numbers of state this rank keeps, wherever: a class may cut slices."""
    states = [list(each.state.values()) for each in alive(torch.optim.Optimizer)]
    tensors = [each for each in tensors_in(states) if dtype in (None, each.dtype)]
    # A state may be shown by two optimizers.
    return sum({each.data_ptr(): each.numel() for each in tensors}.values())


def tensors_in(state) -> list[torch.Tensor]:
    """Return what a state has beside the numbers of steps."""
    leaves = tree_leaves(state)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]


def of_all_ranks(number: int) -> list[int]:
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return numbers


def can_be_used(mine):
    """it returns an optimizer, and a step goes through"""
    stepped(mine, parameters_of())


def steps_like_adamw(mine):
    """AdamW: on all ranks all values are those of one optimizer; frozen parameters stay"""
    return follow(mine, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)


def shares_the_state_out(mine):
    """the optimizer state is shared out: no rank keeps that of a parameter that another keeps"""
    ranks = dist.get_world_size()
    owned = [nn.Parameter(torch.ones(64, 64)) for _ in range(4 * ranks)]  # small ones may be whole
    before = held()
    _kept = stepped(mine, owned)  # else its state is freed before it is counted
    of_ranks = of_all_ranks(held() - before)
    whole = 2 * sum(parameter.numel() for parameter in owned)
    seen = ", ".join(f"{each / whole:.0%}" for each in of_ranks)
    seen = f"of AdamW's state the ranks keep {seen}"
    if not whole <= sum(of_ranks) <= 1.01 * whole:  # slices may be padded
        raise Failed(seen, "every rank steps all parameters, or some have no owner or several")
    if max(of_ranks) > 1.5 * whole / ranks:
        raise Failed(seen, "parameters are shared out unevenly")


def says_who_averages(mine):
    """ranks with gradients of their own: step() averages all of them, or leaves that to DDP"""
    ranks = range(dist.get_world_size())
    of_ranks = [gradients_of(parameters_of(), rank=rank) for rank in ranks]
    sums = [torch.stack(each).sum(0) for each in zip(*of_ranks, strict=True)]
    means = [each / len(ranks) for each in sums]
    found = values_after(mine, of_ranks[dist.get_rank()])
    wrong = differing(found, values_after(unsharded, means))
    if not wrong:
        return "step() averages the ranks' gradients"
    if len(wrong) < len(means):
        raise Failed(f"it averages gradients, but not those of the parameters {wrong}", NOBODY)
    if not differing(found, values_after(unsharded, sums)):
        raise Failed("step() takes the sum of the ranks' gradients", SUMMED)
    return "step() does not average: give it averaged gradients"


def unsharded(params, optimizer_cls, **options):
    return optimizer_cls(params, **options)


def values_after(mine, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return all values after a step in which a sum of gradients does not do what a mean does."""
    owned = parameters_of()
    stepped(mine, owned, gradients, eps=1.0)
    return [parameter.detach() for parameter in owned]


def differing(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[int]:
    """Return the numbers of those that differ by more than the rounding of float32."""
    pairs = enumerate(zip(found, expected, strict=True))
    return [number for number, pair in pairs if not is_rounded(*pair, "float32")]


def steps_sizes_that_ranks_cannot_divide(mine):
    """sizes that the ranks cannot divide: what a slice leaves over is stepped, too"""
    with may_be_refused():
        return follow(mine, layout=PLAIN)


def keeps_groups_apart(mine):
    """parameter groups with options of their own, and a learning rate that a scheduler changes"""

    def groups(owned):
        return [{"params": owned[:3], "weight_decay": 0.3}, {"params": owned[3:]}]

    def change(optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)

    return follow(mine, groups=groups, change=change)


def goes_on_from_its_state_dict(mine):
    """state_dict(), loaded into a new one, goes on as if nothing had been, on as many ranks"""
    owned = parameters_of()
    optimizer = stepped(mine, owned)
    copies = copy.deepcopy(owned)
    other = mine(copies, AdamW, lr=0.03)
    with may_be_refused():
        state = copy.deepcopy(optimizer.state_dict())
        other.load_state_dict(state)
    for each, parameters in ((optimizer, owned), (other, copies)):
        backward(parameters, gradients_of(parameters, step=1))
        each.step()
    numbers = sum(tensor.numel() for tensor in tensors_in(state))
    if not all(map(is_close, copies, owned)):
        seen = f"it goes on otherwise: what is saved has {numbers} numbers of state"
        is_torchs = type(optimizer).state_dict is torch.optim.Optimizer.state_dict
        raise (Warned if is_torchs else Failed)(seen, FORGOTTEN)
    if max(of_all_ranks(numbers)) < 2 * sum(each.numel() for each in owned):
        raise Warned("each rank's has the state of its own part alone", OWN_PART)


RANKS = 2
COURSE = [can_be_used, steps_like_adamw]
MEANING = [
    shares_the_state_out,
    says_who_averages,
    steps_sizes_that_ranks_cannot_divide,
    keeps_groups_apart,
    goes_on_from_its_state_dict,
]
BEYOND = []
HAS_TO_HOLD = [*COURSE, *MEANING]
