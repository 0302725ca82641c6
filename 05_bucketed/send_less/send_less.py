r"""05: send less, and see what it costs. Loss over time, on any network, by a calculated clock.

Stages 02 to 05 send every gradient of every step. On a slow network one sends less: numbers of 16
bits, matrices of a low rank, the sum of several batches, or nothing for many steps and then the
mean of the weights. Each gives something up. Here all train one small transformer from the same
weights, on the sources of Python's standard library. `alone` never sends anything: what does not
beat it should not communicate.

A loss needs no network, so each candidate trains once, and the script notes what it sends. From
that it calculates when each loss would be reached, on as many networks as you like:

    make 05_bucketed/send_less NPROC=4                                      (see also ARGS="--help")
    make 05_bucketed/send_less NPROC=4 ARGS="--networks 10mbit,20ms 5gbit,0 --seeds 3"
    torchrun --standalone --nproc-per-node 4 05_bucketed/send_less/send_less.py

Over the emulated network it checks the clock: some train there, with batches as long as calculated.

    make 05_bucketed/send_less NPROC=4 NETWORK=1gbit,1ms

Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019; Vogels et al., "PowerSGD",
2019; Douillard et al., "DiLoCo", 2023.
"""

import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from bucketed import BucketedDDP, broadcast_from_rank_0
from slow_network import Speed, read_network


class RoundedDDP(BucketedDDP):
    """BucketedDDP, but buckets travel in bfloat16: half the bytes, and about three digits."""

    def _launch_ready(self):
        while self.waiting and self.ready.issuperset(self.waiting[0].views):
            bucket = self.waiting.pop(0)
            bucket.rounded = bucket.flat.bfloat16()
            work = dist.all_reduce(bucket.rounded, group=self.process_group, async_op=True)
            self.works.append(work)

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

    def __init__(self, module: nn.Module, lr=0.7, momentum=0.9, process_group=None):
        broadcast_from_rank_0(module, process_group)
        self.module = module
        self.process_group = process_group  # the ranks that train together; None: all of them
        self.shared = parameters_to_vector(module.parameters()).detach()  # as of the last average
        self.outer = torch.optim.SGD([self.shared], lr, momentum, nesterov=momentum > 0)

    def average(self) -> None:
        """Take the outer step from the weights of the last average, the same on all ranks."""
        local = parameters_to_vector(self.module.parameters()).detach()
        self.shared.grad = (self.shared - local) / dist.get_world_size(self.process_group)
        dist.all_reduce(self.shared.grad, group=self.process_group)
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


def diloco_on_one_rank(module: nn.Module) -> DiLoCo:
    """Return DiLoCo in a group of this rank alone: its outer optimizer without an average."""
    group, _ = dist.new_subgroups(group_size=1)
    return DiLoCo(module, process_group=group)


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
    besides: float = 0.0  # seconds of the processor that a batch takes more than `every step`


CANDIDATES = {
    "alone": Candidate(lambda module: module, train_alone, 20),
    "every step": Candidate(BucketedDDP, train_together),
    "bfloat16": Candidate(RoundedDDP, train_together),
    "PowerSGD": Candidate(power_sgd_ddp, train_alone, besides=0.008),
    "every 8 batches": Candidate(BucketedDDP, train_together, 8, 4e-3),
    "local SGD": Candidate(partial(DiLoCo, lr=1.0, momentum=0.0), train_apart, 20),
    "DiLoCo": Candidate(DiLoCo, train_apart, 50),
    "DiLoCo on one rank": Candidate(diloco_on_one_rank, train_apart, 50),
}


class Point(NamedTuple):
    """How far a candidate has come: its batches, its all-reduces, their bytes, and the loss."""

    batches: int
    calls: int
    size_bytes: int
    loss: float


def clock(point: Point, candidate: Candidate, network: Speed, ranks: int) -> float:
    """Return the seconds after which a candidate has come so far on a network.

    A ring all-reduce takes 2(n-1) steps of two delays each, and 2(n-1)/n of the bytes. Nothing
    hides it, because the only bucket is full when backward ends.
    """
    steps = 2 * (ranks - 1)
    computing = point.batches * (NOMINAL + candidate.besides)
    delays = point.calls * steps * 2 * network.delay
    return computing + delays + steps / ranks * point.size_bytes / network.rate


