"""06, FSDP: a training step with and without prefetch on one time axis, on an emulated network.

    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp/prefetch.py
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/fsdp/prefetch.py \
        --network 5gbit,1ms --plot results/prefetch_5gbit.png

A step without communication and both ways train in turn in one process group. Of nine steps of each
the one of median length is drawn: what rank 0 computes, where it waits, and beneath it what the
network carries.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(folder) for folder in (FOLDER.parent.parent, FOLDER.parent, FOLDER)]

import accounting  # noqa: E402
from fsdp import FSDP  # noqa: E402
from sharded_optimizer import ADAMW, LanguageModel, Trainee  # noqa: E402

from common import network, report, setup, timing  # noqa: E402

WRAPS = {"no communication": None, "FSDP, no prefetch": partial(FSDP, prefetch=False), "FSDP": FSDP}
COLORS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "waits for the network": "#F0E442",
    "optimizer": "#999999",
    "all-gather": "#009E73",
    "reduce-scatter": "#D55E00",
}
KINDS = {  # what collectives do, by their names on the network, of which torch has changed some
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "alltoall_base": "reduce-scatter",
    "all_to_all_single": "reduce-scatter",
    "allreduce": "reduce-scatter",  # of biases and norms: the only one of its kind, and small
}
ROWS = {"all-gather": 1, "reduce-scatter": 2}
HEIGHTS = [(0.0, 0.9), (0.75, 0.35), (1.2, 0.35)]  # of rows: their middle, and height
SMALL = 1000  # bytes: the units' numbers are not drawn


class Bar(NamedTuple):
    """What takes time in a step, in ms from its start."""

    name: str  # key of COLORS
    start: float
    end: float
    row: int = 0  # 0: the rank; 1 and 2: the network


def bars_of(marks: dict[str, float], waits: list[tuple], spans: list, stretch: float) -> list[Bar]:
    """Return a step's bars, from its stopwatch, its waits and its calls on the network.

    All are seconds of one clock, and `stretch` of them are one second of the network.
    """

    def bar(name: str, start: float, end: float, row: int = 0) -> Bar:
        zero = marks["forward starts"]
        return Bar(name, 1000 * (start - zero) / stretch, 1000 * (end - zero) / stretch, row)

    bars = [
        bar("forward", marks["forward starts"], marks["forward ends"]),
        bar("backward", marks["backward starts"], marks["sync ends"]),
        bar("optimizer", marks["optimizer starts"], marks["optimizer ends"]),
    ]
    for start, end in waits:
        bars.append(bar("waits for the network", start, end))
    for name, size_bytes, _, begins, delivered in spans:
        if size_bytes > SMALL:
            bars.append(bar(KINDS[name], begins, delivered, ROWS[KINDS[name]]))
    return bars


def duration(bars: list[Bar]) -> float:
    """Return the ms that a step takes."""
    return max(bar.end for bar in bars)


def waiting(bars: list[Bar], phase: str) -> float:
    """Return for how many ms of a phase the rank waits."""
    (whole,) = [bar for bar in bars if bar.name == phase]
    waits = [bar for bar in bars if bar.name == "waits for the network"]
    return sum(bar.end - bar.start for bar in waits if whole.start <= bar.start < whole.end)


def draw(steps: dict[str, list[Bar]], path: Path) -> None:
    """Draw the steps below each other, on one axis."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 0.9 + 0.75 * len(steps)), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    ticks = {}  # height: text
    top = 0.0
    for label, bars in steps.items():
        ticks[top] = label
        for name, start, end, row in bars:
            shift, height = HEIGHTS[row]
            look = {"color": COLORS[name], "edgecolor": "white", "linewidth": 0.2}
            axes.barh(top + shift, end - start, height, start, **look)
        axes.text(duration(bars), top, f"  {duration(bars):.0f} ms", va="center", fontsize=9)
        for name, row in ROWS.items():
            if any(bar.row == row for bar in bars):
                ticks[top + HEIGHTS[row][0]] = f"{name}s"
        top = 1.2 + max(ticks)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(map(duration, steps.values())))
    axes.set_xlabel("time of one training step on rank 0, ms")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")


def main() -> None:
    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, steps=9)
    setup.add_plot_arguments(parser, "prefetch.png")
    parser.set_defaults(device="cpu", network="1gbit,1ms", warmup=2)
    args = parser.parse_args()
    waits, wait = [], network.SlowWork.wait

    def noting_wait(*arguments) -> bool:
        start = time.monotonic()
        is_done = wait(*arguments)
        waits.append((start, time.monotonic()))
        return is_done

    def step(trainee: Trainee) -> dict:
        wire = network.wire
        waits.clear()
        wire.spans.clear()
        times = trainee.step()
        bars = bars_of(trainee.watch.marks, waits, list(wire.spans), wire.stretch)
        return times | {"bars": bars}

    with setup.process_group(args.device, args.backend, args.timeout, args.network) as device:
        result = report.begin("06_sharded_optimizer/fsdp", args, device)
        model = result["model"] = report.describe(LanguageModel, args)
        network.SlowWork.wait = noting_wait
        batch_shape = model["batch_size"], model["context_length"]
        candidates = {}
        for name, wrap in WRAPS.items():
            trainee = Trainee(args, device, batch_shape, ADAMW, wrap, accounting.finish)
            candidates[name] = partial(step, trainee)
        timing.keep_pace(candidates, args)
        samples = timing.measure(candidates, args.steps, args.warmup)
        timing.warn_of_drift(samples)
        of_rank_0 = {name: samples[name].pop("bars")[0] for name in samples}
        result["candidates"] = [{"name": name, **samples[name]} for name in samples]
        report.write_json(args.json, result)
    if not setup.is_rank_0():
        return
    steps = {}
    for name in WRAPS:
        steps[name] = bars = sorted(of_rank_0[name], key=duration)[args.steps // 2]
        in_forward, in_backward = [waiting(bars, phase) for phase in ("forward", "backward")]
        took = f"{duration(bars):.0f} ms"
        setup.say(f"{name}: {took}; it waits {in_forward:.0f} in forward, {in_backward:.0f} after")
    if args.plot:
        draw(steps, args.plot)


if __name__ == "__main__":
    main()
