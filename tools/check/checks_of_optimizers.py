"""What a sharded optimizer has to do: the steps of the optimizer that it shards, with less state.

Gradients are the same on all ranks here, as DDP leaves them.
"""

import torch
import torch.distributed as dist
from torch import nn

from common.report import held_bytes
from tools.check.findings import Failed, alive, check_arrived, is_close
from tools.check.models import Plain, TiedAndFrozen, new

NOT_SENT = "the owners' new values do not reach all ranks: broadcast them at the end of step()"
OTHER_STEP = "the optimizer inside has another learning rate, other options or other gradients"


def give_gradients(owned: list[nn.Parameter], step: int) -> None:
    """Set gradients, the same on all ranks, and others in every step."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in owned:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.requires_grad:
            parameter.grad = gradient.to(parameter.dtype)


def follow(mine, optimizer_cls, options, build=Plain, groups=list, change=None):
    """Train by it, and twins by the optimizer that it shards; raise Failed where values differ."""
    owned, plain, before = (list(new(build).parameters()) for _ in range(3))
    sharded = mine(groups(owned), optimizer_cls, **options)
    unsharded = optimizer_cls(groups(plain), **options)
    for step in range(4):
        for optimizer, trained in ((sharded, owned), (unsharded, plain)):
            if change:
                change(optimizer, trained, step)
            give_gradients(trained, step)
            optimizer.step()
        check_arrived({f"parameter {number}": each for number, each in enumerate(owned)})
        for number, (found, twin, start) in enumerate(zip(owned, plain, before, strict=True)):
            seen = f"after step {step + 1} parameter {number} is not that of one optimizer: it "
            if torch.equal(found, start) and not torch.equal(twin, start):
                raise Failed(seen + "has not changed at all on this rank", NOT_SENT)
            if not is_close(found, twin):
                raise Failed(seen + "has moved elsewhere", OTHER_STEP)


def can_be_used(mine):
    """it returns an optimizer, and a step goes through"""
    owned = list(new(Plain).parameters())
    optimizer = mine(owned, torch.optim.SGD, lr=0.1)
    give_gradients(owned, 0)
    optimizer.step()


def steps_like_adamw(mine):
    """AdamW: all values are those of the optimizer without shards, on all ranks"""
    options = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    follow(mine, torch.optim.AdamW, options)


def skips_frozen_parameters(mine):
    """frozen parameters stay as they are"""
    follow(mine, torch.optim.AdamW, {"lr": 0.03}, build=TiedAndFrozen)


def zeroes_all_gradients(mine):
    """zero_grad() resets the gradients of all parameters, and not only of a rank's own"""
    owned = list(new(Plain).parameters())
    optimizer = mine(owned, torch.optim.SGD, lr=0.1)
    give_gradients(owned, 0)
    optimizer.zero_grad()
    if any(each.grad is not None and each.grad.any() for each in owned):
        means = "param_groups has only the parameters that this rank steps"
        raise Failed("some parameters still have their gradient", means)


def shares_the_state_out(mine):
    """the optimizer state is shared out: no rank keeps that of a parameter that another keeps"""
    owned = [nn.Parameter(torch.ones(16, 16)) for _ in range(8)]
    optimizer = mine(owned, torch.optim.AdamW, lr=0.01)
    give_gradients(owned, 0)
    optimizer.step()
    # A class may keep its own anywhere, and the state of slices that it has cut.
    states = [state for local in alive(torch.optim.AdamW) for state in local.state.values()]
    held = held_bytes(state["exp_avg"] for state in states)
    whole = sum(parameter.nbytes for parameter in owned)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, held)
    seen = ", ".join(f"{each / whole:.0%}" for each in of_ranks)
    seen = f"of AdamW's state the ranks keep {seen}"
    if not whole <= sum(of_ranks) <= 1.01 * whole:  # slices may be padded
        raise Failed(seen, "every rank steps all parameters, or some have no owner or several")
    if max(of_ranks) > 2 * whole / len(of_ranks):
        raise Failed(seen, "parameters are shared out unevenly")


def keeps_groups_apart(mine):
    """parameter groups with options of their own, and add_param_group() between two steps"""

    def groups(owned):
        return [{"params": owned[:3], "lr": 0.01, "weight_decay": 0.3}, {"params": owned[3:5]}]

    def change(optimizer, owned, step):
        if step == 2:
            optimizer.add_param_group({"params": owned[5:], "lr": 0.01})

    follow(mine, torch.optim.AdamW, {"lr": 0.03}, groups=groups, change=change)


def follows_a_scheduler(mine):
    """SGD with momentum, and a learning rate that changes in param_groups, as schedulers do it"""

    def change(optimizer, owned, step):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)

    follow(mine, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, change=change)


def takes_fewer_parameters_than_ranks(mine):
    """fewer parameters than ranks"""
    follow(mine, torch.optim.SGD, {"lr": 0.05}, groups=lambda owned: owned[:1])


COURSE = [can_be_used, steps_like_adamw, skips_frozen_parameters]
MEANING = [
    shares_the_state_out,
    keeps_groups_apart,
    follows_a_scheduler,
    takes_fewer_parameters_than_ranks,
    zeroes_all_gradients,
]
BEYOND = []
HAS_TO_HOLD = [*COURSE, *MEANING]
