r"""05: one training step of each stage on one time axis, on an emulated network.

    make timeline                       (1 Gbit/s, and 1 ms one way)
    make timeline NETWORK=100mbit,5ms
    torchrun --standalone --nproc-per-node 2 01_allreduce/slow_network/slow_network.py 1gbit,1ms \
        05_bucketed/compare/timeline.py

`no communication` and stages 02 to 05 train in turn in one process group. Of nine steps of each the
one of median length is drawn: what computes above, what the network carries below (in two rows if
it carries two calls at once). Beside the picture lies one of each stage alone, on the same axis,
and timeline.gif, in which time passes.

On other networks, and on GPUs, --trace of a stage shows its steps in torch.profiler's own form.
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
OF_01 = [str(ROOT / "01_allreduce"), str(ROOT / "01_allreduce" / "slow_network")]
sys.path[:0] = [str(ROOT), *OF_01, str(FOLDER)]

from movie import save_movie
from slow_network import Span, network
from strategies import STAGES, strategies

from common import ladder, report, setup, timing
from common.ladder import NO_COMMUNICATION, Way

DISTANCE = 2.7  # from one step to the next below it
PLACES = [(0.0, 0.9), (0.85, 0.45), (1.3, 0.45)]  # of rows: their middle, and height


class Bar(NamedTuple):
    """What takes time in a step, in seconds of the clock or (from bars_of) in ms."""

    name: str  # key of COLORS
    start: float
    end: float
    row: int = 0  # 0: computes; 1 and 2: the network carries it
    text: str = ""


def bars_of(marks: dict[str, float], backward_ends: float, others: list[Bar]) -> list[Bar]:
    """Return a step's bars in ms of the network from its start: of its stopwatch, and others.

    Marks and others are seconds of one clock (time.perf_counter and time.monotonic are the same).
    """
    bars = [
        Bar("forward", marks["forward starts"], marks["forward ends"]),
        Bar("backward", marks["backward starts"], backward_ends),
        Bar("optimizer", marks["optimizer starts"], marks["optimizer ends"]),
        *others,
    ]

    def in_ms(moment: float) -> float:
        return 1000 * (moment - marks["forward starts"]) / network.stretch

    return [bar._replace(start=in_ms(bar.start), end=in_ms(bar.end)) for bar in bars]


def all_reduces(marks: dict[str, float], calls: list[Span]) -> list[Bar]:
    """Return the bars of a step's calls, and of what is exposed of them.

    What surrounds a single call after backward packs and unpacks.
    """
    last, ends = marks["last gradient"], marks["sync ends"]
    bars = []
    if len(calls) == 1 and calls[0].launched >= last:
        bars.append(Bar("pack, unpack", last, calls[0].launched))
        bars.append(Bar("pack, unpack", calls[0].delivered, ends))
        last, ends = calls[0].launched, calls[0].delivered
    bars.append(Bar("exposed communication", last, ends))
    first_row_is_free = 0.0
    for number, call in enumerate(calls, 1):
        row = 2 if call.begins < first_row_is_free else 1
        if row == 1:
            first_row_is_free = call.delivered
        bars.append(Bar("all-reduce", call.begins, call.delivered, row, str(number)))
    return bars


def duration(bars: list[Bar]) -> float:
    """Return the ms that a step takes."""
    return max(bar.end for bar in bars)


def median_steps(candidates: dict, args, result: dict) -> dict[str, list[Bar]]:
    """Measure candidates in turn; of each return rank 0's "bars" of the step of median length."""
    candidates = ladder.at_one_pace(candidates, args)
    samples = timing.measure(candidates, args.steps, args.warmup)
    steps = {}
    for name, of_candidate in samples.items():
        steps[name] = sorted(of_candidate.pop("bars")[0], key=duration)[args.steps // 2]
    result["candidates"] = [{"name": name, **samples[name]} for name in samples]
    return steps


def draw(steps: dict[str, list[Bar]], path: Path, end: float) -> None:
    """Save a picture of the steps, on one axis until `end`."""
    figure, _ = drawing(steps, end)
    report.save_figure(figure, path)


def drawing(steps: dict[str, list[Bar]], end: float, durations: bool = True):
    """Draw the steps below each other, with texts where they fit; return a figure and its axes."""
    from matplotlib.patches import Patch

    figure, axes = report.new_figure(8, 1 + 0.9 * len(steps))
    ticks = {}  # height: text
    for number, (label, bars) in enumerate(steps.items()):
        top = DISTANCE * number
        ticks[top] = label
        exposed = [bar for bar in bars if bar.name == "exposed communication"]
        center = {"ha": "center", "va": "center", "fontsize": 8}
        for bar in bars:
            shift, height = PLACES[bar.row]
            width, middle = bar.end - bar.start, top + shift
            look = {"color": report.COLORS[bar.name], "edgecolor": "white", "linewidth": 0.3}
            axes.barh(middle, width, height, bar.start, **look)
            text = bar.text
            if bar.name == "exposed communication" and len(exposed) > 1:
                text = f"{width:.0f} ms"
            if width > 0.011 * len(text) * end:
                axes.text((bar.start + bar.end) / 2, middle, text, **center)
        if durations:
            axes.text(duration(bars), top, f"  {duration(bars):.0f} ms", va="center", fontsize=9)
        for name in {bar.name for bar in bars if bar.row}:
            rows = [bar.row for bar in bars if bar.name == name]
            middle = top + (PLACES[min(rows)][0] + PLACES[max(rows)][0]) / 2
            ticks[middle] = f"{name}s: {len(rows)}"
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("time on rank 0, ms")
    drawn = {bar.name for bars in steps.values() for bar in bars}
    handles = [
        Patch(color=report.COLORS[name], label=name) for name in report.COLORS if name in drawn
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    return figure, axes


def draw_movie(steps: dict[str, list[Bar]], path: Path) -> None:
    """Save the steps as time passes: a moving picture, in which what is to come is covered.

    It stands where readers have yet to guess, so it only says what the last one exposes.
    """
    from matplotlib.patches import Rectangle

    end = 1.23 * max(map(duration, steps.values()))
    figure, axes = drawing(steps, end, durations=False)
    last = [*steps.values()][-1]
    (exposed,) = [bar.end - bar.start for bar in last if bar.name == "exposed communication"]
    top = DISTANCE * (len(steps) - 1)
    axes.text(duration(last), top, f"  {exposed:.0f} ms exposed", va="center", weight="bold")
    look = {"facecolor": "white", "edgecolor": "black", "zorder": 4}
    cover = Rectangle((0, -1), end, 3, transform=axes.get_xaxis_transform(), **look)
    axes.add_patch(cover)
    save_movie(figure, cover.set_x, [end * frame / 29 for frame in range(1, 31)], path)


def read_arguments(description: str, picture: str):
    """Return the command line's; ends without an emulated network."""
    parser = setup.Parser(description)
    ladder.add_training_arguments(parser, steps=9)
    setup.add_plot_arguments(parser, picture)
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    if not network.text:
        setup.fail("start it over a network: slow_network.py 1gbit,1ms, and this script")
    return args


def main() -> None:
    args = read_arguments(__doc__, "timeline.png")
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("05_bucketed/compare/timeline", args, device)
        result["model"] = ladder.describe(args)
        shared = ladder.language_trainee(Way(), args, device)
        marks = shared.watch.marks

        def step(trainee) -> dict:
            network.spans.clear()
            times = trainee.step()
            others = all_reduces(marks, list(network.spans))
            return times | {"bars": bars_of(marks, marks["last gradient"], others)}

        candidates = {NO_COMMUNICATION: partial(step, shared)}
        wrappers = strategies(args.bucket_size_mb)
        for stage in STAGES:
            trainee = shared.in_wrapper(wrappers[stage.name].wrap)
            candidates[stage.folder] = partial(step, trainee)
        steps = median_steps(candidates, args, result)
        drawn = {}
        for name, bars in steps.items():
            calls = sum(bar.row > 0 for bar in bars)
            drawn[name] = {"step_ms": duration(bars), "forward_ms": bars[0].end}
            what = "all-reduce" if calls == 1 else "all-reduces"
            setup.say(f"{name}: {calls} {what} in {duration(bars):.0f} ms")
        result["drawn"] = drawn
        report.write_json(args.json, result)
    if not args.plot or not setup.is_rank_0():
        return
    end = 1.23 * max(map(duration, steps.values()))
    draw(steps, args.plot, end)
    for stage in STAGES:
        two = {name: steps[name] for name in (NO_COMMUNICATION, stage.folder)}
        draw(two, args.plot.with_name(f"timeline_{stage.folder}.png"), end)
    of_stages = {stage.label: steps[stage.folder] for stage in STAGES}
    draw_movie(of_stages, args.plot.with_suffix(".gif"))


if __name__ == "__main__":
    main()
