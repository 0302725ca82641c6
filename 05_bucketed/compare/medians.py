"""Results of --json beside each other: medians with their range, in tables and in pictures.

    python 05_bucketed/compare/medians.py results/before.json results/after.json

It reads what 02 to 06, fsdp, compare and bucket_sweep write. A file has a column of its own. Files
with the same label share one, with the median of the runs, the lowest and the highest:

    python 05_bucketed/compare/medians.py loopback=results/loopback_{1..5}.json \\
        "1 Gbit/s, 1 ms"=results/slow_{1..3}.json --plot results/networks.png

Runs of compare with several numbers of ranks show how it scales, beside what predict.py predicts:

    python 05_bucketed/compare/medians.py 2=results/of_2.json 4=results/of_4.json \\
        8=results/of_8.json --predicted results/predict.json --scaling results/scaling.png

The time of a run is the p50 over all steps of all its ranks, divided by its dilation, and a ratio
is one of two candidates of the same run.
"""

import json
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import report, setup  # noqa: E402

OF_TORCH = ("torch DDP", "torch ZeRO", "torch ZeRO view", "torch fully_shard")
LINES = {  # color in the picture of scaling
    "NaiveDDP": "#E69F00",
    "FlatDDP": "#A6761D",
    "OverlapDDP": "#882255",
    "BucketedDDP": "#332288",
    "torch DDP": "black",
}
SHORT = {  # in pictures; other names as they are
    "NaiveDDP": "02 naive",
    "OverlapDDP, after backward": "04, after backward",
    "OverlapDDP": "04 overlap",
    "FlatDDP": "03 flat",
    "BucketedDDP, after backward": "05, after backward",
    "BucketedDDP": "05 buckets",
}

Run = dict[str, dict[str, float]]  # {candidate: {quantity: p50 in seconds}}


def p50s(result: dict) -> Run:
    """Of each candidate the p50 of every quantity, over all steps of all ranks, not dilated."""
    run = {}
    for each in result["candidates"]:
        quantities = [key for key in each if key.endswith("_seconds")]
        p50 = {key: report.percentiles(each[key])[0] / result["dilation"] for key in quantities}
        run[each["name"]] = p50
    return run


def ratios(runs: list[Run], name: str, baseline: str, quantity="step_seconds") -> list[float]:
    """In each run: how many times as long as the baseline's step it takes; [] without either."""
    both = [run for run in runs if name in run and baseline in run]
    return [run[name][quantity] / run[baseline]["step_seconds"] for run in both]


def speed_ups(runs: list[Run], name: str) -> list[float]:
    """In each run: how many times as fast as one process with the batch of all ranks."""
    return ratios(runs, "one process", name)


def milliseconds(runs: list[Run], name: str) -> list[float]:
    return [1000 * run[name]["step_seconds"] for run in runs if name in run]


def cell(values: list[float]) -> str:
    """Their median, and of several the lowest and the highest."""
    if len(values) > 1:
        return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
    return f"{values[0]:.2f}" if values else "-"


def print_table(title: str, columns: dict[str, list[Run]], values, *arguments) -> None:
    """A row per candidate, a column per label: the cell of values(runs, candidate, *arguments)."""
    rows = []
    for name in dict.fromkeys(name for runs in columns.values() for name in runs[0]):
        cells = [cell(values(runs, name, *arguments)) for runs in columns.values()]
        rows.append([name, *cells])
    report.print_table([title, *columns], rows)


