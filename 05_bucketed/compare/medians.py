"""Results of --json beside each other: medians with their range, in tables and in a picture.

    python 05_bucketed/compare/medians.py results/before.json results/after.json
    python 05_bucketed/compare/medians.py results/compare.json --per-rank   (is a rank slower?)

Every file, of a stage or of `make compare`, gets a column. Files with the same label are runs of
the same thing and share a column, with the median of the runs, the lowest and the highest:

    python 05_bucketed/compare/medians.py loopback=results/loopback_{1..5}.json \\
        "1 Gbit/s"=results/slow_{1..3}.json --plot results/networks.png

The time of a run is the p50 over all steps of all its ranks, and a ratio is one of two candidates
of the same run.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import report, setup  # noqa: E402

# What a reader must know if it differs; and of the options all but those that name files.
HEAD = ("torch", "backend", "device", "device_name", "world_size", "threads_per_rank")
FILES = ("json", "plot", "trace", "save")
# In the picture; other names as they are.
STAGES = {"NaiveDDP": "02 naive", "FlatDDP": "03 flat", "OverlapDDP": "04 overlap"}
STAGES |= {"BucketedDDP": "05 buckets", "torch DDP, tuned": "DDP tuned"}

Run = dict[str, dict[str, float]]  # of one model: {candidate: {quantity: seconds}}


def models_of(result: dict) -> dict[str, dict]:
    """What was measured, by the size of the model: a stage measures one, `make compare` several."""
    return result.get("models") or {result["model"]["size"]: result}


def quantities_of(candidate: dict) -> list[str]:
    """The keys of its samples, step_seconds first."""
    others = [key for key in candidate if key.endswith("_seconds") and key != "step_seconds"]
    return ["step_seconds", *others]


def in_words(quantity: str) -> str:
    return quantity.removesuffix("_seconds").replace("_", " ")


def p50s(measured: dict) -> Run:
    """Of each candidate the p50 of every quantity, over all steps of all ranks."""
    run = {}
    for candidate in measured["candidates"]:
        p50 = {key: report.percentiles(candidate[key])[0] for key in quantities_of(candidate)}
        run[candidate["name"]] = p50
    return run


def read(path: str) -> tuple[dict, dict[str, Run]]:
    """A result and its runs by model. Ends with one line if the file is no result."""
    try:
        result = json.loads(Path(path).read_text())
        result["options"].items()
        return result, {size: p50s(of_size) for size, of_size in models_of(result).items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        setup.fail(f"{path}: is not a result of --json ({error!r})")


def print_differences(results: list[tuple[str, dict]]) -> None:
    """A line for whatever is not the same in all results; with each its label."""
    found = {}  # what it is: {label: its values}
    for label, result in results:
        values = {key: result.get(key) for key in HEAD}
        for option, value in result["options"].items():
            if option not in FILES:
                values["--" + option.replace("_", "-")] = value
        for key, value in values.items():
            found.setdefault(key, {}).setdefault(label, set()).add(str(value))
    for key, by_label in found.items():
        if len(set.union(*by_label.values())) > 1:
            texts = [f"{label}: {' and '.join(sorted(by_label[label]))}" for label in by_label]
            setup.say(f"{key} differs: {'; '.join(texts)}")


def ratio(run: Run, name: str, baseline: str) -> float:
    """How many times as long as the baseline's a candidate's step is."""
    return run[name]["step_seconds"] / run[baseline]["step_seconds"]


def milliseconds(run: Run, name: str, quantity: str) -> float:
    return 1000 * run[name][quantity]


def names_of(columns: dict[str, list[Run]]) -> list[str]:
    """Every candidate of any column, in order."""
    names = {}
    for runs in columns.values():
        names |= runs[0]
    return list(names)


def print_table(title: str, columns: dict[str, list[Run]], value, digits: int) -> None:
    """A row per candidate; its cells are value(run, name): the median, the lowest, the highest."""
    rows = []
    for name in names_of(columns):
        row = [name]
        for runs in columns.values():
            values = [value(run, name) for run in runs if name in run]
            row.append(f"{median(values):.{digits}f}" if values else "-")
            if len(values) > 1:
                row[-1] += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
        rows.append(row)
    setup.say()
    report.print_table([title, *columns], rows)


def print_ratios(title: str, columns: dict[str, list[Run]], baseline: str) -> None:
    print_table(f"{title}step ÷ {baseline}", columns, partial(ratio, baseline=baseline), digits=2)


def print_model(size: str, columns: dict[str, list[Run]]) -> None:
    """All tables of one model: ratios to the first candidate and to torch's, and milliseconds."""
    names = names_of(columns)
    for name in names:
        in_all = all(name in runs[0] for runs in columns.values())
        if in_all and (name == names[0] or name.startswith("torch ")):
            print_ratios(f"{size}, ", columns, name)
    first = next(iter(columns.values()))[0]
    for quantity in next(iter(first.values())):
        value = partial(milliseconds, quantity=quantity)
        print_table(f"{size}, {in_words(quantity)}, ms", columns, value, digits=1)


