"""05: send less, and see what it costs. Loss over time on two networks, by a calculated clock.

Stages 02 to 05 send every gradient of every step. On a slow network one sends less: numbers of 16
bits, or nothing for many steps and then the mean of the weights. Each gives something up. Here all
train one small transformer from the same weights, on the sources of Python's standard library.
`alone` never sends anything: what does not beat it should not communicate.

A loss needs no network, so each row trains once. From what it sends the script calculates how long
a batch takes on two networks:

    make 05_bucketed/send_less NPROC=4                                      (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 4 05_bucketed/send_less/send_less.py

Over an emulated network it checks the clock: do batches take as long as calculated?

    make 05_bucketed/send_less NPROC=4 NETWORK=1gbit,1ms

Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019; Douillard et al., "DiLoCo",
2023.
"""

import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "compare"), str(ROOT)]

from bucketed import BucketedDDP, broadcast_from_rank_0


class RoundedDDP(BucketedDDP):
    """BucketedDDP, but buckets travel in bfloat16: half the bytes, and about three digits."""

    def _launch_ready(self):
        while self.waiting and self.ready.issuperset(self.waiting[0].parameters):
            bucket = self.waiting.pop(0)
            bucket.rounded = bucket.flat.bfloat16()
            work = dist.all_reduce(bucket.rounded, group=self.process_group, async_op=True)
            self.works.append(work)

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        if self.synchronizing:
            for bucket in self.buckets:
                bucket.flat.copy_(bucket.rounded)


class DiLoCo(nn.Module):
    """Let ranks train alone, and now and then average what they have learned.

    The mean change of the ranks' weights, with its sign turned, is the gradient of an outer SGD
    with Nesterov momentum. With lr=1 and momentum=0 the new weights are their mean: local SGD.
    Floating buffers, such as BatchNorm's statistics, become their mean.
    """

    def __init__(self, module: nn.Module, lr=0.7, momentum=0.9, process_group=None):
        super().__init__()
        broadcast_from_rank_0(module, process_group)
        self.module = module
        self.process_group = process_group  # the ranks that train together; None: all of them
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self.tensors = [*module.parameters(), *buffers]
        weights = sum(parameter.numel() for parameter in module.parameters())
        self.shared = self.flat()[:weights]  # the weights as of the last average
        self.outer = torch.optim.SGD([self.shared], lr, momentum, nesterov=momentum > 0)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def flat(self) -> torch.Tensor:
        """Return a copy of all weights, and after them of the buffers, in one flat tensor."""
        return torch.cat([tensor.detach().flatten() for tensor in self.tensors])

    @torch.no_grad()
    def average(self) -> None:
        """Take the outer step from the weights of the last average, the same on all ranks."""
        mean = self.flat() / dist.get_world_size(self.process_group)
        dist.all_reduce(mean, group=self.process_group)
        weights = mean[: len(self.shared)]  # the rest are buffers
        self.shared.grad = self.shared - weights
        self.outer.step()
        weights.copy_(self.shared)
        pieces = mean.split([tensor.numel() for tensor in self.tensors])
        for tensor, piece in zip(self.tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))  # and so it keeps its dtype


def loss_of(model: nn.Module, batch: tuple) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def train(model: nn.Module, optimizer, batches: list) -> None:
    """Take a step for each batch; after the last one DiLoCo averages the weights."""
    for batch in batches:
        loss_of(model, batch).backward()
        if isinstance(model, BucketedDDP):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(model, DiLoCo):
        model.average()


class Row(NamedTuple):
    """What wraps a module, and what it sends in so many batches, after which DiLoCo averages."""

    wrap: Callable
    batches: int
    calls: int
    bytes_of_a_weight: int


ROWS = {
    "alone": Row(nn.Sequential, 20, 0, 0),
    "every step": Row(BucketedDDP, 20, 20, 4),
    "bfloat16": Row(RoundedDDP, 20, 20, 2),
    "local SGD": Row(partial(DiLoCo, lr=1.0, momentum=0.0), 20, 1, 4),
    "DiLoCo": Row(DiLoCo, 50, 1, 4),
}
NETWORKS = {  # bytes per second, and seconds of one way
    "100mbit,1ms": (12.5e6, 0.001),
    "1gbit,1ms": (125e6, 0.001),
}
COMPUTING = 0.06  # seconds that the computing of a batch counts as


def seconds_of_a_batch(found: dict, rate: float, delay: float) -> float:
    """Return how long a batch takes on a network, with so many "calls", and "bytes" in them.

    A ring all-reduce takes 2(n-1) steps of two delays each, and 2(n-1)/n of the bytes. Nothing
    hides it, because the only bucket is full when backward ends.
    """
    ranks = dist.get_world_size()
    steps = 2 * (ranks - 1)
    return COMPUTING + found["calls"] * steps * 2 * delay + steps / ranks * found["bytes"] / rate


# ==================================================================================================
# Below this line: the text, the race, the table, the picture.

import medians
import numpy

from common import report, setup
from common.ladder import LanguageModel

MODEL = {"d_model": 128, "d_ff": 512, "layers": 2, "heads": 4, "vocabulary": 256}
CONTEXT = 64  # tokens of a sequence; a batch is one, so gradients are noisy
HELD_OUT = 64  # sequences
COLORS = ["black", "#332288", "#56B4E9", "#E69F00", "#D55E00"]


