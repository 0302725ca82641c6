"""Results of --json beside each other: medians with their range, in tables and in a picture.

    python 05_bucketed/compare/medians.py results/before.json results/after.json
    python 05_bucketed/compare/medians.py results/compare.json --per-rank   (is a rank slower?)

It reads what 02 to 06, fsdp, compare and bucket_sweep write. Every file gets a column. Files with
the same label are runs of the same thing and share a column, with the median of the runs, the
lowest and the highest:

    python 05_bucketed/compare/medians.py loopback=results/loopback_{1..5}.json \\
        "1 Gbit/s, 1 ms"=results/slow_{1..3}.json --plot results/networks.png

The time of a run is the p50 over all steps of all its ranks, and a ratio is one of two candidates
of the same run.
"""

import json
import sys
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from common import report, setup  # noqa: E402

# What a reader must know if it differs; and of the options all but these.
HEAD = ("torch", "backend", "device", "device_name", "world_size", "threads_per_rank")
NAMES = ("--json", "--plot", "--trace", "--save", "--label")
OF_TORCH = ("torch DDP", "torch ZeRO", "torch ZeRO view", "torch fully_shard")
BARS = {  # what stands below them; other names as they are
    "no communication": "no com-\nmunication",
    "NaiveDDP": "02\nnaive",
    "FlatDDP": "03\nflat",
    "OverlapDDP": "04\noverlap",
    "BucketedDDP": "05\nbuckets",
}

Run = dict[str, dict[str, float]]  # {candidate: {quantity: p50 in seconds}}


def samples_of(candidate: dict) -> dict[str, list[list[float]]]:
    """{quantity: [rank][step]}: what was measured of a candidate."""
    return {key: samples for key, samples in candidate.items() if key.endswith("_seconds")}


def p50s(result: dict) -> Run:
    """Of each candidate the p50 of every quantity, over all steps of all ranks."""
    run = {}
    for candidate in result["candidates"]:
        samples = samples_of(candidate)
        run[candidate["name"]] = {key: report.percentiles(samples[key])[0] for key in samples}
    return run


def read(path: str) -> tuple[dict, Run]:
    """A result and its run. Ends with one line if the file is no result."""
    try:
        result = json.loads(Path(path).read_text())
        result["options"].items()
        run = p50s(result)
        next(iter(run.values()))["step_seconds"]  # what all others are compared with
        return result, run
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        setup.fail(f"{path}: is not a result of --json with candidates ({error!r})")


def print_differences(results: list[tuple[str, dict]]) -> None:
    """A line for whatever is not the same in all results; with each its label."""
    found = {}  # what it is: {label: its values}
    for label, result in results:
        values = {key: result.get(key) for key in HEAD}
        for option, value in result["options"].items():
            values["--" + option.replace("_", "-")] = value
        for key, value in values.items():
            found.setdefault(key, {}).setdefault(label, set()).add(str(value))
    for key, by_label in found.items():
        if key not in NAMES and len(set.union(*by_label.values())) > 1:
            texts = [f"{label}: {' and '.join(sorted(by_label[label]))}" for label in by_label]
            setup.say(f"{key} differs: {'; '.join(texts)}")


def ratios(runs: list[Run], name: str, baseline: str, quantity="step_seconds") -> list[float]:
    """In each run: how many times as long as the baseline's step it takes; [] without either."""
    found = []
    for run in runs:
        if quantity in run.get(name, {}) and "step_seconds" in run.get(baseline, {}):
            found.append(run[name][quantity] / run[baseline]["step_seconds"])
    return found


def cell(values: list[float], digits: int) -> str:
    """Their median, and of several the lowest and the highest."""
    if not values:
        return "-"
    text = f"{median(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text


def print_ratios(columns: dict[str, list[Run]], baseline: str) -> None:
    """The table of all steps ÷ the baseline's, with a column per label."""
    names = dict.fromkeys(name for runs in columns.values() for name in runs[0])
    rows = []
    for name in names:
        rows.append([name, *[cell(ratios(runs, name, baseline), 2) for runs in columns.values()]])
    report.print_table([f"step ÷ {baseline}", *columns], rows)