def print_per_rank(title: str, candidates: list[dict]) -> None:
    """A row for every candidate and rank: mean, least and most of its steps, in ms."""
    quantities = quantities_of(candidates[0])
    header = [title, "rank"]
    for quantity in quantities:
        header += [f"{in_words(quantity)}, ms", "min", "max"]
    rows = []
    for candidate in candidates:
        for rank in range(len(candidate["step_seconds"])):
            row = [candidate["name"], str(rank)]
            for quantity in quantities:
                seconds = candidate[quantity][rank]
                for value in (fmean(seconds), min(seconds), max(seconds)):
                    row.append(f"{1000 * value:.1f}")
            rows.append(row)
    setup.say()
    report.print_table(header, rows)
    setup.say("Means over the steps of a rank. In an all-reduce the ranks wait for the slowest:")
    setup.say("their steps are as long as its, and it is the one that exposes least.")


def draw(models: dict[str, dict[str, list[Run]]], path: Path) -> None:
    """A row for each model, a panel for each column: median steps, lines from lowest to highest."""
    from matplotlib.figure import Figure

    labels = list(next(iter(models.values())))
    width = min(7.0, 13 / len(labels))  # what is wider than a page becomes illegible
    size = width * len(labels), 3.8 * len(models)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots(len(models), len(labels), sharey=True, squeeze=False)
    for row, (model, columns) in zip(axes, models.items(), strict=True):
        row[0].set_ylabel(f"step ÷ {next(iter(columns[labels[0]][0]))}")
        for axis, label in zip(row, labels, strict=True):
            draw_panel(axis, columns[label])
            axis.set_title(f"{model}, {label}", fontsize=11)
    figure.suptitle("One training step; lines: lowest to highest run", fontsize=11)
    handles = axes[0][0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")


def draw_panel(axis, runs: list[Run]) -> None:
    """A bar per candidate, in steps of the first one; `one process` is a line across."""
    names = list(runs[0])
    floor = names[0]
    if "one process" in names:
        names.remove("one process")
        height = median(ratio(run, "one process", floor) for run in runs)
        axis.axhline(height, color="#CC79A7", linestyle="--", label="one process")
    computes = []
    waits = []
    size = min(10, 90 / len(names))  # of letters, so that neighbours do not meet
    for place, name in enumerate(names):
        steps = [ratio(run, name, floor) for run in runs]
        exposed = [run[name].get("exposed_comm_seconds", 0) for run in runs]
        floors = [run[floor]["step_seconds"] for run in runs]
        waits.append(median(wait / step for wait, step in zip(exposed, floors, strict=True)))
        computes.append(median(steps) - waits[-1])
        axis.vlines(place, min(steps), max(steps), color="black")
        text = f"{median(steps):.2f}"
        look = {"ha": "center", "va": "bottom", "fontsize": size}
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # no line crosses it
        axis.text(place, max(steps) + 0.05, text, bbox=behind, **look)
    labels = [STAGES.get(name, name).replace(" ", "\n") for name in names]
    places = range(len(names))
    axis.bar(places, computes, color="#56B4E9", label="compute, optimizer")
    axis.bar(places, waits, bottom=computes, color="#D55E00", label="exposed communication")
    axis.set_xticks(places, labels, fontsize=size - 1)
    axis.axhline(1, color="black", linestyle=":")
    axis.margins(y=0.1)


def main() -> None:
    os.environ["RANK"] = "0"  # whatever the shell's is: this is the only process
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    written = "written by --json, of one stage or of one `make compare` each"
    add("files", nargs="+", metavar="[LABEL=]FILE.json", help=written)
    add("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    add("--per-rank", action="store_true", help="also mean, min and max of every rank")
    args = parser.parse_args()
    results = []
    models = {}
    for argument in args.files:
        label, _, path = argument.rpartition("=")
        label = label or path
        result, runs = read(path)
        results.append((label, result))
        if models and list(runs) != list(models):
            setup.fail(f"{path}: measures {', '.join(runs)}, the first file {', '.join(models)}")
        for size, run in runs.items():
            others = models.setdefault(size, {}).setdefault(label, [])
            if others and list(others[0]) != list(run):
                setup.fail(f"{path}: has other candidates than the first file of {label}")
            others.append(run)
    print_differences(results)
    for size, columns in models.items():
        print_model(size, columns)
    if args.per_rank:
        for label, result in results:
            for size, measured in models_of(result).items():
                print_per_rank(f"{size}, {label}", measured["candidates"])
    if args.plot:
        draw(models, args.plot)


if __name__ == "__main__":
    main()
