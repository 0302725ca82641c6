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

from rows import (
    AFTER_BACKWARD,
    COLORS,
    ONE_BY_ONE,
    WHEN_READY,
    Row,
    fill_buckets,
    rows_of_stages,
    train_step,
)
from users_class import load

from common import ladder, report, setup, timing
from common.ladder import BUCKET_SIZE_MB, NO_COMMUNICATION, TORCH_DDP, Way


class Network(NamedTuple):
    """What an all-reduce costs: o, and a second for each w bytes; so many are under way at once.

    One that is waited for before the next is launched has an o of its own, and one that is under
    way during backward takes processor time from it.
    """

    call_seconds: float
    bytes_per_second: float
    calls_at_once: int = 1
    blocking_call_seconds: float = 0.0
    processor_per_call: float = 0.0  # seconds
    processor_per_byte: float = 0.0


def simulate(calls: list, backward_ends: float, row: Row, network: Network) -> list:
    """Return when each all-reduce is launched, begins and arrives, in seconds from a step's begin.

    `calls`: (bytes, when the gradients are there without communication) of each, in launch order.
    They send their bytes in that order, one after another; o passes beside those of others. Two
    calls at once, as gloo's two threads make them, take o and the bytes of both.
    """
    places = [0.0] * network.calls_at_once  # when each is free for another call
    network_is_free = late = 0.0
    one_by_one = row.launches == ONE_BY_ONE
    call_seconds = network.blocking_call_seconds if one_by_one else network.call_seconds
    arrived = backward_ends
    spans = []
    for size, ready in calls:
        launched = {WHEN_READY: ready + late, AFTER_BACKWARD: backward_ends, ONE_BY_ONE: arrived}
        launched = launched[row.launches]
        if row.launches == WHEN_READY:
            late += network.processor_per_call + size * network.processor_per_byte
        begins = max(launched, places.pop(0), network_is_free)
        network_is_free = begins + size / network.bytes_per_second
        arrived = network_is_free + call_seconds
        behind = network_is_free - begins  # a call in the other place keeps it for these bytes, too
        places = [free + behind if free > begins else free for free in places] + [arrived]
        spans.append((launched, begins, arrived))
    return spans


def calls_of(gradients: list[nn.Parameter], ready: list[float], bucket_size_mb: float | None):
    """Return the calls for `simulate` of gradients, the last layer's first, cut by size."""
    moments = dict(zip(gradients, ready, strict=True))
    buckets = fill_buckets(gradients, bucket_size_mb)  # with 0 MB each has one
    return [(sum(p.nbytes for p in each), max(moments[p] for p in each)) for each in buckets]


def calls_of_torch(gradients, ready: list[float], bucket_size_mb: float | None, rebuilt=True):
    """Return those of torch's DDP, for gradients of one dtype: a full bucket has reached the size.

    By default that is 1 MB for the first and 25 for others. After its first step torch fills them
    as gradients come; if some may be unused, in the order of the model, and sends the last first.
    """
    order = list(zip(gradients, ready, strict=True))
    order = sorted(order, key=lambda pair: pair[1]) if rebuilt else order[::-1]
    calls = []
    size, limit = 0, 0  # of the last bucket
    for parameter, moment in order:
        if size >= limit:
            calls.append((0, 0.0))
            default = 25 if len(calls) > 1 else 1
            limit = (bucket_size_mb or default) * 2**20
        size, last = calls[-1]
        size += parameter.nbytes
        calls[-1] = size, max(last, moment)
    return calls if rebuilt else calls[::-1]