def in_words(quantity: str) -> str:
    return quantity.removesuffix("_seconds").replace("_", " ")


def print_milliseconds(label: str, runs: list[Run]) -> None:
    """The table of one label, with a column per quantity."""
    rows = []
    for name, quantities in runs[0].items():
        cells = [cell([1000 * run[name][key] for run in runs], digits=1) for key in quantities]
        rows.append([name, *cells])
    report.print_table([f"ms, {label}", *map(in_words, quantities)], rows)


def print_per_rank(label: str, candidates: list[dict]) -> None:
    """A row for every candidate, quantity and rank: mean, least and most of its steps, in ms."""
    rows = []
    for candidate in candidates:
        for quantity, by_rank in samples_of(candidate).items():
            for rank, seconds in enumerate(by_rank):
                times = fmean(seconds), min(seconds), max(seconds)
                cells = [f"{1000 * time:.1f}" for time in times]
                rows.append([candidate["name"], in_words(quantity), str(rank), *cells])
    report.print_table([f"ms, {label}", "quantity", "rank", "mean", "min", "max"], rows)
    setup.say("Over the steps of a rank. In an all-reduce the ranks wait for the slowest:")
    setup.say("their steps are as long as its, and it is the one that exposes least.")


def draw(columns: dict[str, list[Run]], path: Path) -> None:
    """A panel per label, all on one scale: median steps ÷ the first one's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * max(len(columns), 1.4), 3.6), dpi=200, layout="constrained")
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axis, (label, runs) in zip(panels, columns.items(), strict=True):
        draw_panel(axis, runs)
        axis.set_title(label, fontsize=11)
    panels[0].set_ylabel(f"step ÷ {next(iter(runs[0]))}")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")


def draw_panel(axis, runs: list[Run]) -> None:
    """A bar per candidate, with its number; yellow is communication that nothing hides."""
    floor = next(iter(runs[0]))
    names = [name for name in runs[0] if name not in ("one process", "torch DDP, tuned")]
    steps = [median(ratios(runs, name, floor)) for name in names]
    waits = [median(ratios(runs, name, floor, "exposed_comm_seconds")) for name in names]
    computes = [step - wait for step, wait in zip(steps, waits, strict=True)]
    if "one process" in runs[0]:
        line = {"color": "#CC79A7", "linestyle": "--", "label": "one process with the whole batch"}
        axis.axhline(median(ratios(runs, "one process", floor)), **line)
    places = range(len(names))
    axis.bar(places, computes, color="#56B4E9", label="everything else")
    exposed = {"color": "#F0E442", "label": "exposed communication"}  # timeline.py's colour of it
    bars = axis.bar(places, waits, bottom=computes, **exposed)
    for text in axis.bar_label(bars, [f"{step:.2f}" for step in steps], padding=3, fontsize=9):
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # no line crosses it
    axis.set_xticks(places, [BARS.get(name, name.replace(" ", "\n")) for name in names], fontsize=8)
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    setup.forget_launcher()
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", metavar="[LABEL=]FILE.json", help="written by --json")
    add("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    add("--per-rank", action="store_true", help="also mean, min and max of every rank")
    args = parser.parse_args()
    results = []
    columns = {}
    for argument in args.files:
        label, _, path = argument.rpartition("=")
        label = label or path
        result, run = read(path)
        results.append((label, result))
        runs = columns.setdefault(label, [])
        if runs and list(runs[0]) != list(run):
            setup.fail(f"{path}: has other candidates than the first file of {label}")
        runs.append(run)
    print_differences(results)
    names = list(next(iter(columns.values()))[0])
    for baseline in [names[0], *[name for name in names if name in OF_TORCH]]:
        setup.say()
        print_ratios(columns, baseline)
    for label, runs in columns.items():
        setup.say()
        print_milliseconds(label, runs)
    if args.per_rank:
        for label, result in results:
            setup.say()
            print_per_rank(label, result["candidates"])
    if args.plot:
        draw(columns, args.plot)


if __name__ == "__main__":
    main()
