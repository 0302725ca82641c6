r"""05: how long does a step of 02 to 05 take? Predicted from four measurements, and measured.

What an all-reduce costs alone (o for the call, 1/w for each byte), how long it keeps a processor
busy, when each gradient is there in a step that sends nothing, and what the optimizer takes. From
these `simulate` plays a step, call after call. No step that communicates goes in; those are
measured beside.

    make 05_bucketed/predict NPROC=2                                    (see also ARGS="--help")
    make 05_bucketed/predict NETWORK=1gbit,1ms
    make predict MINE=model.py:build NETWORK=1gbit,1ms                  (a model of your own)
    torchrun --standalone --nproc-per-node 2 05_bucketed/predict/predict.py

It leaves in results/: predict.json; gradients.png, when each gradient comes; and step.html, the
page where you change the network and the number of ranks, with your own gradients.

Source: Li et al., "PyTorch Distributed", VLDB 2020.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent / "compare"), str(FOLDER.parent.parent)]

from rows import COLORS, ONE_BY_ONE, WHEN_READY, Row, fill_buckets, rows_of_stages, train_step
from users_class import load

from common import ladder, report, setup, timing
from common.ladder import BUCKET_SIZE_MB, NO_COMMUNICATION, TORCH_DDP, Way


class Network(NamedTuple):
    """What an all-reduce costs: o, and a second for each w bytes."""

    call_seconds: float
    bytes_per_second: float
    calls_at_once: int = 1
    blocking_call_seconds: float = 0.0  # o of one that is waited for before the next is launched
    processor_per_call: float = 0.0  # seconds that one takes from backward, while it runs
    processor_per_byte: float = 0.0


def simulate(calls: list, backward_ends: float, launches: str, network: Network) -> list:
    """Return when each all-reduce is launched, begins and arrives, in seconds from a step's begin.

    `calls`: (bytes, when the gradients are there without communication) of each, in launch order.
    They send their bytes in that order, one after another; o passes beside those of others. Two
    calls at once, as gloo's two threads make them, take o and the bytes of both.
    """
    places = [0.0] * network.calls_at_once  # when each is free for another call
    network_is_free = 0.0
    late = 0.0
    arrived = backward_ends
    call_seconds = network.call_seconds
    if launches == ONE_BY_ONE:
        call_seconds = network.blocking_call_seconds
    spans = []
    for size, ready in calls:
        launched = backward_ends
        if launches == ONE_BY_ONE:
            launched = arrived
        elif launches == WHEN_READY:
            launched = ready + late
            late += network.processor_per_call + size * network.processor_per_byte
        begins = max(launched, places.pop(0), network_is_free)
        network_is_free = begins + size / network.bytes_per_second
        arrived = network_is_free + call_seconds
        behind = network_is_free - begins  # a call in the other place keeps it for these bytes, too
        places = [free + behind if free > begins else free for free in places]
        places.append(arrived)
        spans.append((launched, begins, arrived))
    return spans


def calls_of_buckets(buckets: list[list], ready: dict[nn.Parameter, float]) -> list[tuple]:
    """Return the calls for `simulate`: a bucket is there with the last of its gradients."""
    return [(sum(p.nbytes for p in each), max(ready[p] for p in each)) for each in buckets]


def calls_of(ready: dict[nn.Parameter, float], bucket_size_mb: float | None) -> list[tuple]:
    """Return the calls of 02 to 05; with 0 MB each gradient has one, with None all have one."""
    return calls_of_buckets(fill_buckets(list(ready), bucket_size_mb), ready)


def calls_of_torch(ready: dict, bucket_size_mb: float | None, rebuilt=True) -> list[tuple]:
    """Return those of torch's DDP, for gradients of one dtype: a full bucket has reached the size.

    By default that is 1 MB for the first and 25 for others. After its first step torch fills them
    as gradients come; if some may be unused, in the order of the model, and sends the last first.
    """
    order = sorted(ready, key=ready.get) if rebuilt else list(ready)[::-1]
    buckets = []
    size = limit = 0  # of the last bucket
    for parameter in order:
        if size >= limit:
            default = 25 if buckets else 1
            limit = (bucket_size_mb or default) * 2**20
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return calls_of_buckets(buckets if rebuilt else buckets[::-1], ready)


class Alone(NamedTuple):
    """A step that sends nothing, in seconds from its begin, and what calls cost beside it."""

    ready: dict[nn.Parameter, float]  # when each gradient is there on the last rank
    forward_ends: float
    backward_ends: float
    optimizer: float  # seconds that it takes
    network: Network
    unused: tuple[nn.Parameter, ...] = ()  # 05 takes them as zeros when backward is over
    buffers: tuple[int, ...] = ()  # bytes of each broadcast before a forward of torch's DDP

    @property
    def seconds(self) -> float:
        """Return how long it takes."""
        return self.backward_ends + self.optimizer

    def averaged(self, calls: list, launches: str, network: Network) -> float:
        """Return when backward is over and all calls have arrived."""
        _, _, arrived = simulate(calls, self.backward_ends, launches, network)[-1]
        return max(arrived, self.backward_ends)

    def step(self, row: Row) -> float:
        """Return the seconds of a step that sends, as simulated."""
        calls = calls_of(self.ready, row.bucket_size_mb)
        return self.averaged(calls, row.launches, self.network) + self.optimizer

    def step_of_torch(self, bucket_size_mb: float | None, network: Network) -> float:
        """Return those of torch's DDP, which knows what is unused when forward is over."""
        ready = self.ready | dict.fromkeys(self.unused, self.forward_ends)
        calls = calls_of_torch(ready, bucket_size_mb, rebuilt=not self.unused)
        exposed = self.averaged(calls, WHEN_READY, network) - self.backward_ends
        for size in self.buffers:  # a broadcast has half of the messages of an all-reduce
            exposed += network.blocking_call_seconds / 2 + size / network.bytes_per_second
        return self.seconds + exposed


