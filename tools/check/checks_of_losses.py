"""Is a loss the mean over equally many samples? Only then is it the mean of the ranks' losses.

loss(*batch) is compared with the mean over the shares of 2 and of 4 ranks, in this process alone.
The batch is what batch(n) of the user's file returns, tensors with the samples first; without it
outputs float [n, 10] and targets int [n], as cross_entropy takes them.
"""

import torch

from tools.check.findings import UNUSABLE, Failed, ratio_of

SUMMED = "a sum over samples, not a mean: divide it by the number of samples"
UNEVEN = "a weighted mean: divide by the mean of all ranks' weights (docs/everyday.md, which loss?)"
MEETS = "a loss across samples: gather all ranks' outputs, with gradient (docs/everyday.md)"


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 10), torch.randint(10, (n,))


def loss_and_gradient(loss, tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a batch; the gradient is that of its first tensor."""
    first = tensors[0].detach().clone().requires_grad_()
    value = loss(first, *tensors[1:])
    return value.detach(), torch.autograd.grad(value, first)[0]


def can_be_used(mine):
    """it takes the batch, and returns one number that has a gradient"""
    try:
        compare(*mine, 1)
    except Exception as error:  # whatever it does
        hint = "a function batch(n) beside it returns what it takes"
        raise Failed(f"{type(error).__name__}: {error} ({hint})", UNUSABLE) from error


def is_the_mean_of_its_shares(mine):
    """the mean over the shares of 2 ranks, and of 4, is the loss of the batch; so are gradients"""
    compare(*mine, 2)
    compare(*mine, 4)


def compare(loss, make_batch, ranks: int) -> None:
    torch.manual_seed(0)
    tensors = make_batch(64)
    value, gradient = loss_and_gradient(loss, tensors)
    wholes = [gradient[rank::ranks] for rank in range(ranks)]
    shares = [[tensor[rank::ranks] for tensor in tensors] for rank in range(ranks)]
    values, gradients = zip(*(loss_and_gradient(loss, share) for share in shares), strict=True)
    mean, found = sum(values) / ranks, torch.cat(gradients) / ranks
    apart = ((found - torch.cat(wholes)).norm() / gradient.norm()).item()
    if apart < 1e-4 and abs(mean - value) <= 1e-4 * abs(value):
        return
    seen = f"it is {mean:.4g}, not {value:.4g}; the gradient is off by {apart:.0%} of its size"
    # In a sum that is divided by one number, each share's gradient is a multiple of the whole's.
    factors = [ratio_of(own, whole) for own, whole in zip(gradients, wholes, strict=True)]
    lines = zip(gradients, factors, wholes, strict=True)
    is_sum = all((own - factor * whole).norm() < 1e-4 * own.norm() for own, factor, whole in lines)
    if is_sum and max(factors) < 1.0001:
        raise Failed(seen, SUMMED)
    is_mean = abs(sum(1 / factor for factor in factors) - 1) < 1e-5
    raise Failed(seen, UNEVEN if is_sum and is_mean else MEETS)


COURSE, BEYOND = [], []
MEANING = [can_be_used, is_the_mean_of_its_shares]