# ==================================================================================================
# Below this line: the text, the race, the table, the picture.

import medians
import numpy

from common import report, setup
from common.ladder import LanguageModel

MODEL = {"d_model": 128, "d_ff": 512, "layers": 2, "heads": 4, "vocabulary": 256}
CONTEXT = 64  # tokens of a sequence; a batch is one, so gradients are noisy
HELD_OUT = 64  # sequences
NOMINAL = 0.06  # seconds that the computing of a batch counts as
EVERY = 20  # batches, or a turn: then the loss is taken
CHECKED = ["alone", "every step", "PowerSGD", "local SGD"]  # over the emulated network
COLORS = ["black", "#332288", "#56B4E9", "#117733", "#A6761D", "#E69F00", "#D55E00", "#999999"]


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


@contextmanager
def noted_calls() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each all-reduce of several ranks."""
    calls, all_reduce = [], dist.all_reduce

    def note(tensor, *arguments, group=None, **options):
        if dist.get_world_size(group) > 1:
            calls.append(tensor.nbytes)
        return all_reduce(tensor, *arguments, group=group, **options)

    dist.all_reduce = note
    yield calls
    dist.all_reduce = all_reduce


def race(candidate: Candidate, text, held_out: tuple, args, seed: int, sleep: float) -> dict:
    """Train until --seconds have passed on every network, by the calculated clock.

    Returns "points", and the seconds that a batch has taken of the "processor", and "here" in all.
    """
    torch.manual_seed(seed)
    module = LanguageModel(**MODEL)
    model = candidate.wrap(module)
    lr = args.lr_times * candidate.lr
    optimizer = torch.optim.AdamW(module.parameters(), lr, (0.9, 0.99), fused=True)
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    networks = [read_network(each) for each in args.networks]
    points, calls = [], []
    batches = processor = here = first_clock = 0
    while first_clock < args.seconds:
        if batches >= EVERY * len(points):
            with torch.no_grad():
                loss = loss_of(module, held_out) / ranks  # of this rank's share
            dist.all_reduce(loss)
            points.append(Point(batches, len(calls), sum(calls), loss.item()))
            first_clock = min(clock(points[-1], candidate, each, ranks) for each in networks)
        drawn = [draw_batch(text, 1, generator) for _ in range(candidate.batches)]
        processor -= time.process_time()
        here -= time.perf_counter()
        time.sleep(candidate.batches * sleep)
        with setup.network(), noted_calls() as of_turn:
            candidate.train(model, optimizer, drawn)
        processor += time.process_time()
        here += time.perf_counter()
        batches += candidate.batches
        calls += of_turn
    return {"points": points, "processor": processor / batches, "here": here / batches}


def race_all(args) -> list[dict]:
    """Let the candidates race, once with each seed; returns {candidate: what race() found}.

    Over the emulated network only some do, and a batch sleeps for what it lacks of NOMINAL.
    """
    text, held_out = read_text()
    generator = torch.Generator().manual_seed(dist.get_rank())
    held_out = draw_batch(held_out, HELD_OUT // dist.get_world_size(), generator)
    names, sleep = list(CANDIDATES), 0.0
    wire = setup.network()
    if wire.text:
        names, args.networks = CHECKED, [wire.text]
        wire.connect(wire.text)  # without a stretch, because ranks sleep more than they compute
        alone = race(CANDIDATES["alone"], text, held_out, args, 0, 0.0)
        sleep = max(0.0, NOMINAL - alone["here"])
    races = []
    for seed in range(args.seeds):
        found = {}
        for name in names:
            setup.progress(f"seed {seed}: {name}")
            found[name] = race(CANDIDATES[name], text, held_out, args, seed, sleep)
        races.append(found)
    return races


def seconds_on(network: str, name: str, points: list[Point]) -> list[float]:
    """Return the candidate's clock at each point."""
    link, ranks = read_network(network), dist.get_world_size()
    return [clock(point, CANDIDATES[name], link, ranks) for point in points]


