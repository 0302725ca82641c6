"""08: an embedding table on every trainer, under DDP, to compare with one on servers.

ddp_rpc.py --tables trains the same model in three ways. Here are two of them: a replica of the
table whose gradient is dense, as large as the table, and one whose gradient is sparse, only the
rows that a batch has looked up. And here are the table of results and the picture.
"""

import copy
import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS = [300, 1000, 3000, 10_000, 30_000, 100_000]
WAYS = {
    "dense": "DDP, dense gradients",
    "sparse": "DDP, sparse gradients",
    "servers": "parameter servers",
}


class TableAndNet(nn.Module):
    """Looks up the table's rows, and passes each bag's sum through the dense net."""

    def __init__(self, table: nn.EmbeddingBag, net: nn.Sequential):
        super().__init__()
        self.table, self.net = table, net

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.net(self.table(indices, offsets).reshape(-1, self.net[0].in_features))


class Replica:
    """Trains copies of a table and of a dense net on this trainer, with DDP and SGD."""

    def __init__(self, weights: torch.Tensor, net: nn.Sequential, lr: float, sparse: bool):
        table = nn.EmbeddingBag.from_pretrained(weights.clone(), False, mode="sum", sparse=sparse)
        self.device = net[0].weight.device
        model = TableAndNet(table, copy.deepcopy(net)).to(self.device)
        # Without a view DDP would hold a dense gradient twice, here and in its bucket.
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=not sparse)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def train(self, batch: tuple) -> tuple[torch.Tensor, int]:
        """Take one step; return its loss, and the bytes of all parameters and gradients."""
        indices, offsets, targets = [tensor.to(self.device) for tensor in batch]
        loss = F.cross_entropy(self.model(indices, offsets), targets)
        loss.backward()
        parameters = list(self.model.parameters())
        held = bytes_of(parameters) + bytes_of(parameter.grad for parameter in parameters)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), held


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes all these have, of a sparse one its rows and their numbers."""
    total = 0
    for tensor in tensors:
        if tensor.is_sparse:
            total += tensor._indices().nbytes + tensor._values().nbytes
        else:
            total += tensor.nbytes
    return total


# ==================================================================================================
# Below this line: what the master prints and draws of the sizes that were measured.

COLORS = ["#D55E00", "#009E73", "#0072B2"]
LEGEND = """\
ms: of a step, p50 over all trainers; MB (2^20 bytes): of the table, and of the parameters and
gradients that a trainer holds. dense, sparse: DDP with a replica of the table on each trainer."""


def megabytes(size: dict) -> float:
    """Return the MB of the whole table, of float32."""
    return 4 * size["rows"] * size["columns"] / 2**20


def p50_ms(size: dict, way: str) -> float:
    """Return the median of a step in ms, over all trainers."""
    return 1000 * numpy.median(size[way]["seconds"])


def print_sizes(sizes: list[dict]) -> None:
    """Print a row of the table for each size, trained in three ways."""
    from common.report import print_table
    from common.setup import say

    rows = []
    for size in sizes:
        cells = [f"{size['rows']:,}", f"{megabytes(size):.1f}"]
        for way in WAYS:
            cells += [f"{p50_ms(size, way):.1f}", f"{numpy.median(size[way]['bytes']) / 2**20:.1f}"]
        rows.append(cells)
    header = ["rows", "MB", "dense, ms", "MB", "sparse, ms", "MB", "servers, ms", "MB"]
    print_table(header, rows)
    say(LEGEND)


def crossing(sizes: list[dict], one: str, other: str) -> float | None:
    """Return the number of rows from which on one way takes longer than the other.

    It lies between two sizes, on straight lines between their logarithms. None: there is none.
    """
    ratios = [math.log(p50_ms(size, one) / p50_ms(size, other)) for size in sizes]
    for (before, after), (low, high) in zip(pairwise(sizes), pairwise(ratios), strict=True):
        if low <= 0 < high:
            growth = after["rows"] / before["rows"]
            return before["rows"] * growth ** (low / (low - high))
    return None


def draw(sizes: list[dict], path: Path | None) -> None:
    """Say and draw, where there is a path, how long a step takes by the rows of the table."""
    from common.report import new_figure, save_figure
    from common.setup import say

    figure, axes = new_figure(8, 5)
    rows = [size["rows"] for size in sizes]
    for (way, label), color in zip(WAYS.items(), COLORS, strict=True):
        times = [p50_ms(size, way) for size in sizes]
        axes.loglog(rows, times, "o-", color=color)
        axes.annotate(f"  {label}", (rows[-1], times[-1]), color=color, va="center")
    where = crossing(sizes, "dense", "servers")
    if where:
        rounded = float(f"{where:.2g}")
        text = f"From {rounded:,.0f} rows on\ndense gradients\ntake longer than servers."
        say(text.replace("\n", " "))
        axes.axvline(where, color="gray", linestyle=":")
        top_left = {"ha": "right", "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(0.9 * where, 0.97, text, **top_left)
    axes.set_xticks(rows, [f"{size['rows']:,}\n{megabytes(size):.1f} MB" for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="rows and size of the table", ylabel="a step, ms (log scales)")
    if path:
        save_figure(figure, path)
