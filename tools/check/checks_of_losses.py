"""Is a loss the mean over equally many samples? Only then is it the mean of the ranks' losses.

The batch: what batch(n) beside it returns, tensors of n rows; or cross_entropy's, with 10 classes.
"""

import torch
import torch.distributed as dist
from torch import nn

from common.setup import without_gloo_greeting
from tools.check.findings import UNUSABLE, Failed

SUMMED = "a sum over samples, not a mean: divide it by the number of samples"
SCALED = "; if it divides by what all ranks add up, multiply it by the number of ranks"
UNEVEN = "a weighted mean: divide by the mean of all ranks' weights (docs/everyday.md, which loss?)"
MEETS = "a loss across samples: gather all ranks' outputs, with gradient (docs/everyday.md)"
PARAMETERS = "; its parameters ({}) then get N times their gradient on N ranks: divide it by N"


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 10), torch.randint(10, (n,))


def loss_and_gradient(loss, tensors) -> tuple[torch.Tensor, torch.Tensor]:
    first = tensors[0].detach().clone().requires_grad_()
    value = loss(first, *tensors[1:])
    return value.detach(), torch.autograd.grad(value, first)[0]


def can_be_used(mine):
    """it takes cross_entropy's batch, or that of batch(n); it returns a number with a gradient"""
    loss, make_batch = mine
    tensors = make_batch(64)
    value = loss(*tensors)
    if value.numel() != 1 or not value.isfinite() or value != loss(*tensors):
        seen = "it does not return one finite number, the same whenever it is called"
        raise Failed(f"{seen} (a function batch(n) may give it another batch)", UNUSABLE)
    loss_and_gradient(loss, tensors)


def is_the_mean_of_its_shares(mine):
    """the mean over the ranks, each with its share, is the loss of the batch; so are gradients"""
    loss, make_batch = mine
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    box = [make_batch(16 * ranks)]
    dist.broadcast_object_list(box)
    [tensors] = box
    share = [tensor[rank::ranks] for tensor in tensors]
    pairs = [None] * ranks
    dist.all_gather_object(pairs, loss_and_gradient(loss, share))
    # From here on each rank is alone, because a loss may call other ranks itself.
    dist.destroy_process_group()
    with without_gloo_greeting():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    value, gradient = loss_and_gradient(loss, tensors)
    mean = sum(value for value, _ in pairs) / ranks
    found = torch.stack([gradient for _, gradient in pairs]).flatten(1)  # a row per share
    whole = torch.stack([gradient[rank::ranks] for rank in range(ranks)]).flatten(1)
    apart = (found / ranks - whole).norm() / whole.norm()
    if apart > 1e-4 or abs(mean - value) > 1e-4 * abs(value):
        seen = f"the mean is {mean:.4g}, and not {value:.4g}; the gradient is off by {apart:.0%}"
        raise Failed(seen, explain(loss, found, whole))


def explain(loss, found: torch.Tensor, whole: torch.Tensor) -> str:
    """Return what it means that the gradients of shares, a row each, are not the whole's."""
    ranks = len(found)
    # In a sum divided by one number a share's gradient is a multiple of the whole's.
    factors = (found * whole).sum(1) / whole.square().sum(1)
    off = (found - factors[:, None] * whole).norm(dim=1)
    if (off < 1e-4 * found.norm(dim=1)).all():
        inverses = (1 / factors).sum()
        if abs(inverses - ranks) < 1e-4:
            return SUMMED + SCALED
        if abs(inverses - 1) < 1e-5:
            return UNEVEN
    if not isinstance(loss, nn.Module):
        return MEETS
    names = [name for name, _ in loss.named_parameters()]
    return MEETS + PARAMETERS.format(", ".join(names)) if names else MEETS


RANKS = 4  # two may have as many samples that count
COURSE = []
MEANING = [can_be_used, is_the_mean_of_its_shares]
BEYOND = []