def measure_network(device) -> Network:
    """Measure what all-reduces cost, blocking ones and those that are launched together.

    Where a GPU computes they take no processor time from backward.
    """
    emulated = setup.network()
    # gloo has two threads.
    calls_at_once = 2 if dist.get_backend() == "gloo" and not emulated.text else 1
    small = [torch.zeros(2**10, device=device) for _ in range(10)]
    large = [torch.zeros(2**21, device=device) for _ in range(2)]
    watch = timing.Stopwatch(device)
    # The ranks of a host share its cores: what one takes of them delays one with a part of a core.
    ranks_per_core = max(1.0, int(os.environ["LOCAL_WORLD_SIZE"]) / setup.cores())

    def all_reduces(tensors: list[torch.Tensor]) -> dict[str, float]:
        """Return the seconds of a call: together, one by one, and of a processor meanwhile."""
        watch.mark("start")
        processor_starts = time.process_time()
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        processor = (time.process_time() - processor_starts) * ranks_per_core / emulated.stretch
        watch.mark("together")
        for tensor in tensors:
            dist.all_reduce(tensor)
        watch.mark("one by one")
        return {
            "together": watch.seconds("start", "together") / len(tensors),
            "one by one": watch.seconds("together", "one by one") / len(tensors),
            "processor": processor / len(tensors),
        }

    rows = {"small": partial(all_reduces, small), "large": partial(all_reduces, large)}
    samples = timing.measure(rows, steps=7, warmup=2)

    def median(row: str, quantity: str) -> float:
        return float(numpy.median(samples[row][quantity]))

    blocking_call_seconds = median("small", "one by one")
    transfer = max(median("large", "one by one") - blocking_call_seconds, 1e-9)
    per_call = per_byte = 0.0
    if device.type == "cpu":
        per_call = median("small", "processor")
        per_byte = max(0.0, median("large", "processor") - per_call) / large[0].nbytes
    return Network(
        call_seconds=median("small", "together") * calls_at_once,
        bytes_per_second=large[0].nbytes / transfer,
        calls_at_once=calls_at_once,
        blocking_call_seconds=blocking_call_seconds,
        processor_per_call=per_call,
        processor_per_byte=per_byte,
    )


def step_alone(trainee: ladder.Trainee, gradients: list[nn.Parameter]) -> dict:
    """Take a step; return its times, when its parts end, and when each gradient is there."""
    watch = trainee.watch
    hooks = [p.register_post_accumulate_grad_hook(watch.mark) for p in gradients]
    times = trainee.step()
    for hook in hooks:
        hook.remove()
    times["forward_ends"] = watch.seconds("step starts", "forward ends")
    times["backward_ends"] = watch.seconds("step starts", "finish starts")
    times["ready"] = [watch.seconds("step starts", p) for p in gradients]
    return times