class Alone(NamedTuple):
    """A step that sends nothing, in seconds from its begin, and what calls cost beside it."""

    gradients: list[nn.Parameter]  # from the last to the first
    ready: list[float]  # when each is there on the last rank
    forward_ends: float
    backward_ends: float
    optimizer: float  # seconds that it takes
    network: Network
    rebuilt: bool = True  # torch's buckets, after the first step
    buffers: tuple[int, ...] = ()  # bytes of each broadcast before a forward of torch's DDP

    def step(self, row: Row) -> float:
        """Return the seconds of a step that sends, as simulated."""
        calls = calls_of(self.gradients, self.ready, row.bucket_size_mb)
        _, _, arrived = simulate(calls, self.backward_ends, row, self.network)[-1]
        return max(arrived, self.backward_ends) + self.optimizer

    def step_of_torch(self, bucket_size_mb: float | None, network: Network) -> tuple:
        """Return the seconds of a step of torch's DDP, and of these the exposed ones."""
        calls = calls_of_torch(self.gradients, self.ready, bucket_size_mb, self.rebuilt)
        during = Row(None, bucket_size_mb, WHEN_READY)
        _, _, arrived = simulate(calls, self.backward_ends, during, network)[-1]
        exposed = max(0.0, arrived - self.backward_ends)
        for size in self.buffers:  # a broadcast has half of the messages of an all-reduce
            exposed += network.blocking_call_seconds / 2 + size / network.bytes_per_second
        return self.backward_ends + self.optimizer + exposed, exposed


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
        watch.mark("start")
        processor = time.process_time()
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        processor = (time.process_time() - processor) * ranks_per_core / emulated.stretch
        watch.mark("end")
        times = {"seconds": watch.seconds("start", "end"), "processor": processor}
        return {name: seconds / len(tensors) for name, seconds in times.items()}

    def blocking(tensors: list[torch.Tensor]) -> dict[str, float]:
        watch.mark("start")
        for tensor in tensors:
            dist.all_reduce(tensor)
        watch.mark("end")
        return {"seconds": watch.seconds("start", "end") / len(tensors)}

    calls = {"small": partial(all_reduces, small), "large": partial(all_reduces, large)}
    calls |= {"call": partial(blocking, small), "transfer": partial(blocking, large)}
    samples = timing.measure(calls, steps=7, warmup=2)

    def median(size: str, quantity: str) -> float:
        return float(numpy.median(samples[size][quantity]))

    call_seconds = median("call", "seconds")
    transfer = max(median("transfer", "seconds") - call_seconds, 1e-9)
    bytes_per_second = large[0].nbytes / transfer
    together = median("small", "seconds") * calls_at_once
    found = Network(together, bytes_per_second, calls_at_once, call_seconds)
    if device.type == "cuda":
        return found
    per_call = median("small", "processor")
    per_byte = max(0.0, median("large", "processor") - per_call) / large[0].nbytes
    return found._replace(processor_per_call=per_call, processor_per_byte=per_byte)


def alone_of(gradients: list[nn.Parameter], device, result: dict) -> Alone:
    """Return what `simulate` needs, of the first of the rows; measures the network for it.

    A call waits for the last rank. All begin a step together, so their times compare.
    """
    keys = ("ready", "forward_ends", "backward_ends", "optimizer_seconds")
    moments = [numpy.max(result["rows"][0][key], axis=0) for key in keys]
    moments = [numpy.median(each, axis=0).tolist() for each in moments]
    network = measure_network(device)
    result["all_reduce"] = network._asdict()
    return Alone(gradients, *moments, network)


def measure_beside(args, device, wrappers: dict, result: dict, in_turn=True) -> Alone:
    """Measure `no communication` and wrappers of one model: all in turn, or one after another.

    Puts what is measured into `result`, and returns what `simulate` needs.
    """
    result["model"] = ladder.describe(args)
    floor = ladder.language_trainee(Way(), train_step, args, device)
    watch, gradients = floor.watch, list(floor.module.parameters())[::-1]

    def alone() -> dict:
        """Train without sending; also says when each gradient is there."""
        hooks = [p.register_post_accumulate_grad_hook(watch.mark) for p in gradients]
        times = floor.step()
        for hook in hooks:
            hook.remove()
        times["forward_ends"] = watch.seconds("step starts", "forward ends")
        times["backward_ends"] = watch.seconds("step starts", "finish starts")
        return times | {"ready": [watch.seconds("step starts", p) for p in gradients]}

    def measure_group(group: dict, steps: dict) -> list[dict]:
        trainees = {}
        for name, wrap in group.items():
            trainees[name] = ladder.language_trainee(Way(wrap), train_step, args, device, floor)
        steps = steps | {name: each.step for name, each in trainees.items()}
        measured = ladder.benchmark(steps, args)
        for trainee in trainees.values():
            for hook in getattr(trainee.model, "hooks", []):  # they would keep it in memory
                hook.remove()
        return measured

    if in_turn:
        rows = measure_group(wrappers, {NO_COMMUNICATION: alone})
    else:
        rows = measure_group({}, {NO_COMMUNICATION: alone})
        for name, wrap in wrappers.items():
            rows += measure_group({name: wrap}, {})
    result["rows"] = rows
    return alone_of(gradients, device, result)


