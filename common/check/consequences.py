"""The table of common/docs/wrong.md: what training with each wrong class looks like.

python common/check/consequences.py
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common import setup  # noqa: E402
from common.check import mistakes, runner  # noqa: E402

FILE = Path(__file__).with_name("mistakes.py")


class Classifier(nn.Module):
    """Of 64 pixels. Two weights are tied, a buffer is used, ranks go through two layers in turn."""

    def __init__(self, mistake: str):
        super().__init__()
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.left.weight
        self.last = nn.Linear(64, 10)
        self.register_buffer("scale", torch.full((), 0.2))
        self.only_rank_0 = None
        if mistake == "SkipsUnused":  # needs a layer that one rank uses alone
            self.only_rank_0 = nn.Linear(10, 10)
        if mistake == "FailsWhenFrozen":
            self.right.requires_grad_(False)

    def forward(self, x, rank):
        layers = [self.left, self.right] if rank % 2 == 0 else [self.right, self.left]
        x = self.scale * x
        for layer in [*layers, self.tied]:
            x = layer(x).tanh()
        x = self.last(x)
        return self.only_rank_0(x) if self.only_rank_0 and rank == 0 else x


def consequences(mistake) -> list[str]:
    """does the loss fall, are the ranks equal, are the weights those of one process?"""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *_ = setup.load_images(None, False)

    def build(seed):
        torch.manual_seed(seed)
        model = Classifier(mistake.__name__).double()
        model.scale *= 1 + seed
        return model

    def loss_of(model, batch, rank):
        share = batch[rank::world_size]
        return F.cross_entropy(model(images[share], rank), labels[share])

    twin = build(0)
    model = mistake(build(rank))
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    optimizers = [sgd(net.parameters()) for net in (twin, model)]
    losses = []
    for batches in torch.arange(60 * 2 * 60).view(60, 2, 60):  # two micro-batches in every step
        for batch in batches:
            for other in range(world_size):
                (loss_of(twin, batch, other) / world_size).backward()
            loss = loss_of(model, batch, rank)
            loss.backward()
            model.finish_gradient_synchronization()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    falls = losses[-1] < losses[0] / 2
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    expected = nn.utils.parameters_to_vector(twin.parameters())
    of_ranks = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(of_ranks, mine)
    are_equal = all(torch.equal(each, mine) for each in of_ranks)
    is_same = (mine - expected).norm() < 1e-10 * expected.norm()
    return [
        "falls" if falls else "does not",
        "equal" if are_equal else "differ",
        "equal" if is_same else "differ",
    ]


def row(name: str) -> str:
    """The first cells of a row; "-" where an error or a hang ends the run."""
    result = runner.run(consequences, f"{FILE}:{name}", 2, "gloo", limit=20)
    cells = ["-", "-", "-"] if result["verdict"] == "failed" else result["seen"].split("; ")
    return f"| `{name}` | {' | '.join(cells)} |"


def main():
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what the ranks then have
    for wrapper in [mistakes.Right, *mistakes.WRAPPERS]:
        setup.say(row(wrapper.__name__))


if __name__ == "__main__":
    main()
