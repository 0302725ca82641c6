r"""05: send less, and see what it costs. Loss over time, on a network as slow as you like.

Stages 02 to 05 send every gradient of every step. On a slow network one sends less: numbers of 16
bits, matrices of a low rank, the sum of several batches, or nothing for many steps and then the
mean of the weights. Each gives something up. Here all train one small transformer from the same
weights, on the sources of Python's standard library, for the same time. `alone` never sends
anything: what does not beat it should not communicate.

    make 05_bucketed/send_less NPROC=4 NETWORK=100mbit,1ms                  (see also ARGS="--help")
    make 05_bucketed/send_less NPROC=4 NETWORK=1gbit,1ms
    torchrun --standalone --nproc-per-node 4 01_allreduce/slow_network/over.py 1gbit,1ms \
        05_bucketed/send_less/send_less.py

Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019; Vogels et al., "PowerSGD",
2019; Douillard et al., "DiLoCo", 2023.
"""

import json
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
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
FOLDERS = [FOLDER.parent, FOLDER.parent / "compare", ROOT / "01_allreduce" / "slow_network", ROOT]
sys.path[:0] = [str(folder) for folder in FOLDERS]

from bucketed import BucketedDDP, LanguageModel, broadcast_from_rank_0


class RoundedDDP(BucketedDDP):
    """BucketedDDP, but buckets travel in bfloat16: half the bytes, and about three digits."""

    def _launch_ready(self):
        while self.waiting and self.ready.issuperset(self.waiting[0].views):
            bucket = self.waiting.pop(0)
            bucket.rounded = bucket.flat.bfloat16()
            self.works.append(dist.all_reduce(bucket.rounded, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        if self.synchronizing:
            for bucket in self.buckets:
                bucket.flat.copy_(bucket.rounded)


class DiLoCo:
    """Let ranks train alone, and now and then average what they have learned.

    The mean change of the ranks' weights, with its sign turned, is the gradient of an outer SGD
    with Nesterov momentum. With lr=1 and momentum=0 the new weights are their mean: local SGD.
    """

    def __init__(self, module: nn.Module, lr: float = 0.7, momentum: float = 0.9):
        broadcast_from_rank_0(module, None)
        self.module = module
        self.shared = parameters_to_vector(module.parameters()).detach()  # as of the last average
        self.outer = torch.optim.SGD([self.shared], lr, momentum, nesterov=momentum > 0)

    def average(self) -> None:
        """Take the outer step from the weights of the last average, the same on all ranks."""
        local = parameters_to_vector(self.module.parameters()).detach()
        self.shared.grad = (self.shared - local) / dist.get_world_size()
        dist.all_reduce(self.shared.grad)
        self.outer.step()
        # A copy, because the parameters become views of it.
        vector_to_parameters(self.shared.clone(), self.module.parameters())


def power_sgd_ddp(module: nn.Module, min_compression_rate: float = 2.0, rank: int = 4):
    """Return torch's DDP, which sends two thin factors of each matrix instead of the matrix.

    What they miss is added to the next gradient. The first ten steps send everything.
    """
    model = DistributedDataParallel(module, bucket_cap_mb=1000)  # one: calls of two could mix
    state = power_sgd.PowerSGDState(None, rank, 10, min_compression_rate)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)
    return model


def loss_of(model: nn.Module, batch: tuple) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def train_alone(model: nn.Module, optimizer, batches: list) -> None:
    """Take a step for each batch. Nothing is sent, unless torch's DDP does it within backward."""
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_together(model: BucketedDDP, optimizer, batches: list) -> None:
    """Take one step with the mean gradient of all batches of all ranks."""
    with model.no_sync():
        for batch in batches[:-1]:
            (loss_of(model, batch) / len(batches)).backward()
    (loss_of(model, batches[-1]) / len(batches)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()


def train_apart(diloco: DiLoCo, optimizer, batches: list) -> None:
    """Train alone on all batches, then average."""
    train_alone(diloco.module, optimizer, batches)
    diloco.average()


class Candidate(NamedTuple):
    """What wraps a module, and what trains it in one turn, on so many batches of each rank."""

    wrap: Callable
    train: Callable
    batches: int = 1
    lr: float = 1.5e-3


CANDIDATES = {
    "alone": Candidate(lambda module: module, train_alone, 20),
    "every step": Candidate(BucketedDDP, train_together),
    "bfloat16": Candidate(RoundedDDP, train_together),
    "PowerSGD": Candidate(power_sgd_ddp, train_alone),
    "every 8 batches": Candidate(BucketedDDP, train_together, 8, 4e-3),
    "local SGD": Candidate(partial(DiLoCo, lr=1.0, momentum=0.0), train_apart, 20),
    "DiLoCo": Candidate(DiLoCo, train_apart, 50),
}

# ==================================================================================================
# Below this line: the text, the clock, the table, the picture.

import numpy
from network import wire

from common import report, setup

MODEL = {"d_model": 128, "d_ff": 512, "layers": 2, "heads": 4, "vocabulary": 256}
CONTEXT = 64  # tokens of a sequence; a batch is one, so gradients are noisy
NOMINAL = 0.06  # seconds that a batch of `alone` counts as
SLICES = 12  # of the time; candidates take turns
COLORS = ["black", "#332288", "#56B4E9", "#117733", "#A6761D", "#E69F00", "#D55E00"]


def read_text() -> list[torch.Tensor]:
    """Return the bytes of the standard library's sources, and those of every tenth, held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if len(files) < 20:
        setup.fail(f"{folder} does not hold the sources of Python's standard library")
    parts = [file for i, file in enumerate(files) if i % 10], files[::10]
    joined = [bytearray(b"\n".join(file.read_bytes() for file in part)) for part in parts]
    return [torch.frombuffer(text, dtype=torch.uint8) for text in joined]


def draw_batch(text: torch.Tensor, sequences: int, generator: torch.Generator) -> tuple:
    """Return tokens int64 [sequences, CONTEXT] from random places, and the token after each."""
    starts = torch.randint(len(text) - CONTEXT, (sequences, 1), generator=generator)
    tokens = text[starts + torch.arange(CONTEXT + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


class Racer:
    """A candidate's model and optimizer, the batches of this rank, and a clock."""

    def __init__(self, candidate: Candidate, text: torch.Tensor, seed: int):
        torch.manual_seed(seed)
        self.candidate = candidate
        self.module = LanguageModel(**MODEL)
        self.model = candidate.wrap(self.module)
        parameters = self.module.parameters()
        self.optimizer = torch.optim.AdamW(parameters, candidate.lr, (0.9, 0.99), fused=True)
        self.text = text
        self.generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        self.turn = NOMINAL * candidate.batches  # seconds of the last one, on the clock
        self.clock = self.sent = 0.0  # seconds; bytes that this rank has sent
        self.batches = 0
        self.curve = []  # [seconds, batches, loss of the held-out text]

    def train(self) -> float:
        """Take a turn on the network; returns seconds of this machine, the mean of the ranks."""
        count = self.candidate.batches
        batches = [draw_batch(self.text, 1, self.generator) for _ in range(count)]
        start = time.perf_counter()
        with wire:
            self.candidate.train(self.model, self.optimizer, batches)
        self.batches += count
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds)
        for call in wire.spans:
            transfer, _ = wire.cost(call.name, call.size_bytes, dist.get_world_size())
            self.sent += transfer / wire.stretch * wire.network.rate
        wire.spans.clear()
        return seconds.item() / dist.get_world_size()


def race(args) -> dict:
    """Train all in slices of time, in turn; returns {name: its curve, and bytes sent}.

    A batch of `alone` counts as NOMINAL seconds, on any machine at any load. What it has really
    taken in its slice says how far time is stretched: the network's, and all clocks.
    """
    text, held_out = read_text()
    held_out = draw_batch(held_out, 128, torch.Generator().manual_seed(0))
    racers = {name: Racer(each, text, args.seed) for name, each in CANDIDATES.items()}
    wire.pace = racers["alone"].turn
    for goal in numpy.linspace(0, args.seconds, SLICES + 1)[1:]:
        for name, racer in racers.items():
            setup.progress(f"{goal:.0f} of {args.seconds:.0f} s: {name}")
            while racer.batches == 0 or racer.clock + racer.turn / 2 < goal:
                seconds = racer.train()
                if name == "alone":  # its turn takes as long as NOMINAL says, by definition
                    wire.keep_pace(seconds)
                else:
                    racer.turn = seconds / wire.stretch
                racer.clock += racer.turn
            with torch.no_grad():
                loss = loss_of(racer.module, held_out).item() if setup.is_rank_0() else 0.0
            racer.curve.append([racer.clock, racer.batches, loss])
            dist.barrier()
    pace = f"One pace: a batch of alone counts as {NOMINAL:g} s"
    setup.say(f"{pace}, so a second took {wire.stretch:.2f} s here at the end")
    return {name: {"curve": each.curve, "sent": each.sent} for name, each in racers.items()}


def print_race(found: dict) -> None:
    """Print a row for each: batches, what a rank sent, loss at the end, and at equal batches."""
    same = min(each["curve"][-1][1] for each in found.values())
    rows = []
    for name, each in found.items():
        _, batches, losses = zip(*each["curve"], strict=True)
        at_same = numpy.interp(same, batches, losses)
        sent = f"{each['sent'] / 2**20:.1f}"
        rows.append([name, str(batches[-1]), sent, f"{losses[-1]:.3f}", f"{at_same:.3f}"])
    report.print_table(["", "batches", "MB sent", "loss", f"after {same} batches"], rows)
    setup.say("batches, MB sent: of a rank; loss: of held-out text, at the end, and at that number")


def draw(results: list[dict], path: Path) -> None:
    """Draw the loss of the held-out text over time, each result in a panel of its own."""
    figure, axes = report.new_figure(5 * len(results), 4)
    axes.remove()
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, result in zip(panels, results, strict=True):
        for (name, each), color in zip(result["race"].items(), COLORS, strict=True):
            seconds, _, losses = zip(*each["curve"], strict=True)
            style = "--" if name == "alone" else "-"
            width = 2.5 if name in ("alone", "every step", "DiLoCo") else 1
            axes.plot(seconds, losses, style, color=color, linewidth=width, label=name)
        axes.set_title(result["network"])
        axes.set_xlabel("seconds")
    panels[0].set_ylabel("loss of held-out text")
    panels[-1].legend(frameon=False)
    report.save_figure(figure, path)


def main():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--seconds", type=setup.positive_number, default=40.0, help="for each, by its own clock")
    add("--seed", type=setup.whole_number(0), default=0)
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    a_file = setup.checked(Path, Path.is_file, "a file")
    add("--beside", type=a_file, metavar="FILE", help="another run's --json, for the picture")
    setup.add_plot_arguments(parser, "send_less.png")
    args = parser.parse_args()
    if not wire.network:
        setup.fail("start it over a network: over.py 100mbit,1ms send_less.py")
    with setup.process_group("cpu", "gloo") as device:
        result = report.begin("05_bucketed/send_less", args, device)
        result["race"] = race(args)
        print_race(result["race"])
        if args.plot and setup.is_rank_0():
            others = [json.loads(args.beside.read_text())] if args.beside else []
            draw([*others, result], args.plot)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
