"""05: one training step of each stage on one time axis, on an emulated network.

    make timeline                       (1 Gbit/s, and 1 ms one way)
    make timeline NETWORK=100mbit,5ms
    torchrun --standalone --nproc-per-node 2 05_bucketed/compare/timeline.py

`no communication` and stages 02 to 05 train in turn in one process group, because the machine's
speed changes from second to second. Of nine steps of each the one of median length is drawn, and so
its times differ from those of the tables: what computes above, what the network carries below, in
two rows, because gloo sends two messages at a time. Beside the picture lies one of each stage
alone, on the same axis.

On other networks, and on GPUs, --trace of a stage shows its steps in torch.profiler's own form.
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent.parent), str(FOLDER)]

import compare  # noqa: E402

from common import report, setup, timing  # noqa: E402

STAGES = {
    "no communication": compare.no_communication,
    "02_naive_ddp": compare.NaiveDDP,
    "03_flat_ddp": compare.FlatDDP,
    "04_overlap_ddp": compare.OverlapDDP,
    "05_bucketed": partial(compare.BucketedDDP, bucket_size_mb=5.0),
}
COLORS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "exposed communication": "#F0E442",
    "optimizer": "#999999",
    "pack, unpack": "#009E73",
    "all-reduce": "#D55E00",
}


class Step(NamedTuple):
    """One training step: all times in ms from its start."""

    phases: list[tuple[str, float, float]]  # key of COLORS, start and end of each
    all_reduces: list[tuple[int, float, float]]  # row, start, end
    duration: float


def step_of(marks: dict[str, float], calls: list[tuple[float, float, float]]) -> Step:
    """A step by the marks of its stopwatch, and by when each call is launched, begins and arrives.

    All in seconds by one clock: time.perf_counter and time.monotonic are the same. What surrounds a
    single call in `sync` packs and unpacks.
    """
    zero = marks["forward starts"]

    def ms(moment: float) -> float:
        return 1000 * (moment - zero)

    phases = []
    for name, mark in zip(COLORS, ["forward", "backward", "sync", "optimizer"], strict=False):
        phases.append((name, ms(marks[f"{mark} starts"]), ms(marks[f"{mark} ends"])))
    _, sync_starts, sync_ends = phases[2]
    if len(calls) == 1 and ms(calls[0][0]) >= sync_starts:
        phases.append(("pack, unpack", sync_starts, ms(calls[0][0])))
        phases.append(("pack, unpack", ms(calls[0][2]), sync_ends))
    all_reduces = []
    busy_until = [zero, zero]  # of two rows
    for _, begins, arrives in calls:
        row = int(begins < busy_until[0])
        busy_until[row] = arrives
        all_reduces.append((row, ms(begins), ms(arrives)))
    return Step(phases, all_reduces, ms(marks["optimizer ends"]))


def draw(steps: dict[str, Step], path: Path, end: float) -> None:
    """The steps above each other, on one axis until `end`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 1 + 0.9 * len(steps)), dpi=200, layout="constrained")
    axes = figure.subplots()
    ticks = {}  # height: text
    for number, (label, step) in enumerate(steps.items()):
        top = 2.6 * number
        ticks[top] = label
        for name, start, stop in step.phases:
            axes.barh(top, stop - start, 0.9, start, color=COLORS[name])
        _, start, stop = step.phases[2]
        if stop - start > 0.06 * end:
            write(axes, (start + stop) / 2, top, f"{stop - start:.0f} ms")
        axes.text(step.duration, top, f"  {step.duration:.0f} ms", va="center", fontsize=9)
        if step.all_reduces:
            ticks[top + 1.05] = f"all-reduces: {len(step.all_reduces)}"
            draw_all_reduces(axes, step, top + 0.6, end)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("time of one training step on rank 0, ms")
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")


def write(axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=8)


def draw_all_reduces(axes, step: Step, top: float, end: float) -> None:
    """One row or two below `top`; numbers, where they fit."""
    height = 0.9 / (1 + max(row for row, _, _ in step.all_reduces))
    edge = {"color": COLORS["all-reduce"], "edgecolor": "white", "linewidth": 0.3}
    for number, (row, start, stop) in enumerate(step.all_reduces, 1):
        middle = top + (row + 0.5) * height
        axes.barh(middle, stop - start, height, start, **edge)
        if stop - start > 0.02 * end:
            write(axes, (start + stop) / 2, middle, str(number))


def main() -> None:
    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, steps=9)
    setup.add_plot_arguments(parser, "timeline.png")
    parser.set_defaults(device="cpu", network="1gbit,1ms", warmup=2)
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout, args.network) as device:
        described = report.describe(compare.LanguageModel, args, replicas=2)
        model, watch, train = compare.shared_model(args, device, described)
        wire = setup.wire()

        def step(wrapped) -> dict[str, Step]:
            wire.spans.clear()
            train(wrapped)
            return {"step": step_of(watch.marks, [span[-3:] for span in wire.spans])}

        candidates = {name: partial(step, wrap(model)) for name, wrap in STAGES.items()}
        samples = timing.measure(candidates, args.steps, args.warmup, wire)
    if not setup.is_rank_0():
        return
    steps = {}
    for name in STAGES:
        of_rank_0 = sorted(samples[name]["step"][0], key=lambda step: step.duration)
        steps[name] = step = of_rank_0[args.steps // 2]
        setup.say(f"{name}: {len(step.all_reduces)} all-reduces in {step.duration:.0f} ms")
    end = 1.08 * max(step.duration for step in steps.values())
    draw(steps, args.plot, end)
    for name in list(STAGES)[1:]:
        two = {each: steps[each] for each in ("no communication", name)}
        draw(two, args.plot.with_name(f"timeline_{name}.png"), end)


if __name__ == "__main__":
    main()
