"""Draw one training step of several stages on one time axis, from the Chrome traces that their --trace wrote.

    make timeline                                                     (records the traces of 02 to 05 first)
    python -m common.timeline --plot timeline.png results/02.json results/03.json …

Each stage has a compute lane (forward, backward, sync, optimizer) and a communication lane with every collective as a block
of its own, a sub-lane per thread of gloo's or CUDA stream of NCCL's. The blocks are as torch.profiler recorded them.
"""

import argparse
import json
import sys
from pathlib import Path

from common.setup import Parser, fail, output_file

PHASES = {"forward": "#56B4E9", "backward": "#0072B2", "sync": "#F0E442", "optimizer": "#999999"}
COLLECTIVE = "#D55E00"


def read_step(
    trace: dict,
) -> tuple[list[tuple[str, float, float]], dict[int, list[tuple[float, float]]]]:
    """The training step of median duration in a Chrome trace: phases and collectives, in ms from the start of forward.

    Returns [(phase, start, duration)] in order, and {thread or stream: [(start, duration)]}, sorted by start. Where the
    trace has the phases as the GPU ran them (gpu_user_annotation), these are taken, not their launches by the CPU.
    ValueError if a phase is missing.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") == "gpu_user_annotation" for event in events)
    kind = "gpu_user_annotation" if on_gpu else "user_annotation"
    steps = []
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["name"] in PHASES and event.get("cat") == kind:
            if event["name"] == "forward":
                steps.append({})
            if steps:
                steps[-1][event["name"]] = event
    if not steps:
        raise ValueError("no span named 'forward'")
    for phase in PHASES:
        if phase not in steps[-1] and not (on_gpu and phase == "sync"):
            raise ValueError(f"no span named {phase!r}")
    # Of the recorded steps the one of median duration: a single step can be disturbed by something else on the machine.
    step = sorted(steps, key=lambda step: step["optimizer"]["ts"] - step["forward"]["ts"])[
        len(steps) // 2
    ]
    start, end = step["forward"]["ts"], step["optimizer"]["ts"] + step["optimizer"]["dur"]
    phases = [
        (name, (event["ts"] - start) / 1000, event["dur"] / 1000) for name, event in step.items()
    ]
    lanes = {}
    for event in events:
        is_gloo = event["name"].startswith("gloo:") and not on_gpu
        is_nccl = event.get("cat") == "kernel" and event["name"].startswith("nccl")
        if (is_gloo or is_nccl) and start <= event["ts"] < end:
            lanes.setdefault(event["tid"], []).append(
                ((event["ts"] - start) / 1000, event["dur"] / 1000)
            )
    return sorted(phases, key=lambda phase: phase[1]), {
        lane: sorted(lanes[lane]) for lane in sorted(lanes)
    }


def draw(steps: dict[str, tuple], path: Path) -> None:
    """One step per stage, above each other on the same axis; `steps` is {label: what read_step returns}."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1.1 + 1.35 * len(steps)), dpi=120, layout="constrained")
    axes = figure.subplots()
    ticks, labels = [], []
    for row, (label, (phases, lanes)) in enumerate(steps.items()):
        top = -2.6 * row
        for name, start, duration in phases:
            axes.broken_barh(
                [(start, duration)],
                (top, 0.9),
                facecolor=PHASES[name],
                edgecolor="white",
                linewidth=0.5,
            )
        height = 0.9 / max(1, len(lanes))
        for number, blocks in enumerate(lanes.values()):
            axes.broken_barh(
                blocks,
                (top - 0.1 - (number + 1) * height, 0.92 * height),
                facecolor=COLLECTIVE,
                edgecolor="white",
                linewidth=0.5,
            )
        ticks += [top + 0.45, top - 0.55]
        count = sum(map(len, lanes.values()))
        labels += [f"{label}  compute", f"{count} all-reduce" + "s" * (count != 1)]
        step = phases[-1][1] + phases[-1][2]
        axes.annotate(
            f"{step:.0f} ms",
            (step, top + 0.45),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    axes.set_yticks(ticks, labels, fontsize=10)
    axes.set_xlabel("time of one training step on rank 0, ms")
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=color, label=name) for name, color in PHASES.items()]
    figure.legend(
        handles=[*handles, Patch(color=COLLECTIVE, label="collective")],
        loc="outside upper center",
        ncols=5,
        fontsize=10,
        frameon=False,
    )
    figure.savefig(path, format="png")


def main() -> None:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE.json",
        help="written by --trace; the file's name is its label",
    )
    parser.add_argument(
        "--plot", type=output_file, required=True, metavar="FILE", help="the picture, a PNG"
    )
    args = parser.parse_args()
    steps = {}
    for trace in args.traces:
        try:
            steps[Path(trace).stem] = read_step(json.loads(Path(trace).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            fail(f"{trace}: is not a trace of --trace ({error})")
    draw(steps, args.plot)
    for label, (phases, lanes) in steps.items():
        count = sum(map(len, lanes.values()))
        print(
            f"{label}: {count} all-reduce{'s' if count > 1 else ''} in {phases[-1][1] + phases[-1][2]:.0f} ms"
        )
    print(f"picture: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