def losses_of(name: str, races: list[dict]) -> list[list[float]]:
    """Return the losses at the points, for each seed."""
    return [[point.loss for point in found[name]["points"]] for found in races]


def print_races(races: list[dict], args) -> None:
    """Print how far each comes on every network, and what a batch takes."""
    same = min(each["points"][-1].batches for each in races[0].values())
    others = dist.get_world_size() - 1
    for network in args.networks:
        rows = []
        for name, each in races[0].items():
            batches, _, sizes, _ = zip(*each["points"], strict=True)
            seconds = seconds_on(network, name, each["points"])
            reached = numpy.interp(args.seconds, seconds, batches)
            sent = 2 * others / (others + 1) * numpy.interp(args.seconds, seconds, sizes)
            losses = losses_of(name, races)
            ends = [numpy.interp(args.seconds, seconds, of_seed) for of_seed in losses]
            at_same = [numpy.interp(same, batches, of_seed) for of_seed in losses]
            cells = [f"{reached:.0f}", f"{sent / 2**20:.1f}", medians.cell(ends)]
            times = seconds[-1] / batches[-1], each["here"], each["processor"]
            cells += [medians.cell(at_same), *[f"{1000 * one:.1f}" for one in times]]
            rows.append([name, *cells])
        header = [network, "batches", "MB sent", "loss", f"after {same} batches"]
        report.print_table([*header, "ms a batch", "here", "processor"], rows)
        setup.say()
    setup.say(
        f"batches, MB sent: of a rank in {args.seconds:g} s; loss: of held-out text, then;\n"
        "ms a batch: calculated; here, processor: of this machine's time and of its processor.\n"
        "Losses of several seeds: the median, the lowest and the highest."
    )


def draw(races: list[dict], args, path: Path) -> None:
    """Draw the median loss of the held-out text over time, each network in a panel of its own."""
    networks = args.networks
    figure, axes = report.new_figure(5 * len(networks), 4.5)
    axes.remove()
    panels = figure.subplots(1, len(networks), sharex=True, sharey=True, squeeze=False)[0]
    for axes, network in zip(panels, networks, strict=True):
        for (name, each), color in zip(races[0].items(), COLORS, strict=True):
            losses = numpy.median(losses_of(name, races), axis=0)
            style = "--" if name == "alone" else "-"
            width = 2.5 if name in ("alone", "every step", "local SGD") else 1
            look = {"color": color, "linewidth": width, "label": name}
            axes.plot(seconds_on(network, name, each["points"]), losses, style, **look)
        link = read_network(network)
        mbits = 8e-6 * link.rate
        rate = f"{mbits:g} Mbit/s" if mbits < 1000 else f"{mbits / 1000:g} Gbit/s"
        axes.set_title(f"{rate}, {1000 * link.delay:g} ms")
        axes.set_xlabel("seconds, calculated")
    panels[0].set_ylabel("loss of held-out text")
    panels[0].set_xlim(0, args.seconds)
    lowest = min(point.loss for each in races[0].values() for point in each["points"])
    panels[0].set_ylim(0.97 * lowest, 1.35 * lowest)
    legend = axes.get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=4, frameon=False)
    report.save_figure(figure, path)


def main():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    a_network = setup.checked(str, read_network, "a network, as 1gbit,1ms")
    networks = ["100mbit,1ms", "1gbit,1ms"]
    add("--networks", type=a_network, nargs="+", default=networks, help="rate, delay of one way")
    add("--seconds", type=setup.positive_number, default=25.0, help="for each, by its own clock")
    add("--seeds", type=setup.whole_number(1), default=1, help="train each so many times")
    add("--lr-times", type=setup.positive_number, default=1.0, help="of every learning rate")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_plot_arguments(parser, "send_less.png")
    args = parser.parse_args()
    with setup.process_group("cpu", "gloo") as device:
        result = report.begin("05_bucketed/send_less", args, device)
        races = result["races"] = race_all(args)
        print_races(races, args)
        if args.plot and setup.is_rank_0() and not setup.network().text:
            draw(races, args, args.plot)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