def print_predicted(result: dict) -> None:
    """Print each predicted step beside what was measured."""
    table = []
    for row in result["rows"][1:]:
        name, calls = row["name"], row["collectives"]
        measured = report.percentiles(row["step_seconds"])[0]
        predicted = result["predicted"][name]
        cells = [name, str(calls), f"{1000 * predicted:.1f}", f"{1000 * measured:.1f}"]
        table.append([*cells, f"{100 * (predicted / measured - 1):+.1f} %"])
    report.print_table(["step, ms", "all-reduces", "predicted", "measured", "error"], table)
    setup.say("measured: p50 of all steps of all ranks")


# A model of the user's own

AGAIN = "no communication again"
TORCH_DDP_MB = f"{TORCH_DDP}, {BUCKET_SIZE_MB:g} MB"
MOST_NOISE = 0.15  # of a step
NETWORKS = {"10gbit,50us": (10e9 / 8, 50e-6), "100gbit,10us": (100e9 / 8, 10e-6)}


def train_mine(model, loss_of, optimizer, watch, gradients=()) -> dict:
    """Train on the user's batch; return the times of the step, and when gradients are there."""
    hooks = [p.register_post_accumulate_grad_hook(watch.mark) for p in gradients]
    watch.mark("step starts")
    loss = loss_of(model)
    watch.mark("forward ends")
    loss.backward()
    watch.mark("backward ends")
    if hasattr(model, "finish_gradient_synchronization"):  # 05's
        model.finish_gradient_synchronization()
    watch.mark("optimizer starts")
    optimizer.step()
    optimizer.zero_grad()
    watch.mark("step ends")
    for hook in hooks:
        hook.remove()
    return {
        "step_seconds": watch.seconds("step starts", "step ends"),
        "forward_ends": watch.seconds("step starts", "forward ends"),
        "backward_ends": watch.seconds("step starts", "backward ends"),
        "optimizer_seconds": watch.seconds("optimizer starts", "step ends"),
        "ready": [watch.seconds("step starts", p) for p in gradients],
    }


