r"""05: how long does a step of 02 to 05 take? Predicted from four measurements, and measured.

What an all-reduce costs alone (o for the call, 1/w for each byte), how long it keeps a processor
busy, when each gradient is there in a step that sends nothing, and what the optimizer takes. From
these `simulate` plays a step, call after call. No step that communicates goes in; those are
measured beside.

    make 05_bucketed/predict NPROC=2                                    (see also ARGS="--help")
    make 05_bucketed/predict NETWORK=1gbit,1ms
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

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent / "compare"), str(FOLDER.parent.parent)]

from strategies import (
    AFTER_BACKWARD,
    COLORS,
    ONE_BY_ONE,
    WHEN_READY,
    Strategy,
    fill_buckets,
    strategies,
    train_step,
)

from common import ladder, report, setup, timing
from common.ladder import NO_COMMUNICATION, Way


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


def simulate(calls: list, backward_ends: float, strategy: Strategy, network: Network) -> list:
    """Return when each all-reduce is launched, begins and arrives, in seconds from a step's begin.

    `calls`: (bytes, when the gradients are there without communication) of each, in launch order.
    They send their bytes in that order, one after another; o passes beside those of others. Two
    calls at once take o and the bytes of both, as on the emulated network.
    """
    places = [0.0] * network.calls_at_once  # when each is free for another call
    network_is_free = late = 0.0
    one_by_one = strategy.launches == ONE_BY_ONE
    call_seconds = network.blocking_call_seconds if one_by_one else network.call_seconds
    arrived = backward_ends
    spans = []
    for size, ready in calls:
        launched = {WHEN_READY: ready + late, AFTER_BACKWARD: backward_ends, ONE_BY_ONE: arrived}
        launched = launched[strategy.launches]
        if strategy.launches == WHEN_READY:
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


class Alone(NamedTuple):
    """A step that sends nothing, in seconds from its begin, and what calls cost beside it."""

    gradients: list[nn.Parameter]  # from the last to the first
    ready: list[float]  # when each is there on the last rank
    forward_ends: float
    backward_ends: float
    optimizer: float  # seconds that it takes
    network: Network

    def step(self, strategy: Strategy) -> float:
        """Return the seconds of a step that sends, as simulated."""
        calls = calls_of(self.gradients, self.ready, strategy.bucket_size_mb)
        _, _, arrived = simulate(calls, self.backward_ends, strategy, self.network)[-1]
        return max(arrived, self.backward_ends) + self.optimizer


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

    candidates = {"small": partial(all_reduces, small), "large": partial(all_reduces, large)}
    candidates |= {"call": partial(blocking, small), "transfer": partial(blocking, large)}
    samples = timing.measure(candidates, steps=7, warmup=2)

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
    # A call waits for the last rank. All begin a step together, so their times compare.
    keys = ("ready", "forward_ends", "backward_ends", "optimizer_seconds")
    moments = [numpy.max(rows[0][key], axis=0) for key in keys]
    moments = [numpy.median(each, axis=0).tolist() for each in moments]
    network = measure_network(device)
    result["all_reduce"] = network._asdict()
    return Alone(gradients, *moments, network)


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


# ==================================================================================================
# Below this line: the picture, the page, and main.


def draw(alone: Alone, path: Path) -> None:
    """Draw the time from each gradient's arrival until backward ends; the last layer's on top."""
    figure, axes = report.new_figure(7, 2.8)
    forward, backward = 1000 * alone.forward_ends, 1000 * alone.backward_ends
    axes.barh(-14, forward, 10, color=COLORS["forward"], label="forward")
    axes.barh(-14, backward - forward, 10, forward, color=COLORS["backward"], label="backward")
    rows = range(len(alone.ready))
    ready = [1000 * moment for moment in alone.ready]
    lengths = [backward - moment for moment in ready]
    label = "gradient complete: its all-reduce can overlap"
    axes.barh(rows, lengths, 1, ready, color=COLORS["all-reduce"], label=label)
    axes.set_yticks([-14, 0, rows[-1]], ["computes", "last layer", "first layer"])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.legend(loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    report.save_figure(figure, path)


def write_page(alone: Alone, result: dict, path: Path) -> None:
    """Write the page step.html with these measurements instead of those that stand in it."""
    sizes = [parameter.nbytes for parameter in alone.gradients]
    data = alone._asdict()
    data["gradients"] = list(zip(sizes, data.pop("ready"), strict=True))
    data["tokens"] = result["model"]["batch_size"] * result["model"]["context_length"]
    network, ranks = data.pop("network"), result["world_size"]
    data["processor_per_call"] = network.processor_per_call
    # That of a byte sent: for each of the gradients' a rank sends 2(n-1)/n.
    data["processor_per_byte"] = network.processor_per_byte / max(1, 2 * (ranks - 1) / ranks)
    page = (FOLDER / "step.html").read_text(encoding="utf-8")
    page = re.sub("const DATA = .*", f"const DATA = {json.dumps(data)};", page, count=1)
    path.write_text(page, encoding="utf-8")


def main():
    parser = setup.Parser(__doc__)
    ladder.add_training_arguments(parser, steps=6)
    parser.set_defaults(json=str(setup.ROOT / "results" / "predict.json"))
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("05_bucketed/predict", args, device)
        stages = strategies(ladder.BUCKET_SIZE_MB).items()
        alone = measure_beside(args, device, {name: each.wrap for name, each in stages}, result)
        result["predicted"] = {name: alone.step(strategy) for name, strategy in stages}
        print_predicted(result)
        report.write_json(args.json, result)
    if args.json and setup.is_rank_0():
        draw(alone, args.json.with_name("gradients.png"))
        write_page(alone, result, args.json.with_name("step.html"))


if __name__ == "__main__":
    main()
