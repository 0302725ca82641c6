"""Results of --json beside each other: medians with their range, in tables and in pictures.

    python 05_bucketed/compare/medians.py results/before.json results/after.json

It reads what 02 to 06, fsdp, compare and bucket_sweep write. A file has a column of its own. Files
with the same label share one, with the median of the runs, the lowest and the highest:

    python 05_bucketed/compare/medians.py loopback=results/loopback_{1..5}.json \\
        "1 Gbit/s, 1 ms"=results/slow_{1..3}.json --plot results/networks.png

Runs of compare with several numbers of ranks, which are their labels, show how it scales:

    python 05_bucketed/compare/medians.py 2=results/of_2.json 4=results/of_4.json \\
        8=results/of_8.json --scaling results/scaling.png

The time of a run is the p50 over all steps of all its ranks, and a ratio is one of two candidates
of the same run.
"""

import json
import sys
from pathlib import Path
from statistics import median

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent.parent)]

from strategies import COLORS, LABELS, STAGES

from common import report, setup
from common.ladder import NO_COMMUNICATION

OF_TORCH = ("torch DDP", "torch ZeRO", "torch ZeRO view", "torch fully_shard")
LINES = {stage.name: stage.color for stage in STAGES} | {"torch DDP": "black"}  # of scaling

Run = dict[str, dict[str, float]]  # {candidate: {quantity: p50 in seconds}}


def p50s(result: dict) -> Run:
    """Return of each candidate the p50 of every quantity, over all steps of all ranks."""
    run = {}
    for each in result["rows"]:
        quantities = [key for key in each if key.endswith("_seconds")]
        run[each["name"]] = {key: report.percentiles(each[key])[0] for key in quantities}
    return run


def ratios(runs: list[Run], name: str, baseline: str, quantity="step_seconds") -> list[float]:
    """Return how many times as long as the baseline's step it takes in each run that has both."""
    both = [run for run in runs if name in run and baseline in run]
    return [run[name][quantity] / run[baseline]["step_seconds"] for run in both]


def speed_ups(runs: list[Run], name: str, ranks: int) -> list[float]:
    """Return how many times as fast as one process it is, which takes a step for each rank's."""
    return [ranks / ratio for ratio in ratios(runs, name, NO_COMMUNICATION)]


def in_ms(runs: list[Run], name: str, quantity: str) -> list[float]:
    """Return a quantity of this candidate in each run that has it, in ms."""
    return [1000 * run[name][quantity] for run in runs if quantity in run.get(name, ())]


def cell(values: list[float]) -> str:
    """Return their median, and of several the lowest and the highest, as text."""
    if len(values) > 1:
        return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return f"{values[0]:.2f}" if values else "-"


def print_runs(title: str, columns: dict[str, list[Run]], values, *arguments) -> None:
    """Print a row per candidate, a column per label: values(runs, candidate, *arguments)."""
    rows = []
    for name in dict.fromkeys(name for runs in columns.values() for name in runs[0]):
        cells = [cell(values(runs, name, *arguments)) for runs in columns.values()]
        rows.append([name, *cells])
    report.print_table([title, *columns], rows)


def draw(columns: dict[str, list[Run]], path: Path) -> None:
    """Draw a bar for the first candidate, and per label one for each other: median steps ÷ it.

    Yellow is communication that nothing hides.
    """
    floor = next(iter(next(iter(columns.values()))[0]))
    figure, axes = report.new_figure(max(7, 5 * len(columns)), 4)
    exposed = "exposed communication"
    ticks = {0: floor}  # place: text
    axes.bar(0, 1, color=COLORS["forward"], label="everything else")
    for label, runs in columns.items():
        first = place = max(ticks) + 1.5
        for name in [name for name in runs[0] if name != floor]:
            step = median(ratios(runs, name, floor))
            wait = median(ratios(runs, name, floor, "exposed_comm_seconds"))
            axes.bar(place, step - wait, color=COLORS["forward"])
            axes.bar(place, wait, bottom=step - wait, color=COLORS[exposed], label=exposed)
            axes.text(place, step, f"{step:.2f}", ha="center", va="bottom", fontsize=9)
            ticks[place] = LABELS.get(name, name)
            place += 1
        axes.text((first + place) / 2, 1, label, transform=axes.get_xaxis_transform(), ha="center")
    axes.set_xticks(list(ticks), [text.replace(" ", "\n") for text in ticks.values()], fontsize=8)
    axes.set_ylabel(f"step ÷ {floor}")
    axes.margins(x=0.01, y=0.15)
    legend = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))  # one of each text
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=2, frameon=False)
    report.save_figure(figure, path)