def new_picture(width: float, height: float):
    """A figure of this size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, path: Path) -> None:
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")


def draw(columns: dict[str, list[Run]], path: Path) -> None:
    """A bar for the first candidate, and per label one for each other: median steps ÷ it.

    Yellow is communication that nothing hides.
    """
    floor = next(iter(next(iter(columns.values()))[0]))
    figure, axes = new_picture(max(7, 5 * len(columns)), 4)
    ticks = {0: floor}  # place: text
    axes.bar(0, 1, color="#56B4E9", label="everything else")
    for label, runs in columns.items():
        first = place = max(ticks) + 1.5
        for name in [name for name in runs[0] if name not in (floor, "one process")]:
            step = median(ratios(runs, name, floor))
            wait = median(ratios(runs, name, floor, "exposed_comm_seconds"))
            axes.bar(place, step - wait, color="#56B4E9")
            axes.bar(
                place, wait, bottom=step - wait, color="#F0E442", label="exposed communication"
            )
            axes.text(place, step, f"{step:.2f}", ha="center", va="bottom", fontsize=9)
            ticks[place] = SHORT.get(name, name)
            place += 1
        axes.text((first + place) / 2, 1, label, transform=axes.get_xaxis_transform(), ha="center")
        if alone := ratios(runs, "one process", floor):
            line = {"color": "#CC79A7", "linestyle": "--", "label": "one process"}
            axes.hlines(median(alone), first - 0.5, place - 0.5, **line)
    axes.set_xticks(list(ticks), [text.replace(" ", "\n") for text in ticks.values()], fontsize=8)
    axes.set_ylabel(f"step ÷ {floor}")
    axes.margins(x=0.01, y=0.15)
    legend = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))  # one of each text
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def draw_scaling(columns: dict[int, list[Run]], predicted: dict[int, list[Run]], path: Path):
    """Speed-ups over the number of ranks, a line per stage; thin: as predicted."""
    figure, axes = new_picture(7, 4)
    axes.plot([1, *columns], [1, *columns], "--", color="#BBBBBB", label="ideal")
    axes.axhline(1, color="#CC79A7", linestyle="--", label="one process")
    for name, color in LINES.items():
        heights = [median(speed_ups(runs, name)) for runs in columns.values()]
        line = {"color": color, "label": SHORT.get(name, name)}
        form = "o:" if name == "torch DDP" else "o-"  # it lies on 05's
        axes.plot([1, *columns], [1, *heights], form, linewidth=2.5, **line)
        foreseen = [value for runs in predicted.values() for value in speed_ups(runs, name)]
        axes.plot([1, *predicted][: 1 + len(foreseen)], [1, *foreseen], color=color, linewidth=0.8)
    axes.set_xticks([1, *columns])
    axes.plot([], [], color="gray", linewidth=0.8, label="predicted from two ranks")
    axes.set_xlabel("ranks, each a machine")
    axes.set_ylabel("times as fast as one process")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    save(figure, path)


def main() -> None:
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="[LABEL=]FILE.json", help="written by --json")
    add("--plot", type=setup.output_file, metavar="FILE", help="bars of every label, PNG")
    add("--predicted", metavar="FILE", help="what predict.py has written")
    add("--scaling", type=setup.output_file, metavar="FILE", help="speed-up; labels are ranks")
    args = parser.parse_args()
    columns = {}
    for argument in args.files:
        label, _, path = argument.rpartition("=")
        runs = columns.setdefault(label or path, [])
        try:
            runs.append(p50s(json.loads(Path(path).read_text())))
        except (OSError, ValueError, LookupError, TypeError) as error:
            setup.fail(f"{path}: is not a result of --json with candidates ({error!r})")
    names = list(next(iter(columns.values()))[0])
    predicted = {}
    if args.predicted:
        of_ranks = json.loads(Path(args.predicted).read_text())["predicted"]
        predicted = {int(ranks): [run] for ranks, run in of_ranks.items()}
    more = columns | {f"{ranks} ranks, predicted": predicted[ranks] for ranks in predicted}
    print_table(f"step ÷ {names[0]}", more, ratios, names[0])
    setup.say()
    for baseline in [name for name in names if name in OF_TORCH]:
        print_table(f"step ÷ {baseline}", columns, ratios, baseline)
        setup.say()
    if "one process" in names:
        print_table("speed-up over one process", more, speed_ups)
        setup.say()
    print_table("step, ms", columns, milliseconds)
    if args.plot:
        draw(columns, args.plot)
    if args.scaling:
        draw_scaling({int(label): columns[label] for label in columns}, predicted, args.scaling)


if __name__ == "__main__":
    main()