def alone_of(gradients: list[nn.Parameter], device, result: dict) -> Alone:
    """Return what `simulate` needs, of the first of the rows; measures the network for it.

    A call waits for the last rank. All begin a step together, so their times compare.
    """
    keys = ("ready", "forward_ends", "backward_ends", "optimizer_seconds")
    on_last_rank = [numpy.max(result["rows"][0][key], axis=0) for key in keys]
    ready, *others = [numpy.median(steps, axis=0).tolist() for steps in on_last_rank]
    network = measure_network(device)
    result["all_reduce"] = network._asdict()
    return Alone(dict(zip(gradients, ready, strict=True)), *others, network)


def measure_beside(args, device, groups: list[dict[str, Row]], result: dict) -> Alone:
    """Measure `no communication` and rows of one model: a group after the other, each in turn.

    Puts what is measured into `result`, and returns what `simulate` needs.
    """
    result["model"] = ladder.describe(args)
    floor = ladder.language_trainee(Way(), train_step, args, device)
    gradients = list(floor.module.parameters())[::-1]
    alone = {NO_COMMUNICATION: partial(step_alone, floor, gradients)}

    def measure_group(group: dict[str, Row], steps: dict) -> list[dict]:
        models = []
        for name, row in group.items():
            way = Way(row.wrap)
            trainee = ladder.language_trainee(way, train_step, args, device, beside=floor)
            models.append(trainee.model)
            steps[name] = trainee.step
        measured = ladder.benchmark(steps, args)
        for model in models:
            for hook in getattr(model, "hooks", []):  # they would keep it in memory
                hook.remove()
        return measured

    first, *others = groups
    result["rows"] = measure_group(first, alone)
    for group in others:
        result["rows"] += measure_group(group, {})
    return alone_of(gradients, device, result)


def compared(predicted: float, measured: float, noise: float = 0.0) -> list[str]:
    """Return cells of a table: both in ms, and the error, if more than noise was measured."""
    error = "-"
    if measured > noise:
        error = f"{100 * (predicted / measured - 1):+.1f} %"
    return [f"{1000 * predicted:.1f}", f"{1000 * measured:.1f}", error]


def print_predicted(result: dict) -> None:
    """Print each predicted step beside what was measured."""
    table = []
    for row in result["rows"][1:]:
        name = row["name"]
        measured = report.percentiles(row["step_seconds"])[0]
        cells = compared(result["predicted"][name], measured)
        table.append([name, str(row["collectives"]), *cells])
    report.print_table(["step, ms", "all-reduces", "predicted", "measured", "error"], table)
    setup.say("measured: p50 of all steps of all ranks")


# A model of the user's own

AGAIN = "no communication again"
TORCH_DDP_MB = f"{TORCH_DDP}, {BUCKET_SIZE_MB:g} MB"
MOST_NOISE = 0.15  # of a step
NETWORKS = {  # bytes per second, and seconds of one way
    "10gbit,50us": (1.25e9, 50e-6),
    "100gbit,10us": (12.5e9, 10e-6),
}


def load_mine(args, device) -> tuple:
    """Return the user's model, after a backward, and the function of its loss."""
    torch.manual_seed(args.seed)
    try:
        with device:
            model, loss_of = load(args.mine)()
            loss_of(model).backward()
    except Exception as error:  # whatever the file does
        what = f"'{args.mine}' names no function that returns a model and a function of its loss"
        setup.fail(f"argument --mine: {what} ({error!r})")
    return model, loss_of


class Mine(nn.Module):
    """A user's model that is called with the function of its loss."""

    def __init__(self, model: nn.Module, first: nn.Parameter):
        super().__init__()
        self.first = first  # of its parameters: the harness has a hook on that one
        self.model = model

    def forward(self, loss_of):
        return loss_of(self.model)


def train_mine(model, optimizer, loss_of, _):
    """Train on the user's batch."""
    model(loss_of).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()


