r"""05: steps of 02 to 05, or of any way to train, on one time axis, on an emulated network.

    make timeline                       (02 to 05, on 1 Gbit/s, and 1 ms one way)
    make timeline NETWORK=100mbit,5ms
    torchrun --standalone --nproc-per-node 2 01_allreduce/slow_network/slow_network.py 1gbit,1ms \
        05_bucketed/compare/timeline.py

All ways train in turn in one process group. Of nine turns of each the one of median length is
drawn: above, what rank 0 computes, and where it waits; below, what the network carries. Beside the
picture of all lies one of each stage alone, on the same axis, and timeline.gif, in which time
passes. ZeRO2 and FSDP draw their own with --timeline FILE.

On other networks, and on GPUs, --trace of a stage shows its steps in torch.profiler's own form.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]

from rows import COLORS, STAGES, rows_of_stages, save_movie, train_step

from common import ladder, report, setup, timing
from common.ladder import NO_COMMUNICATION, Trainee, Way
from common.setup import network

WAITS = "exposed communication"
DISTANCE = 2.7  # from one way to the next below it
PLACES = [(0.0, 0.9), (0.85, 0.45), (1.3, 0.45)]  # of rows: their middle, and height
ALL_REDUCE, GATHER, REDUCE = ("all-reduce", 1), ("all-gather", 1), ("reduce-scatter", 2)
KINDS = {  # what collectives do, and the row of their bars, by their names on the network
    "allreduce": ALL_REDUCE,
    "_allgather_base": GATHER,
    "all_gather_single": GATHER,
    "alltoall_base": REDUCE,
    "all_to_all_single": REDUCE,
}


class Bar(NamedTuple):
    """What takes time, in ms of the network since the first step's begin."""

    name: str  # key of COLORS
    start: float
    end: float
    row: int = 0  # 0: rank 0 computes or waits; 1 and 2: the network carries it
    text: str = ""


@contextmanager
def waits_noted():
    """Yield a list that gets (start, end) of each wait for a collective, by time.perf_counter().

    Those in C++ are not seen, as in torch's DDP; and on a GPU it is not the host that waits.
    """
    work = network().work
    wait = work.wait
    waits = []

    def noting_wait(*arguments) -> bool:
        start = time.perf_counter()
        is_done = wait(*arguments)
        waits.append((start, time.perf_counter()))
        return is_done

    work.wait = noting_wait
    try:
        yield waits
    finally:
        work.wait = wait


def take_steps(trainee: Trainee, steps: int) -> dict:
    """Train so many steps; return their mean seconds, and "bars"."""
    marks = trainee.watch.marks
    network().spans.clear()
    seconds = []
    spans = []  # (name, start, end), in seconds of the clock
    with waits_noted() as waits:
        for _ in range(steps):
            seconds.append(trainee.step()["step_seconds"])
            spans += [
                ("forward", marks["step starts"], marks["forward ends"]),
                ("backward", marks["forward ends"], marks["finish starts"]),
                ("finish", marks["finish starts"], marks["finish ends"]),
                ("optimizer", marks["optimizer starts"], marks["optimizer ends"]),
            ]
    begin = spans[0][1]
    spans += [(WAITS, start, end) for start, end in waits]  # over what waits there

    def bar(name: str, start: float, end: float, row: int = 0, text: str = "") -> Bar:
        start, end = [1000 * (moment - begin) / network().stretch for moment in (start, end)]
        return Bar(name, start, end, row, text)

    bars = [bar(*span) for span in spans]
    for number, call in enumerate(network().spans, 1):
        name, row = KINDS[call.name]
        bars.append(bar(name, call.begins, call.delivered, row, str(number)))
    return {"step_seconds": sum(seconds) / steps, "bars": bars}


def duration(bars: list[Bar]) -> float:
    """Return the ms from the first step's begin to the last one's end."""
    return max(bar.end for bar in bars)


def waited(bars: list[Bar]) -> float:
    """Return the ms in which rank 0 waits for collectives."""
    return sum(bar.end - bar.start for bar in bars if bar.name == WAITS)


