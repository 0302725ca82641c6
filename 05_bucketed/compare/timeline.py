"""05: one training step of each stage on one time axis, as torch.profiler recorded it.

    make timeline                       (on an emulated network of 1 Gbit/s and 1 ms, to be seen)
    make timeline NETWORK=              (between the ranks of this machine, or GPUs, as they are)
    torchrun --standalone --nproc-per-node 2 05_bucketed/compare/timeline.py --network 1gbit,1ms

`no communication` and stages 02 to 05 train in turn in one process group, because the machine's
speed changes from second to second; three steps of each are profiled in each of three rounds. The
one of median length is drawn: what computes above, what is sent below, in two rows, because gloo
sends two messages at a time. Beside the picture lie one of each stage alone, on the same axis, and
the traces, with the emulated network's calls, for chrome://tracing and ui.perfetto.dev.
"""

import json
import math
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path[:0] = [str(ROOT), str(FOLDER)]

from compare import BucketedDDP, FlatDDP, OverlapDDP, naive_ddp  # noqa: E402

from common import setup, timing  # noqa: E402

STAGES = {
    "no communication": lambda module: module,
    "02_naive_ddp": naive_ddp.NaiveDDP,
    "03_flat_ddp": FlatDDP,
    "04_overlap_ddp": OverlapDDP,
    "05_bucketed": lambda module: BucketedDDP(module, bucket_size_mb=5.0),
}
ROUNDS = 3
PHASES = ["forward", "backward", "sync", "optimizer"]
WAITING = "waiting for what is in flight"
PACKING = "pack, unpack"
COLORS = {"forward": "#56B4E9", "backward": "#0072B2", PACKING: "#009E73"}
COLORS |= {WAITING: "#F0E442", "optimizer": "#999999", "all-reduce": "#D55E00"}
CALL = "dist.all_reduce"  # names of events in a trace: the call, which may wait or not
CLOCK = "time.monotonic() = "
GLOO = "gloo:all_reduce"
ALL_REDUCES = (GLOO, "ncclDevKernel", "ncclKernel")  # what their names begin with
NOTE = "one profiled step: its times differ from the tables', which are medians of unprofiled steps"


class Step(NamedTuple):
    """One training step: all times in ms from its start."""

    phases: list[tuple[str, float, float]]  # key of COLORS, start and end of each, in order
    all_reduces: list[tuple[float, float, int]]  # start, end, thread or CUDA stream

    def duration(self) -> float:
        return self.phases[-1][2]

    def in_words(self) -> str:
        count = len(self.all_reduces)
        return "1 all-reduce" if count == 1 else f"{count} all-reduces"


def training(wrapper, size: str, device: torch.device):
    """A model of its own, and the function that trains it for a step."""
    *shape, batch_size, context_length = setup.SIZES[size]
    with device:
        model = wrapper(naive_ddp.LanguageModel(*shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = timing.Stopwatch(device)
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length), device=device)
    return model, lambda: naive_ddp.train_step(model, optimizer, watch, tokens, targets)


def record(args, device: torch.device) -> tuple[list[dict], list[str]]:
    """Profile all stages in turn, rank 0's steps: the traces, and what 05's buckets hold."""
    trained = {name: training(wrapper, args.size, device) for name, wrapper in STAGES.items()}
    steps = {name: step for name, (_, step) in trained.items()}
    all_reduce = dist.all_reduce

    def all_reduce_with_a_label(*arguments, **options):
        with record_function(CALL):
            return all_reduce(*arguments, **options)

    dist.all_reduce = all_reduce_with_a_label
    traces = []
    with setup.on_the_network():
        for number in range(1, ROUNDS + 1):
            setup.progress(f"round {number} of {ROUNDS}")
            for step in steps.values():
                step()
            file = args.plot.with_name(f"timeline_{number}.json")
            timing.profile({"clock": show_clock, **steps}, file)
            if dist.get_rank() == 0:
                traces.append(json.loads(file.read_text()))
                if args.network:
                    add_network(traces[-1], setup.slow_network().wire.spans)
                    file.write_text(json.dumps(traces[-1]))
    wrapper = trained["05_bucketed"][0]
    names = {parameter: name for name, parameter in wrapper.module.named_parameters()}
    return traces, [contents([names[p] for p in bucket.parameters]) for bucket in wrapper.buckets]


