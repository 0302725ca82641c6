"""05: one training step of each stage on one time axis, as torch.profiler recorded it.

    make timeline                                                       (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/compare/timeline.py

`no sync` and stages 02 to 05 train in turn in one process group, because the machine's speed
changes from second to second; three steps of each are profiled in each of three rounds. The most
typical one is drawn: what computes above, what is sent below, with a row per thread of gloo's or
CUDA stream of NCCL's. Beside the picture lie one of each stage alone, on the same axis, and the
traces, which chrome://tracing and ui.perfetto.dev show, too.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
sys.path[:0] = [str(ROOT), str(FOLDER)]

from compare import WRAPPERS, naive_ddp  # noqa: E402

from common import setup, timing  # noqa: E402

ROUNDS = 3
WARMUP = 2  # steps before those that are profiled
COLORS = {"forward": "#56B4E9", "backward": "#0072B2", "sync": "#F0E442", "optimizer": "#999999"}
COLORS["all-reduce"] = "#D55E00"
NOTE = "one profiled step: its times differ from the tables', which are medians of unprofiled steps"


class Step(NamedTuple):
    """One training step: all times in ms from its start."""

    phases: dict[str, tuple[float, float]]  # start and end of each
    all_reduces: list[tuple[float, float, int]]  # start, end, thread or CUDA stream

    def duration(self) -> float:
        return self.phases["optimizer"][1]

    def in_words(self) -> str:
        count = len(self.all_reduces)
        return f"{count} all-reduce" + "s" * (count != 1)


def record(args, device: torch.device) -> dict[str, list[Path]]:
    """Profile each stage, in turn; returns the traces of each, which rank 0 writes."""
    wrappers = {"no sync": lambda module: module, **WRAPPERS}
    steps = {name: training(wrapper, args.size, device) for name, wrapper in wrappers.items()}
    traces = {name: [] for name in wrappers}
    for number in range(1, ROUNDS + 1):
        for name, step in steps.items():
            setup.progress(f"round {number} of {ROUNDS}: {name}")
            for _ in range(WARMUP):
                step()
            file = f"timeline_{name.replace(' ', '_')}_{number}.json"
            traces[name].append(args.plot.with_name(file))
            timing.profile(step, traces[name][-1])
    return traces


def training(wrapper, size: str, device: torch.device):
    """A model of its own, and the function that trains it for a step."""
    *shape, batch_size, context_length = setup.SIZES[size]
    torch.manual_seed(0)
    with device:
        model = wrapper(naive_ddp.LanguageModel(*shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = timing.Stopwatch(device)
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length), device=device)
    return lambda: naive_ddp.train_step(model, optimizer, watch, tokens, targets)


def steps_of(trace: dict) -> list[Step]:
    """The training steps of a Chrome trace.

    Where it has the phases as the GPU ran them, these are taken, not their launches by the CPU.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") == "gpu_user_annotation" for event in events)
    kind = "gpu_user_annotation" if on_gpu else "user_annotation"
    phases = [event for event in events if event["name"] in COLORS and event.get("cat") == kind]
    starts = sorted(event["ts"] for event in phases if event["name"] == "forward")
    steps = []
    for start, next_start in zip(starts, [*starts[1:], math.inf], strict=True):
        mine = [event for event in phases if start <= event["ts"] < next_start]
        steps.append(Step({event["name"]: span(event, start) for event in mine}, []))
        for event in events:
            begin, end = span(event, start)
            if 0 <= begin < steps[-1].duration() and is_all_reduce(event, on_gpu):
                steps[-1].all_reduces.append((begin, end, event["tid"]))
    return steps


def span(event: dict, start: float) -> tuple[float, float]:
    """Its start and end in ms from the start of the step, which is in µs as in the trace."""
    return (event["ts"] - start) / 1000, (event["ts"] + event["dur"] - start) / 1000


def is_all_reduce(event: dict, on_gpu: bool) -> bool:
    if on_gpu:
        return event.get("cat") == "kernel" and event["name"].startswith("nccl")
    return event["name"] == "gloo:all_reduce"


def typical_step(traces: list[Path]) -> Step:
    """Of all steps the one whose phases end nearest to their medians."""
    steps = []
    for trace in traces:
        steps += steps_of(json.loads(trace.read_text()))
    medians = {}
    for name in steps[0].phases:
        medians[name] = statistics.median(step.phases[name][1] for step in steps)

    def distance(step: Step) -> float:
        return sum(abs(step.phases[name][1] - median) for name, median in medians.items())

    return min(steps, key=distance)


def draw(steps: dict[str, Step], path: Path, end: float) -> None:
    """The steps above each other, on one axis until `end`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    height = 1.3 + sum(1.5 if step.all_reduces else 0.85 for step in steps.values())
    figure = Figure(figsize=(10, height), dpi=120, layout="constrained")
    axes = figure.subplots()
    ticks = {}  # height: text
    top = 0.0
    for label, step in steps.items():
        for name, (start, stop) in step.phases.items():
            axes.barh(top, stop - start, 0.9, start, color=COLORS[name], edgecolor="white")
        ticks[top] = f"{label}  compute"
        axes.text(step.duration(), top, f"  {step.duration():.0f} ms", va="center", fontsize=10)
        if step.all_reduces:
            ticks[top - 1] = step.in_words()
            draw_all_reduces(axes, step, top - 1)
            top -= 1.3
        top -= 1.7
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=10)
    axes.set_xlabel(f"time of one training step on rank 0, ms\n{NOTE}")
    axes.set_xlim(0, end)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = []
    for name, color in COLORS.items():
        handles.append(Patch(color=color, label="synchronizing" if name == "sync" else name))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")


def draw_all_reduces(axes, step: Step, middle: float) -> None:
    """A row per thread; numbers, where there are few; below, how long the step waits."""
    threads = sorted({thread for _, _, thread in step.all_reduces})
    height = 0.9 / len(threads)
    for number, (start, stop, thread) in enumerate(sorted(step.all_reduces), 1):
        place = middle + 0.45 - (threads.index(thread) + 0.5) * height
        axes.barh(place, stop - start, height, start, color=COLORS["all-reduce"], edgecolor="white")
        if len(step.all_reduces) <= 8:
            center = {"ha": "center", "va": "center", "color": "white"}
            axes.text((start + stop) / 2, place, str(number), **center)
    if "sync" in step.phases:
        start, stop = step.phases["sync"]
        axes.plot([start, stop], [middle - 0.65] * 2, color="black", marker="|")
        text = f"exposed: {stop - start:.0f} ms  "
        axes.text(start, middle - 0.65, text, ha="right", va="center", fontsize=10)


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
        traces = record(args, device)
        if dist.get_rank() == 0:
            steps = {name: typical_step(traces[name]) for name in traces}
            for name, step in steps.items():
                setup.say(f"{name}: {step.in_words()} in {step.duration():.0f} ms")
            end = 1.08 * max(step.duration() for step in steps.values())
            draw(steps, args.plot, end)
            for name in WRAPPERS:
                alone = {"no sync": steps["no sync"], name: steps[name]}
                draw(alone, args.plot.with_name(f"timeline_{name}.png"), end)


if __name__ == "__main__":
    main()
