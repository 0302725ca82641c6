"""05: one training step of each stage on one time axis, on an emulated network.

    make timeline                       (1 Gbit/s, and 1 ms one way)
    make timeline NETWORK=100mbit,5ms
    torchrun --standalone --nproc-per-node 2 05_bucketed/compare/timeline.py

`no communication` and stages 02 to 05 train in turn in one process group, because the machine's
speed changes from second to second. Of nine steps of each the one of median length is drawn: what
computes above, what the network carries below, in two rows, because gloo sends two messages at a
time. Beside the picture lies one of each stage alone, on the same axis.

On other networks, and on GPUs, --trace of a stage shows its steps in torch.profiler's own form.
"""

import math
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path[:0] = [str(ROOT), str(FOLDER)]

from compare import BucketedDDP, FlatDDP, OverlapDDP, naive_ddp, no_communication  # noqa: E402

from common import setup, timing  # noqa: E402

STAGES = {
    "no communication": no_communication,
    "02_naive_ddp": naive_ddp.NaiveDDP,
    "03_flat_ddp": FlatDDP,
    "04_overlap_ddp": OverlapDDP,
    "05_bucketed": lambda module: BucketedDDP(module, bucket_size_mb=5.0),
}
STEPS = 9
PHASES = ["forward", "backward", "optimizer"]
WAITING = "exposed communication"
PACKING = "pack, unpack"
COLORS = {"forward": "#56B4E9", "backward": "#0072B2", PACKING: "#009E73"}
COLORS |= {WAITING: "#F0E442", "optimizer": "#999999", "all-reduce": "#D55E00"}
NOTE = f"one of {STEPS} steps: its times differ from the tables', which are medians of other runs"


class Step(NamedTuple):
    """One training step: all times in ms from its start."""

    phases: list[tuple[str, float, float]]  # key of COLORS, start and end of each, in order
    all_reduces: list[tuple[float, float, int]]  # start, end, row

    def duration(self) -> float:
        return self.phases[-1][2]

    def in_words(self) -> str:
        count = len(self.all_reduces)
        return "1 all-reduce" if count == 1 else f"{count} all-reduces"


def training(wrapper, size: str, device: torch.device):
    """A model of its own, and the function that trains it for a step: its times as a `Step`."""
    *shape, batch_size, context_length = setup.SIZES[size]
    with device:
        model = wrapper(naive_ddp.LanguageModel(*shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = timing.Stopwatch(device)
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length), device=device)
    spans = setup.slow_network().wire.spans

    def train():
        spans.clear()
        naive_ddp.train_step(model, optimizer, watch, tokens, targets)
        return {"step": step_of(watch.marks, [span[-3:] for span in spans])}

    return model, train


def step_of(marks: dict[str, float], calls: list[tuple[float, float, float]]) -> Step:
    """A step by the marks of its stopwatch, and by when each call is launched, begins and arrives.

    All in seconds by one clock: time.perf_counter and time.monotonic are the same. What surrounds a
    single call in `sync` packs and unpacks.
    """
    sync_starts, sync_ends = marks["sync starts"], marks["sync ends"]
    phases = [(name, marks[f"{name} starts"], marks[f"{name} ends"]) for name in PHASES]
    within = [call for call in calls if call[0] >= sync_starts]
    if len(within) == 1:
        launched, _, arrives = within[0]
        phases += [(PACKING, sync_starts, launched), (PACKING, arrives, sync_ends)]
        sync_starts, sync_ends = launched, arrives
    phases.append((WAITING, sync_starts, sync_ends))
    start = marks["forward starts"]
    phases = [(name, 1000 * (a - start), 1000 * (b - start)) for name, a, b in phases]
    all_reduces = []
    free_at = [-math.inf, -math.inf]  # of two rows
    for _, begins, arrives in calls:
        row = 0 if begins >= free_at[0] else 1
        free_at[row] = arrives
        all_reduces.append((1000 * (begins - start), 1000 * (arrives - start), row))
    return Step(sorted(phases, key=lambda phase: phase[1:]), all_reduces)


def contents(names: list[str]) -> str:
    """What a bucket holds, by the names of its parameters: norm, layers 15 to 13."""
    layers = re.findall(r"\.(\d+)\.", " ".join(names))
    parts = []
    for name in names:
        in_layer = re.search(r"\.\d+\.", name)
        parts.append(f"layers {layers[0]} to {layers[-1]}" if in_layer else name.split(".")[-2])
    return ", ".join(dict.fromkeys(parts))


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
        if label == "05_bucketed":
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
        if name == PACKING:
            axes.text(y=middle + 0.5, s=next(packing), va="bottom", **center)
        if name == WAITING and stop - start > 0.06 * end:
            axes.text(y=middle, s=f"{stop - start:.0f} ms", va="center", **center)
    axes.text(step.duration(), middle, f"  {step.duration():.0f} ms", va="center", fontsize=9)


def draw_all_reduces(axes, step: Step, middle: float) -> None:
    """One row or two; numbers, where there are few."""
    rows = 1 + max(row for _, _, row in step.all_reduces)
    height = 0.9 / rows
    for number, (start, stop, row) in enumerate(step.all_reduces, 1):
        place = middle + 0.45 - (row + 0.5) * height
        color = COLORS["all-reduce"]
        axes.barh(place, stop - start, height, start, color=color, edgecolor="white", linewidth=0.3)
        if 1 < len(step.all_reduces) <= 12:
            center = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text((start + stop) / 2, place, str(number), **center)


def main() -> None:
    parser = setup.Parser(__doc__)
    setup.add_plot_arguments(parser, "timeline.png")
    size = "the model of stages 02 to 05"
    parser.add_argument("--size", choices=setup.SIZES, default="mini", help=size)
    setup.add_process_group_arguments(parser)
    parser.set_defaults(device="cpu", network="1gbit,1ms")
    args = parser.parse_args()
    if args.plot is None:
        parser.error("argument --plot: a picture is needed")
    with setup.process_group(args) as device:
        trained = {name: training(wrapper, args.size, device) for name, wrapper in STAGES.items()}
        candidates = {name: train for name, (_, train) in trained.items()}
        samples = timing.measure(candidates, STEPS, warmup=2)
        if dist.get_rank() > 0:
            return
        bucketed = trained["05_bucketed"][0]
        names = {parameter: name for name, parameter in bucketed.module.named_parameters()}
        buckets = [contents([names[p] for p in bucket.views]) for bucket in bucketed.buckets]
        steps = {}
        for name in STAGES:
            of_rank_0 = sorted(samples[name]["step"][0], key=Step.duration)
            steps[name] = of_rank_0[STEPS // 2]
            setup.say(f"{name}: {steps[name].in_words()} in {steps[name].duration():.0f} ms")
        end = 1.08 * max(step.duration() for step in steps.values())
        draw(steps, args.plot, end, buckets)
        floor = steps.pop("no communication")
        for name, step in steps.items():
            file = args.plot.with_name(f"timeline_{name}.png")
            draw({"no communication": floor, name: step}, file, end, buckets)


if __name__ == "__main__":
    main()