def show_clock() -> None:
    """Leave the time in the trace: the emulated network's times are by this clock."""
    with record_function(f"{CLOCK}{time.monotonic()}"):
        pass


def add_network(trace: dict, spans) -> None:
    """Put into a trace when the emulated network carried each call, in place of when gloo did."""
    events = [event for event in trace["traceEvents"] if event["name"] != GLOO]
    clock = next(event for event in events if event["name"].startswith(CLOCK))
    began = float(clock["name"].removeprefix(CLOCK))
    free_at = [-math.inf, -math.inf]  # of two rows
    for begin, end in [span[-2:] for span in spans if span[-2] > began]:
        row = 0 if begin >= free_at[0] else 1
        free_at[row] = end
        times = {"ts": clock["ts"] + 1e6 * (begin - began), "dur": 1e6 * (end - begin)}
        events.append({"ph": "X", "name": GLOO, "pid": "network", "tid": row, **times})
    trace["traceEvents"] = events


def contents(names: list[str]) -> str:
    """What a bucket holds, by the names of its parameters: norm, layers 15 to 13."""
    layers = re.findall(r"\.(\d+)\.", " ".join(names))
    parts = []
    for name in names:
        in_layer = re.search(r"\.\d+\.", name)
        parts.append(f"layers {layers[0]} to {layers[-1]}" if in_layer else name.split(".")[-2])
    return ", ".join(dict.fromkeys(parts))