def measure_mine(args, device, result: dict) -> Alone:
    """Measure the user's model without communication, twice, with torch's DDP, and with 05.

    Without communication it is torch's DDP of each rank alone, which copies into buckets, too.
    """
    model, loss_of = load_mine(args, device)
    used = [p for p in model.parameters() if p.grad is not None][::-1]
    module = Mine(model, first=used[-1])
    gradients = [p for p in module.parameters() if p.requires_grad][::-1]
    unused = tuple(set(gradients) - set(used))
    model.zero_grad()

    def trainee(wrap, beside=None) -> ladder.Trainee:
        found = ladder.Trainee(Way(wrap), module, train_mine, beside, lr=1e-4, fused=True)
        found.batch = loss_of, None
        return found

    options = {"gradient_as_bucket_view": True, "find_unused_parameters": bool(unused)}
    torchs = partial(DistributedDataParallel, **options)
    with setup.without_gloo_greeting():
        group, _ = dist.new_subgroups(1)
    floor = trainee(partial(torchs, process_group=group))
    alone = partial(step_alone, floor, used)
    steps = {NO_COMMUNICATION: alone, AGAIN: alone}
    if dist.get_world_size() > 1:
        ours = rows_of_stages(BUCKET_SIZE_MB)["BucketedDDP"]
        steps[TORCH_DDP] = trainee(torchs, floor).step
        steps[TORCH_DDP_MB] = trainee(partial(torchs, bucket_cap_mb=BUCKET_SIZE_MB), floor).step
        steps["BucketedDDP"] = trainee(ours.wrap, floor).step
    before = timing.measure({NO_COMMUNICATION: alone}, steps=3, warmup=2)
    pace = float(numpy.median(before[NO_COMMUNICATION]["step_seconds"]))
    samples = timing.measure(ladder.at_one_pace(steps, pace), args.steps, args.warmup)
    ladder.warn_of_drift()
    result["rows"] = [{"name": name, **times} for name, times in samples.items()]
    found = alone_of(used, device, result)
    buffers = Counter()
    for buffer in model.buffers():
        buffers[buffer.dtype] += buffer.nbytes
    ready = dict.fromkeys(gradients, found.backward_ends) | found.ready
    return found._replace(ready=ready, unused=unused, buffers=tuple(buffers.values()))


def print_errors(result: dict) -> None:
    """Print each predicted step, and its overhead, beside what was measured, and the noise."""
    p50 = {row["name"]: report.percentiles(row["step_seconds"])[0] for row in result["rows"]}
    floor, again = p50[NO_COMMUNICATION], p50[AGAIN]
    noise = abs(again - floor)
    is_quiet = noise <= MOST_NOISE * floor
    more_than = noise if is_quiet else torch.inf
    table = []
    for name, step in result["predicted"].items():
        cells = compared(step, p50[name], more_than)
        cells += compared(step - floor, p50[name] - floor, more_than)
        table.append([name, *cells])
    header = ["step, ms", "predicted", "measured", "error", "overhead", "measured", "error"]
    report.print_table(header, table)
    setup.say(
        f"overhead: step − no communication, {1000 * floor:.1f} ms, and {1000 * again:.1f} ms "
        f"again:\nno prediction is better than this noise of {100 * noise / floor:.1f} %"
    )
    if not is_quiet:
        setup.say("warning: that is too much to judge predictions by: leave the machine alone")


def sent(ranks: int) -> float:
    """Return how often a rank sends its bytes in a ring."""
    return 2 * (ranks - 1) / ranks


def ring(ranks: int, rate: float, message: float, here: Network, ranks_here: int) -> Network:
    """Return what calls cost in a ring, for bytes per second and seconds that each message waits.

    As step.html has it.
    """
    delays = 2 * (ranks - 1) * message
    return here._replace(
        call_seconds=1e-4 + delays,
        bytes_per_second=rate / sent(ranks),
        blocking_call_seconds=5e-4 + delays,
        processor_per_byte=here.processor_per_byte * sent(ranks) / max(1, sent(ranks_here)),
    )


