"""Results of --json beside each other: medians with their range, in tables and in pictures.

    python 05_bucketed/compare/medians.py results/before.json results/after.json
    python 05_bucketed/compare/medians.py slow=results/slow_{1..3}.json --plot results/slow.png
    python 05_bucketed/compare/medians.py 2=results/of_2.json 8=results/of_8.json \\
        --scaling results/scaling.png                             (labels are numbers of ranks)

It reads what 02 to 06, fsdp, compare and bucket_sweep write. A file has a column of its own; files
with the same label share one, with the median of the runs, the lowest and the highest. The time of
a run is the p50 over all steps of all its ranks, and a ratio is one of two rows of the same run.
"""

import json
import sys
from pathlib import Path
from statistics import median

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent.parent)]

from rows import COLORS, LABELS, STAGES

from common import report, setup
from common.ladder import NO_COMMUNICATION, TORCH_DDP

STEP = "step_seconds"
EXPOSED = "exposed_comm_seconds"

Run = dict[str, dict[str, float]]  # {row: {quantity: p50 in seconds}}


def p50s(result: dict) -> Run:
    """Return of each row the p50 of every quantity, over all steps of all ranks."""
    run = {}
    for row in result["rows"]:
        quantities = [key for key in row if key.endswith("_seconds")]
        run[row["name"]] = {key: report.percentiles(row[key])[0] for key in quantities}
        if "waits_seconds" in row:  # it waits in forward and backward, too
            run[row["name"]][EXPOSED] = run[row["name"]]["waits_seconds"]
    return run


def read_run(path: str) -> Run:
    """Return the p50s of a file; end with a line if it is no result of --json."""
    try:
        return p50s(json.loads(Path(path).read_text()))
    except (OSError, ValueError, LookupError, TypeError) as error:
        setup.fail(f"{path}: is not a result of --json with rows ({error!r})")


def ratios(runs: list[Run], name: str, baseline: str, quantity: str = STEP) -> list[float]:
    """Return how many times as long as the baseline's step it takes in each run that has both."""
    both = [run for run in runs if name in run and baseline in run]
    return [run[name][quantity] / run[baseline][STEP] for run in both]


def in_ms(runs: list[Run], name: str, quantity: str) -> list[float]:
    """Return a quantity of this row in each run that has it, in ms."""
    return [1000 * run[name][quantity] for run in runs if quantity in run.get(name, ())]


def overheads(runs: list[Run], name: str, baseline: str) -> list[float]:
    """Return how many ms longer than the baseline's step it takes in each run that has both."""
    both = [run for run in runs if name in run and baseline in run]
    return [1000 * (run[name][STEP] - run[baseline][STEP]) for run in both]


def cell(values: list[float]) -> str:
    """Return their median, and of several the lowest and the highest, as text."""
    if len(values) > 1:
        return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return f"{values[0]:.2f}" if values else "-"


def print_runs(title: str, columns: dict[str, list[Run]], values, *arguments) -> None:
    """Print the table of all rows, a column per label: values(runs, name, *arguments)."""
    rows = []
    for name in dict.fromkeys(name for runs in columns.values() for name in runs[0]):
        cells = [cell(values(runs, name, *arguments)) for runs in columns.values()]
        rows.append([name, *cells])
    report.print_table([title, *columns], rows)


def draw(columns: dict[str, list[Run]], path: Path) -> None:
    """Draw a bar for each row of the first label: median steps ÷ the first row's.

    Yellow is communication that nothing hides.
    """
    label, runs = next(iter(columns.items()))
    floor = next(iter(runs[0]))
    names = [LABELS.get(name, name).replace(" ", "\n") for name in runs[0]]
    steps = [median(ratios(runs, name, floor)) for name in runs[0]]
    waits = [median(ratios(runs, name, floor, EXPOSED)) for name in runs[0]]
    rest = [step - wait for step, wait in zip(steps, waits, strict=True)]
    figure, axes = report.new_figure(9, 4)
    axes.bar(names, rest, color=COLORS["forward"])
    bars = axes.bar(names, waits, bottom=rest, color=COLORS["exposed communication"])
    axes.bar_label(bars, [f"{step:.2f}" for step in steps])
    axes.set(title=label, ylabel=f"step ÷ {floor}")
    axes.legend(["everything else", "exposed communication"], frameon=False)
    report.save_figure(figure, path)


def show_scaling(columns: dict[str, list[Run]], path: Path) -> None:
    """Print and draw how many times as fast as one process each row is, over the number of ranks.

    One process takes a step for each rank's. Rows that not all labels have are not drawn.
    """
    for label in columns:
        if not label.isdigit():
            setup.fail(f"argument --scaling: {label!r} is not a number of ranks")
    ticks = [1, *map(int, columns)]
    colors = {stage.name: stage.color for stage in STAGES}
    colors[NO_COMMUNICATION] = "gray"
    figure, axes = report.new_figure(7, 4)
    table = []
    for name in next(iter(columns.values()))[0]:
        speed_ups = []
        for label, runs in columns.items():
            found = ratios(runs, name, NO_COMMUNICATION)
            speed_ups.append([int(label) / ratio for ratio in found])
        table.append([name, *map(cell, speed_ups)])
        if all(speed_ups):
            heights = [1, *map(median, speed_ups)]
            form = "o-" if name in LABELS else "o:"  # torch's lies on 05's
            color = colors.get(name, "black")
            axes.plot(ticks, heights, form, color=color, label=LABELS.get(name, name))
    report.print_table(["speed-up over one process", *columns], table)
    axes.set_xticks(ticks)
    axes.set(title="Few calls scale; 99 calls don't", ylim=(0, None))
    axes.set(xlabel="ranks, each an emulated machine", ylabel="times as fast as one process")
    axes.legend(frameon=False)
    report.save_figure(figure, path)


def main() -> None:
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="[LABEL=]FILE.json", help="written by --json")
    add("--plot", type=setup.output_file, metavar="FILE", help="bars of the first label, PNG")
    add("--scaling", type=setup.output_file, metavar="FILE", help="speed-up; labels are ranks")
    args = parser.parse_args()
    columns = {}
    for argument in args.files:
        label, _, path = argument.rpartition("=")
        columns.setdefault(label or path, []).append(read_run(path))
    names = list(next(iter(columns.values()))[0])
    print_runs(f"step ÷ {names[0]}", columns, ratios, names[0])
    if TORCH_DDP in names:
        setup.say()
        print_runs(f"step ÷ {TORCH_DDP}", columns, ratios, TORCH_DDP)
    setup.say()
    print_runs(f"step − {names[0]}, ms", columns, overheads, names[0])
    for title, quantity in {"step, ms": STEP, "exposed, ms": EXPOSED}.items():
        setup.say()
        print_runs(title, columns, in_ms, quantity)
    if args.plot:
        draw(columns, args.plot)
    if args.scaling:
        setup.say()
        show_scaling(columns, args.scaling)


if __name__ == "__main__":
    main()