def read_text() -> list[torch.Tensor]:
    """Return the bytes of the standard library's sources, and those of every tenth, held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [file for i, file in enumerate(files) if i % 10], files[::10]
    joined = [bytearray(b"\n".join(file.read_bytes() for file in part)) for part in parts]
    return [torch.frombuffer(text, dtype=torch.uint8) for text in joined]


def draw_batch(text: torch.Tensor, sequences: int, generator: torch.Generator) -> tuple:
    """Return tokens int64 [sequences, CONTEXT] from random places, and the token after each."""
    starts = torch.randint(len(text) - CONTEXT, (sequences, 1), generator=generator)
    tokens = text[starts + torch.arange(CONTEXT + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def race(name: str, text, held_out: tuple, args, seed: int, sleep: float = 0.0) -> dict:
    """Train on as many batches as --seconds have room for if nothing is sent.

    Returns the losses after so many "batches". And of a batch on average: its "calls", the "bytes"
    in them, and the seconds that it took "here".
    """
    row = ROWS[name]
    torch.manual_seed(seed)
    module = LanguageModel(**MODEL)
    model = row.wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), args.lr, (0.9, 0.99), fused=True)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    batches = []
    losses = []
    here = 0.0
    count = 0
    while count < args.seconds / COMPUTING:
        drawn = [draw_batch(text, 1, generator) for _ in range(row.batches)]
        start = time.perf_counter()
        time.sleep(sleep * row.batches)
        with setup.network():
            train(model, optimizer, drawn)
        here += time.perf_counter() - start
        count += row.batches
        with torch.no_grad():
            loss = loss_of(module, held_out) / dist.get_world_size()  # of this rank's share
        dist.all_reduce(loss)
        batches.append(count)
        losses.append(loss.item())
    weights = sum(parameter.numel() for parameter in module.parameters())
    return {
        "batches": batches,
        "losses": losses,
        "calls": row.calls / row.batches,
        "bytes": row.calls * weights * row.bytes_of_a_weight / row.batches,
        "here": here / count,
    }


def race_all(args) -> list[dict]:
    """Let all rows race, once with each seed; return {row: what race() found} for each.

    On an emulated network a batch sleeps for what it lacks of COMPUTING.
    """
    text, held_out = read_text()
    generator = torch.Generator().manual_seed(dist.get_rank())
    held_out = draw_batch(held_out, HELD_OUT // dist.get_world_size(), generator)
    network = setup.network()
    sleep = 0.0
    if network.text:
        network.connect(network.text)  # without a stretch: ranks sleep more than they compute
        sleep = max(0.0, COMPUTING - race("alone", text, held_out, args, 0)["here"])
    races = []
    for seed in range(args.seeds):
        races.append({})
        for name in ROWS:
            setup.progress(f"seed {seed}: {name}")
            races[-1][name] = race(name, text, held_out, args, seed, sleep)
    return races


def losses_after(batches: float, name: str, races: list[dict]) -> list[float]:
    """Return the row's loss after so many batches, for each seed; nan before the first is known."""
    points = [(one[name]["batches"], one[name]["losses"]) for one in races]
    return [numpy.interp(batches, *each, left=numpy.nan) for each in points]


def print_races(races: list[dict], network: str, speed: tuple, seconds: float) -> None:
    """Print how far each row comes on a network, and what a batch takes."""
    most = seconds / COMPUTING
    rows = []
    for name, found in races[0].items():
        a_batch = seconds_of_a_batch(found, *speed)
        reached = seconds / a_batch
        row = [name, f"{1000 * a_batch:.1f}", f"{1000 * found['here']:.1f}", f"{reached:.0f}"]
        row += [medians.cell(losses_after(count, name, races)) for count in (reached, most)]
        rows.append(row)
    header = [network, "ms a batch", "here", f"batches in {seconds:g} s", "loss"]
    report.print_table([*header, f"after {most:.0f} batches"], rows)
    setup.say()


def draw(races: list[dict], seconds: float, path: Path) -> None:
    """Draw the median loss of the held-out text over time, each network in a panel of its own."""
    figure, axes = report.new_figure(10, 4.5)
    axes.remove()
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, (network, speed) in zip(panels, NETWORKS.items(), strict=True):
        for (name, found), color in zip(races[0].items(), COLORS, strict=True):
            batches = numpy.array(found["batches"])
            losses = numpy.median([one[name]["losses"] for one in races], axis=0)
            times = batches * seconds_of_a_batch(found, *speed)
            style = "--" if name == "alone" else "-"
            axes.plot(times, losses, style, color=color, linewidth=2, label=name)
        axes.set(title=network, xlabel="seconds, calculated", xlim=(0, seconds), ylim=(2.2, 3.0))
    panels[0].set_ylabel("loss of held-out text")
    panels[0].legend(frameon=False)
    report.save_figure(figure, path)


def main():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--seconds", type=setup.positive_number, default=25.0, help="for each, by its own clock")
    add("--seeds", type=setup.whole_number(1), default=1, help="train each so many times")
    add("--lr", type=setup.positive_number, default=1.5e-3, help="learning rate of AdamW")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_plot_arguments(parser, "send_less.png")
    args = parser.parse_args()
    with setup.process_group("cpu", "gloo") as device:
        networks = NETWORKS
        emulated = setup.network().text
        if emulated:
            networks = {emulated: setup.network().speed}
        result = report.begin("05_bucketed/send_less", args, device)
        result["races"] = race_all(args)
        for network, speed in networks.items():
            print_races(result["races"], network, speed, args.seconds)
        setup.say(
            "ms a batch: calculated, and measured here; loss: of held-out text. With several\n"
            "seeds: the median, the lowest and the highest."
        )
        if args.plot and setup.is_rank_0() and not emulated:
            draw(result["races"], args.seconds, args.plot)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