def calculate(alone: Alone) -> list[dict]:
    """Print and return steps of torch's DDP on more ranks and networks than were measured."""
    networks = NETWORKS
    if text := setup.network().text:
        networks = {text: setup.network().speed} | networks
    # gloo's sender waits until the receiver has said that it is ready.
    delays = 2 if dist.get_backend() == "gloo" else 1
    rows = []
    for name, (rate, delay) in networks.items():
        for ranks in (2, 8, 64):
            network = ring(ranks, rate, delays * delay, alone.network, dist.get_world_size())
            steps = {None: alone.step_of_torch(None, network)}
            for mb in (1, 2, 5, 10, 50, 100, 1000):
                steps[mb] = alone.step_of_torch(mb, network)
            best = min(steps, key=steps.get)
            row = {
                "network": name,
                "ranks": ranks,
                "step, ms": 1000 * steps[None],
                "exposed": 1000 * (steps[None] - alone.seconds),
                "speed-up": ranks * alone.seconds / steps[None],
                "best cap, MB": best or "default",
                "its step": 1000 * steps[best],
            }
            rows.append(row)
    setup.say("\nCalculated from this device's step, for torch's DDP:")
    table = []
    for row in rows:
        cells = [row["network"], str(row["ranks"])]
        cells += [f"{row[name]:.0f}" for name in ("step, ms", "exposed")]
        cells += [f"{row['speed-up']:.2f}", str(row["best cap, MB"]), f"{row['its step']:.0f}"]
        table.append(cells)
    report.print_table(list(rows[0]), table)
    return rows


# ==================================================================================================
# Below this line: the picture, the page, and main.


def draw(alone: Alone, path: Path) -> None:
    """Draw when each gradient is there, and what is left of backward; the last layer's on top."""
    figure, axes = report.new_figure(7, 2.8)
    forward, backward = 1000 * alone.forward_ends, 1000 * alone.backward_ends
    rows = range(len(alone.ready))
    top, height = -len(rows) / 7, len(rows) / 10
    axes.barh(top, forward, height, color=COLORS["forward"], label="forward")
    length = backward - forward
    axes.barh(top, length, height, forward, color=COLORS["backward"], label="backward")
    ready = [1000 * moment for moment in alone.ready.values()]
    axes.hlines(rows, ready, backward, color="lightgray", lw=0.8, label="its call can overlap")
    color = COLORS["all-reduce"]
    axes.plot(ready, rows, "o", color=color, markersize=2.5, label="a gradient is complete")
    axes.set_yticks([top, 0, rows[-1]], ["computes", "last layer", "first layer"])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.legend(loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    report.save_figure(figure, path)


def write_page(alone: Alone, result: dict, path: Path) -> None:
    """Write the page step.html with these measurements instead of those that stand in it."""
    data = {
        "gradients": [(parameter.nbytes, moment) for parameter, moment in alone.ready.items()],
        "forward_ends": alone.forward_ends,
        "backward_ends": alone.backward_ends,
        "optimizer": alone.optimizer,
        "processor_per_call": alone.network.processor_per_call,
        # That of a byte sent.
        "processor_per_byte": alone.network.processor_per_byte / max(1, sent(result["world_size"])),
    }
    if mine := result["options"]["mine"]:
        data |= {"model": Path(mine).name, "unit": "batches", "batch": 1}
    else:
        model = result["model"]
        tokens = model["batch_size"] * model["context_length"]
        data |= {"model": model["size"], "unit": "tokens", "batch": tokens}
    page = (FOLDER / "step.html").read_text(encoding="utf-8")
    page = re.sub("const DATA = .*", lambda _: f"const DATA = {json.dumps(data)};", page, count=1)
    path.write_text(page, encoding="utf-8")


def main():
    parser = setup.Parser(__doc__)
    ladder.add_training_arguments(parser, steps=6)
    mine = "instead of --size: it returns a model, and a function of it that returns a loss"
    parser.add_argument("--mine", metavar="FILE.py:NAME", help=mine)
    parser.set_defaults(json=str(setup.ROOT / "results" / "predict.json"))
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("05_bucketed/predict", args, device)
        stages = rows_of_stages(BUCKET_SIZE_MB)
        if args.mine:
            alone = measure_mine(args, device, result)
            if result["world_size"] > 1:
                result["predicted"] = {
                    TORCH_DDP: alone.step_of_torch(None, alone.network),
                    TORCH_DDP_MB: alone.step_of_torch(BUCKET_SIZE_MB, alone.network),
                    "BucketedDDP": alone.step(stages["BucketedDDP"]),
                }
                print_errors(result)
            result["calculated"] = calculate(alone)
        else:
            alone = measure_beside(args, device, [stages], result)
            result["predicted"] = {name: alone.step(each) for name, each in stages.items()}
            print_predicted(result)
        report.write_json(args.json, result)
    if args.json and setup.is_rank_0():
        draw(alone, args.json.with_name("gradients.png"))
        write_page(alone, result, args.json.with_name("step.html"))


if __name__ == "__main__":
    main()
