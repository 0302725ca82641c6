"""What a trace of --trace shows of one training step, and the picture of several such steps."""

import json
from pathlib import Path
from statistics import median

from common.setup import fail

PHASES = {"forward": "#56B4E9", "backward": "#0072B2", "sync": "#F0E442", "optimizer": "#999999"}
IN_WORDS = {"sync": "waiting"}
COLLECTIVE = "#D55E00"
KINDS = {"all_gather": "#009E73", "all_to_all": "#CC79A7"}  # with a sub-lane of their own
PACKING = "#E69F00"
NOTE = "one profiled step: its times differ from the tables', which are medians of unprofiled steps"
LANES = "two rows of all-reduces: gloo's two threads; the first call may also wait for rank 1"


def read_trace(path: Path) -> tuple[list, dict]:
    """`read_step` of a file; ends with one line if it is no trace."""
    try:
        return read_step(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path}: is not a trace of --trace ({error})")


def read_step(
    trace: dict,
) -> tuple[list[tuple[str, float, float]], dict[int, list[tuple[float, float]]]]:
    """A training step in a Chrome trace: phases and collectives, in ms from the start of forward.

    Returns [(phase, start, duration)] in order, and {thread or stream: [(start, duration)]}, sorted
    by start. Where sync packs gradients into one tensor, "pack" and "unpack" are among the phases.
    Of the recorded steps it is the one whose phases are nearest to their medians. Where the trace
    has the phases as the GPU ran them (gpu_user_annotation), these are taken, not their launches by
    the CPU.
    ValueError if a phase is missing.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") == "gpu_user_annotation" for event in events)
    step = typical_step(events, on_gpu)
    start = step["forward"]["ts"]
    end = step["optimizer"]["ts"] + step["optimizer"]["dur"]

    def span(event):
        return (event["ts"] - start) / 1000, event["dur"] / 1000

    phases = [(name, *span(event)) for name, event in step.items()]
    lanes = {}
    for event in events:
        is_gloo = event["name"].startswith("gloo:") and not on_gpu
        is_nccl = event.get("cat") == "kernel" and event["name"].startswith("nccl")
        if (is_gloo or is_nccl) and start <= event["ts"] < end:
            kind = event["name"].removeprefix("gloo:")
            lane = kind if is_gloo and kind in KINDS else event["tid"]
            lanes.setdefault(lane, []).append(span(event))
    # FSDP, too, packs the few gradients that are whole, in a millisecond.
    if "sync" in step and not on_gpu and not set(lanes) & set(KINDS):
        phases += [(name, *span(block)) for name, block in packing(events, step["sync"])]
    phases.sort(key=lambda phase: phase[1])
    order = sorted(lanes, key=lambda lane: (lane not in KINDS, lane))
    return phases, {lane: sorted(lanes[lane]) for lane in order}


def packing(events: list[dict], sync: dict) -> list[tuple[str, dict]]:
    """Of a sync that copies gradients into one tensor: [("pack", block), ("unpack", block)].

    Packing is all of sync until its collective starts, unpacking all of it after the collective.
    """
    end = sync["ts"] + sync["dur"]
    inside = [event for event in events if sync["ts"] <= event["ts"] < end]
    collectives = [event for event in inside if event["name"] == "gloo:all_reduce"]
    if not collectives or not any(event["name"] == "aten::cat" for event in inside):
        return []
    first = min(event["ts"] for event in collectives)
    last = max(event["ts"] + event["dur"] for event in collectives)
    pack = {"ts": sync["ts"], "dur": first - sync["ts"]}
    return [("pack", pack), ("unpack", {"ts": last, "dur": end - last})]


def typical_step(events: list[dict], on_gpu: bool) -> dict[str, dict]:
    """The step nearest to the medians: {phase: its event}. ValueError if a phase is missing."""
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
    medians = {phase: median(step[phase]["dur"] for step in steps) for phase in steps[-1]}

    def distance(step):
        return sum(abs(step[phase]["dur"] - medians[phase]) for phase in medians)

    return min(steps, key=distance)


def summary(phases: list[tuple], lanes: dict) -> tuple[str, float]:
    """How many collectives a step has, in words, and its duration in ms."""
    count = sum(len(blocks) for blocks in lanes.values())
    _, start, duration = phases[-1]
    what = "collective" if set(lanes) & set(KINDS) else "all-reduce"
    return f"{count} {what}" + "s" * (count != 1), start + duration


def draw(steps: dict[str, tuple], path: Path, end: float | None = None) -> None:
    """One step per stage, on one axis above each other; `steps`: {label: read_step's answer}.

    `end`: of the axis, in ms, if it is to have the scale of another picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [1.5 if lanes else 0.85 for _, lanes in steps.values()]
    figure = Figure(figsize=(10, 1.3 + sum(heights)), dpi=120, layout="constrained")
    axes = figure.subplots()
    edge = {"edgecolor": "white", "linewidth": 0.5}
    beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 10}
    centered = {"ha": "center", "va": "center"}
    ticks = []
    labels = []
    top = 0.0
    for label, (phases, lanes) in steps.items():
        for name, start, duration in phases:
            axes.broken_barh(
                [(start, duration)], (top, 0.9), facecolor=PHASES.get(name, PACKING), **edge
            )
            if name == "sync" and lanes and not set(lanes) & set(KINDS):
                mark_exposed(axes, start, start + duration, top - 1.25)
        height = 0.9 / max(1, len(lanes))
        numbers = numbers_of(lanes)
        for number, (lane, blocks) in enumerate(lanes.items()):
            place = (top - 0.1 - (number + 1) * height, 0.92 * height)
            axes.broken_barh(blocks, place, facecolor=KINDS.get(lane, COLLECTIVE), **edge)
            middle = place[0] + place[1] / 2
            for start, duration in blocks:
                text = numbers.get((lane, start), "")
                axes.text(start + duration / 2, middle, text, color="white", fontsize=9, **centered)
        all_reduces, duration = summary(phases, lanes)
        ticks += [top + 0.45, top - 0.55]
        labels += [f"{label}  compute", all_reduces if lanes else ""]
        axes.annotate(f"{duration:.0f} ms", (duration, top + 0.45), **beside)
        top -= 3 if lanes else 1.7
    axes.set_ylim(top + 1.2, 1.4)
    axes.set_yticks(ticks, labels, fontsize=10)
    two_threads = any(len(lanes) > 1 and not set(lanes) & set(KINDS) for _, lanes in steps.values())
    notes = f"{NOTE}\n{LANES}" if two_threads else NOTE
    axes.set_xlabel(f"time of one training step on rank 0, ms\n{notes}")
    axes.set_xlim(left=0, right=end)
    axes.margins(x=0.08)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=color, label=IN_WORDS.get(name, name)) for name, color in PHASES.items()]
    if any(name not in PHASES for phases, _ in steps.values() for name, _, _ in phases):
        handles.append(Patch(color=PACKING, label="pack, unpack"))
    kinds = [kind for kind in KINDS if any(kind in lanes for _, lanes in steps.values())]
    handles += [Patch(color=KINDS[kind], label=kind.replace("_", "-")) for kind in kinds]
    handles.append(Patch(color=COLLECTIVE, label="all-reduce"))
    place = {"loc": "outside upper center", "ncols": len(handles)}
    figure.legend(handles=handles, fontsize=10, frameon=False, **place)
    figure.savefig(path, format="png")


def numbers_of(lanes: dict) -> dict[tuple, str]:
    """Which all-reduce a block is, in the order in which they start; nothing if there are many."""
    blocks = []
    for lane in lanes:
        blocks += [(start, lane) for start, _ in lanes[lane]]
    if set(lanes) & set(KINDS) or len(blocks) > 8:
        return {}
    return {(lane, start): str(number) for number, (start, lane) in enumerate(sorted(blocks), 1)}


def mark_exposed(axes, start: float, end: float, height: float) -> None:
    """An arrow below the communication lane, as long as compute waits."""
    arrow = {"arrowstyle": "|-|", "mutation_scale": 3, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.2}
    axes.annotate("", (start, height), (end, height), arrowprops=arrow)
    text = f"exposed: {end - start:.0f} ms  "
    axes.text(start, height, text, ha="right", va="center", fontsize=10)