def draw_scaling(columns: dict[int, list[Run]], path: Path) -> None:
    """Draw speed-ups over the number of ranks, a line per stage with its name at its end."""
    figure, axes = report.new_figure(7, 4)
    ranks = [1, *columns]
    axes.plot(ranks, ranks, "--", color="#BBBBBB")
    axes.plot(ranks, [1] * len(ranks), "--", color="gray")
    ends = {"ideal": (ranks[-1], "#999999"), "one process": (1, "gray")}  # text: (height, color)
    for name, color in LINES.items():
        heights = [median(speed_ups(runs, name, n)) for n, runs in columns.items()]
        form = "o:" if name == "torch DDP" else "o-"  # it lies on 05's
        axes.plot(ranks, [1, *heights], form, linewidth=2.5, color=color)
        ends[LABELS.get(name, name)] = heights[-1], color
    lowest = -1.0
    for text, (height, color) in sorted(ends.items(), key=lambda end: end[1][0]):
        lowest = max(height, lowest + 0.045 * ranks[-1])  # texts do not cover each other
        axes.text(ranks[-1] + 0.15, lowest, text, va="center", color=color, fontweight="bold")
    axes.set_xticks(ranks)
    axes.set_xlim(1, 1.2 * ranks[-1])
    axes.set_title("Few calls scale; 99 calls don't")
    axes.set_xlabel("ranks, each a machine")
    axes.set_ylabel("times as fast as one process")
    axes.set_ylim(bottom=0)
    report.save_figure(figure, path)


def read_run(path: str) -> Run:
    """Return the p50s of a file; end with a line if it is no result of --json."""
    try:
        return p50s(json.loads(Path(path).read_text()))
    except (OSError, ValueError, LookupError, TypeError) as error:
        setup.fail(f"{path}: is not a result of --json with candidates ({error!r})")


def main() -> None:
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="[LABEL=]FILE.json", help="written by --json")
    add("--plot", type=setup.output_file, metavar="FILE", help="bars of every label, PNG")
    add("--scaling", type=setup.output_file, metavar="FILE", help="speed-up; labels are ranks")
    args = parser.parse_args()
    columns = {}
    for argument in args.files:
        label, _, path = argument.rpartition("=")
        columns.setdefault(label or path, []).append(read_run(path))
    names = list(next(iter(columns.values()))[0])
    print_runs(f"step ÷ {names[0]}", columns, ratios, names[0])
    setup.say()
    for baseline in [name for name in names if name in OF_TORCH]:
        print_runs(f"step ÷ {baseline}", columns, ratios, baseline)
        setup.say()
    print_runs("step, ms", columns, in_ms, "step_seconds")
    setup.say()
    print_runs("exposed, ms", columns, in_ms, "exposed_comm_seconds")
    if args.plot:
        draw(columns, args.plot)
    if not args.scaling:
        return
    for label, runs in columns.items():
        is_whole = all({NO_COMMUNICATION, *LINES} <= set(run) for run in runs)
        if not label.isdigit() or not is_whole:
            setup.fail(f"argument --scaling: {label!r} is not a number of ranks, with all stages")
    of_ranks = {int(label): runs for label, runs in columns.items()}
    rows = []
    for name in names:
        cells = [cell(speed_ups(runs, name, ranks)) for ranks, runs in of_ranks.items()]
        rows.append([name, *cells])
    setup.say()
    report.print_table(["speed-up over one process", *columns], rows)
    draw_scaling(of_ranks, args.scaling)


if __name__ == "__main__":
    main()