def measure(trainees: dict[str, Trainee], args, steps: int = 1) -> dict[str, list[Bar]]:
    """Measure in turn; return rank 0's bars of the turn of median length, and say what it shows."""
    turns = {name: partial(take_steps, each, steps) for name, each in trainees.items()}
    turns = ladder.at_one_pace(turns, ladder.pace_of(args))
    samples = timing.measure(turns, args.steps, args.warmup)
    found = {}
    for name, sample in samples.items():
        of_rank_0 = sorted(sample["bars"][0], key=duration)
        bars = found[name] = of_rank_0[args.steps // 2]
        calls = sum(bar.row > 0 for bar in bars)
        setup.say(
            f"{name}: {duration(bars):.0f} ms, of which it waits {waited(bars):.0f}; "
            f"{calls} call{'' if calls == 1 else 's'}"
        )
    return found


def add_argument(parser: setup.Parser) -> None:
    """Add --timeline to a script that draws its own ways."""
    picture = "only draw where rank 0 waits, on an emulated network, as PNG"
    parser.add_argument("--timeline", type=setup.output_file, metavar="FILE", help=picture)


def draw_ways(args, train_step: Callable, ways: dict[str, Way], title: str, steps=1) -> None:
    """Measure and draw ways beside no communication, each with a model of its own."""
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin(setup.stage(), args, device)
        if not network().text:
            setup.fail("argument --timeline: it needs an emulated network: NETWORK=1gbit,1ms")
        result["model"] = ladder.describe(args)
        trainees = {}
        for name, way in {NO_COMMUNICATION: Way(), **ways}.items():
            trainees[name] = ladder.language_trainee(way, train_step, args, device)
        found = measure(trainees, args, steps)
    if setup.is_rank_0():
        labelled = {f"{name}\nwaits {waited(bars):.0f} ms": bars for name, bars in found.items()}
        figure, axes = drawing(labelled, axis_end(found))
        axes.set_title(title)
        report.save_figure(figure, args.timeline)


def axis_end(found: dict[str, list[Bar]]) -> float:
    """Return where the time axis ends, in ms: behind the longest one's text."""
    return 1.15 * max(map(duration, found.values()))


def drawing(found: dict[str, list[Bar]], end: float):
    """Draw all below each other, with texts where they fit; return a figure and its axes."""
    from matplotlib.patches import Patch

    figure, axes = report.new_figure(8, 1 + 0.9 * len(found))
    ticks = {}  # height: text
    for number, (label, bars) in enumerate(found.items()):
        top = DISTANCE * number
        ticks[top] = label
        for bar in bars:
            shift, height = PLACES[bar.row]
            middle = top + shift
            width = bar.end - bar.start
            axes.barh(
                middle,
                width,
                height,
                left=bar.start,
                color=COLORS[bar.name],
                edgecolor="white",
                linewidth=0.3 if bar.row else 0,
            )
            if width > 0.011 * len(bar.text) * end:
                center = bar.start + width / 2
                axes.text(center, middle, bar.text, ha="center", va="center", fontsize=8)
        axes.text(duration(bars), top, f"  {duration(bars):.0f} ms", va="center", fontsize=9)
        for row in (1, 2):
            names = [bar.name for bar in bars if bar.row == row]
            if names:
                name, calls = Counter(names).most_common(1)[0]
                ticks[top + PLACES[row][0]] = f"{name}s: {calls}"
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel("time on rank 0, ms")
    drawn = {bar.name for bars in found.values() for bar in bars}
    handles = [Patch(color=COLORS[name], label=name) for name in COLORS if name in drawn]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    return figure, axes


def draw_movie(found: dict[str, list[Bar]], end: float, path: Path) -> None:
    """Save a moving picture, in which what is to come is covered.

    It begins with the whole picture, which is what a page that shows no movement shows.
    """
    from matplotlib.patches import Rectangle

    figure, axes = drawing(found, end)
    cover = Rectangle(
        (0, -1),
        end,
        3,
        transform=axes.get_xaxis_transform(),
        facecolor="white",
        edgecolor="black",
        zorder=4,
    )
    axes.add_patch(cover)
    moments = [end * frame / 29 for frame in range(1, 31)]
    save_movie(figure, cover.set_x, [end, *moments], path)


def main() -> None:
    parser = setup.Parser(__doc__)
    ladder.add_training_arguments(parser, steps=9)
    setup.add_plot_arguments(parser, "timeline.png")
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("05_bucketed/compare/timeline", args, device)
        if not network().text:
            setup.fail("start it over an emulated network: make timeline NETWORK=1gbit,1ms")
        result["model"] = ladder.describe(args)
        floor = ladder.language_trainee(Way(), train_step, args, device)
        trainees = {NO_COMMUNICATION: floor}
        for stage in STAGES:
            way = Way(rows_of_stages(ladder.BUCKET_SIZE_MB)[stage.name].wrap)
            trainees[stage.folder] = ladder.language_trainee(way, train_step, args, device, floor)
        found = measure(trainees, args)
        drawn = result["drawn"] = {}
        for name, bars in found.items():
            drawn[name] = {"step_ms": duration(bars), "forward_ms": bars[0].end}
        report.write_json(args.json, result)
    if not args.plot or not setup.is_rank_0():
        return
    end = axis_end(found)
    report.save_figure(drawing(found, end)[0], args.plot)
    for stage in STAGES:
        two = {name: found[name] for name in (NO_COMMUNICATION, stage.folder)}
        alone = args.plot.with_name(f"timeline_{stage.folder}.png")
        report.save_figure(drawing(two, end)[0], alone)
    of_stages = {stage.label: found[stage.folder] for stage in STAGES}
    draw_movie(of_stages, end, args.plot.with_suffix(".gif"))


if __name__ == "__main__":
    main()