def steps_of(trace: dict, stage: str) -> list[Step]:
    """A stage's training steps in a Chrome trace.

    Where it has the phases as the GPU ran them, these are taken, not their launches by the CPU.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") == "gpu_user_annotation" for event in events)
    kind = "gpu_user_annotation" if on_gpu else "user_annotation"
    steps = []
    for whole in sorted(events, key=lambda event: event["ts"]):
        if whole["name"] != stage or whole.get("cat") != kind:
            continue
        last = whole["ts"] + whole["dur"]
        inside = [event for event in events if whole["ts"] <= event["ts"] <= last]
        labels = [event for event in inside if event.get("cat") == kind]
        start = next(event["ts"] for event in labels if event["name"] == "forward")

        def span(event, start=start):
            return (event["ts"] - start) / 1000, (event["ts"] + event["dur"] - start) / 1000

        phases = {event["name"]: span(event) for event in labels if event["name"] in PHASES}
        calls = [span(event) for event in labels if event["name"] == CALL]
        sent = [event for event in inside if event["name"].startswith(ALL_REDUCES)]
        all_reduces = sorted((*span(event), event["tid"]) for event in sent)
        steps.append(Step(phases_of(phases, calls), all_reduces))
    return steps


def phases_of(spans: dict, calls: list[tuple[float, float]]) -> list[tuple[str, float, float]]:
    """The phases as they are drawn: what surrounds a single call in `sync` packs and unpacks."""
    phases = [(name, *times) for name, times in spans.items() if name != "sync"]
    if "sync" in spans:
        start, end = first, last = spans["sync"]
        within = [call for call in calls if start <= call[0] < end]
        if len(within) == 1:
            first, last = within[0]
            phases += [(PACKING, start, first), (PACKING, last, end)]
        phases.append((WAITING, first, last))
    return sorted(phases, key=lambda phase: phase[1:])


def draw(steps: dict[str, Step], path: Path, end: float, buckets: list[str]) -> None:
    """The steps above each other, on one axis until `end`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 1.6 + sum(1.0 if step.all_reduces else 0.5 for step in steps.values())
    figure = Figure(figsize=(8, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    ticks = {}  # height: text
    top = 0.0
    for label, step in steps.items():
        ticks[top] = label
        draw_phases(axes, step, top, end)
        if step.all_reduces:
            ticks[top - 1.05] = step.in_words()
            draw_all_reduces(axes, step, top - 1.05)
            top -= 1.05
        if label == "05_bucketed" and len(step.all_reduces) == len(buckets):
            numbered = [f"{number}: {words}" for number, words in enumerate(buckets, 1)]
            unbroken = [words.replace(" ", "\xa0") for words in numbered]
            text = textwrap.fill("    ".join(unbroken), 80)
            axes.text(0, top - 0.6, text, va="top", fontsize=8)
            top -= 0.9
        top -= 1.6
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.set_xlabel(f"time of one training step on rank 0, ms\n{NOTE}", fontsize=8)
    axes.set_xlim(0, end)
    axes.set_ylim(top + 0.9, 0.8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = {"all-reduce", *(name for step in steps.values() for name, _, _ in step.phases)}
    handles = [Patch(color=COLORS[name], label=name) for name in COLORS if name in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")


def draw_phases(axes, step: Step, middle: float, end: float) -> None:
    """What rank 0 does, and in words how long it waits and the whole step takes."""
    packing = iter(["pack", "unpack"])
    for name, start, stop in step.phases:
        axes.barh(middle, stop - start, 0.9, start, color=COLORS[name])
        center = {"x": (start + stop) / 2, "ha": "center", "fontsize": 8}
        if name == PACKING and stop - start > 0.004 * end:
            axes.text(y=middle + 0.5, s=next(packing), va="bottom", **center)
        if name == WAITING and stop - start > 0.06 * end:
            axes.text(y=middle, s=f"{stop - start:.0f} ms", va="center", **center)
    axes.text(step.duration(), middle, f"  {step.duration():.0f} ms", va="center", fontsize=9)


def draw_all_reduces(axes, step: Step, middle: float) -> None:
    """A row per thread, or two of a network; numbers, where there are few."""
    threads = sorted({thread for _, _, thread in step.all_reduces})
    height = 0.9 / len(threads)
    for number, (start, stop, thread) in enumerate(step.all_reduces, 1):
        place = middle + 0.45 - (threads.index(thread) + 0.5) * height
        color = COLORS["all-reduce"]
        axes.barh(place, stop - start, height, start, color=color, edgecolor="white", linewidth=0.3)
        if 1 < len(step.all_reduces) <= 12:
            center = {"ha": "center", "va": "center", "color": "white", "fontsize": 8}
            axes.text((start + stop) / 2, place, str(number), **center)


def main() -> None:
    parser = setup.Parser(__doc__)
    setup.add_plot_arguments(parser, "timeline.png")
    size = "the model of stages 02 to 05"
    parser.add_argument("--size", choices=setup.SIZES, default="mini", help=size)
    setup.add_process_group_arguments(parser)
    args = parser.parse_args()
    if args.plot is None:
        parser.error("argument --plot: a picture is needed, and the traces lie beside it")
    with setup.process_group(args) as device:
        traces, buckets = record(args, device)
        if dist.get_rank() > 0:
            return
        steps = {}
        for name in STAGES:
            found = [step for trace in traces for step in steps_of(trace, name)]
            steps[name] = sorted(found, key=Step.duration)[len(found) // 2]
            setup.say(f"{name}: {steps[name].in_words()} in {steps[name].duration():.0f} ms")
        end = 1.08 * max(step.duration() for step in steps.values())
        draw(steps, args.plot, end, buckets)
        floor = steps.pop("no communication")
        for name, step in steps.items():
            file = args.plot.with_name(f"timeline_{name}.png")
            draw({"no communication": floor, name: step}, file, end, buckets)


if __name__ == "__main__":
    main()