def measure_mine(args, device, result: dict) -> Alone:
    """Measure the user's model without communication, twice, with torch's DDP, and with 05.

    Without communication it is torch's DDP of each rank alone, which copies into buckets, too.
    """
    torch.manual_seed(args.seed)
    try:
        with device:
            model, loss_of = load(args.mine)()
            loss_of(model).backward()
    except Exception as error:  # whatever the file does
        what = f"'{args.mine}' names no function that returns a model and a function of its loss"
        setup.fail(f"argument --mine: {what} ({error!r})")
    gradients = [p for p in model.parameters() if p.requires_grad][::-1]
    used = [p for p in gradients if p.grad is not None]
    model.zero_grad()
    rebuilt = len(used) == len(gradients)
    options = {"gradient_as_bucket_view": True, "find_unused_parameters": not rebuilt}
    torchs = partial(DistributedDataParallel, model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    train = partial(
        train_mine, loss_of=loss_of, optimizer=optimizer, watch=timing.Stopwatch(device)
    )
    with setup.without_gloo_greeting():
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = partial(train, torchs(process_group=groups[dist.get_rank()]), gradients=used)
    steps = {NO_COMMUNICATION: alone, AGAIN: alone}
    if len(groups) > 1:
        ours = rows_of_stages(BUCKET_SIZE_MB)["BucketedDDP"]
        steps[TORCH_DDP] = partial(train, torchs())
        steps[TORCH_DDP_MB] = partial(train, torchs(bucket_cap_mb=BUCKET_SIZE_MB))
        steps["BucketedDDP"] = partial(train, ours.wrap(model))
    before = timing.measure({NO_COMMUNICATION: alone}, steps=3, warmup=2)
    pace = float(numpy.median(before[NO_COMMUNICATION]["step_seconds"]))
    samples = timing.measure(ladder.at_one_pace(steps, pace), args.steps, args.warmup)
    ladder.warn_of_drift()
    result["rows"] = [{"name": name, **times} for name, times in samples.items()]
    found = alone_of(used, device, result)
    moments = dict(zip(used, found.ready, strict=True))
    ready = [moments.get(p, found.forward_ends) for p in gradients]
    buffers = {}
    for buffer in model.buffers():
        buffers[buffer.dtype] = buffers.get(buffer.dtype, 0) + buffer.nbytes
    buffers = tuple(buffers.values())
    return found._replace(gradients=gradients, ready=ready, rebuilt=rebuilt, buffers=buffers)


def print_errors(result: dict) -> None:
    """Print each predicted step, and its overhead, beside what was measured, and the noise."""
    p50 = {row["name"]: report.percentiles(row["step_seconds"])[0] for row in result["rows"]}
    floor = p50[NO_COMMUNICATION]
    noise = abs(p50[AGAIN] - floor)
    is_quiet = noise <= MOST_NOISE * floor
    table = []
    for name, step in result["predicted"].items():
        cells = [name]
        for less in (0.0, floor):
            predicted, measured = step - less, p50[name] - less
            error = "-"
            if is_quiet and noise < measured:
                error = f"{100 * (predicted / measured - 1):+.1f} %"
            cells += [f"{1000 * predicted:.1f}", f"{1000 * measured:.1f}", error]
        table.append(cells)
    header = ["step, ms", "predicted", "measured", "error", "overhead", "measured", "error"]
    report.print_table(header, table)
    setup.say(
        f"overhead: step − no communication, {1000 * floor:.1f} ms, and {1000 * p50[AGAIN]:.1f} ms "
        f"again:\nno prediction is better than this noise of {100 * noise / floor:.1f} %"
    )
    if not is_quiet:
        setup.say("warning: that is too much to judge predictions by: leave the machine alone")


def sent(ranks: int) -> float:
    """Return how often a rank sends its bytes in a ring."""
    return 2 * (ranks - 1) / ranks


def ring(ranks: int, rate: float, delay: float, here: Network, ranks_here: int) -> Network:
    """Return what calls cost in a ring; for bytes per second, and seconds. As step.html has it."""
    delays = 4 * (ranks - 1) * delay
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
    rows = []
    for name, (rate, delay) in networks.items():
        for ranks in (2, 8, 64):
            network = ring(ranks, rate, delay, alone.network, dist.get_world_size())
            sizes = [None, 1, 2, 5, 10, 50, 100, 1000]
            steps = {mb: alone.step_of_torch(mb, network) for mb in sizes}
            step, exposed = steps[None]
            best = min(steps, key=steps.get)
            row = {"network": name, "ranks": ranks, "step, ms": 1000 * step}
            row["exposed"] = 1000 * exposed
            row["speed-up"] = ranks * (alone.backward_ends + alone.optimizer) / step
            row["best cap, MB"] = best or "default"
            row["its step"] = 1000 * steps[best][0]
            rows.append(row)
    setup.say("\nCalculated from this device's step, for torch's DDP:")
    table = []
    for row in rows:
        cells = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()]
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
    ready = [1000 * moment for moment in alone.ready]
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
    sizes = [parameter.nbytes for parameter in alone.gradients]
    data = alone._asdict()
    data["gradients"] = list(zip(sizes, data.pop("ready"), strict=True))
    if mine := result["options"]["mine"]:
        data |= {"model": Path(mine).name, "unit": "batches", "batch": 1}
    else:
        model = result["model"]
        tokens = model["batch_size"] * model["context_length"]
        data |= {"model": model["size"], "unit": "tokens", "batch": tokens}
    network = data.pop("network")
    data["processor_per_call"] = network.processor_per_call
    # That of a byte sent.
    share = max(1, sent(result["world_size"]))
    data["processor_per_byte"] = network.processor_per_byte / share
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
                of_torch, _ = alone.step_of_torch(None, alone.network)
                with_mb, _ = alone.step_of_torch(BUCKET_SIZE_MB, alone.network)
                of_05 = alone.step(stages["BucketedDDP"])
                predicted = {TORCH_DDP: of_torch, TORCH_DDP_MB: with_mb, "BucketedDDP": of_05}
                result["predicted"] = predicted
                print_errors(result)
            result["calculated"] = calculate(alone)
        else:
            wrappers = {name: each.wrap for name, each in stages.items()}
            alone = measure_beside(args, device, wrappers, result)
            result["predicted"] = {name: alone.step(each) for name, each in stages.items()}
            print_predicted(result)
        report.write_json(args.json, result)
    if args.json and setup.is_rank_0():
        draw(alone, args.json.with_name("gradients.png"))
        write_page(alone, result, args.json.with_name("step.html"))


if __name__ == "__main__":
    main()
