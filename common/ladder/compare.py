"""One table and one picture of several --json files.

Of stages 02 to 06, such as before and after a change:

    python -m common.ladder.compare results/before.json results/after.json --plot results/change.png
    python -m common.ladder.compare results/run.json --per-rank        (is one of the ranks slower?)

Of `make compare` and `make hosts`, such as the rungs on several networks, each with its label:

    python -m common.ladder.compare loopback=results/compare.json "1 Gbit/s"=results/hosts.json \\
        --plot results/networks.png
"""

import json
import os
import sys
from pathlib import Path
from statistics import fmean

from common.ladder import draw_rungs
from common.report import milliseconds, percentiles, print_table, ratio
from common.setup import Parser, fail, output_file, say

# Where these differ, the reader must know; of the options all but those that name files.
NOTED = ("torch", "device_name", "threads_per_rank")
FILES = ("json", "plot", "trace", "save")
# The candidates that are not the stage's own; the last three stand beside stage 06.
BASELINES = ("no sync", "torch DDP")
NOT_THE_STAGE = (*BASELINES, "AdamW", "torch ZeRO", "torch ZeRO view")


def read(arguments: list[str]) -> dict[str, dict]:
    """The results by label, in order.

    Ends with one line if a file is no result or was measured on something else than the first.
    """
    files = [split_label(argument) for argument in arguments]
    labels = [label for label, _ in files]
    if len(set(labels)) < len(labels):
        labels = [path for _, path in files]
    results = {}
    for label, (_, path) in zip(labels, files, strict=True):
        result = read_one(path)
        first = next(iter(results.values()), result)
        for key, expected in conditions(first).items():
            found = conditions(result).get(key)
            if found != expected:
                differ = f"their {key} differ: {found} and {expected}"
                fail(f"{label}: cannot be compared with {labels[0]}, {differ}")
        results[label] = result
    return results


def split_label(argument: str) -> tuple[str, str]:
    """LABEL=FILE in two; without a label it is the file's name."""
    label, _, path = argument.rpartition("=")
    if not label or Path(argument).exists():
        return Path(argument).name, argument
    return label, path


def read_one(path: str) -> dict:
    """The result in this file; ends with one line if there is none."""
    try:
        result = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"{path}: cannot be read ({error})")
    try:
        if is_of_rungs(result):
            for measured in result["models"].values():
                draw_rungs.medians(measured)
        else:
            result["candidates"]
        conditions(result)
    except KeyError as error:
        fail(f"{path}: is not a result of --json, it has no {error}")
    except TypeError:  # JSON, but nothing that has keys
        fail(f"{path}: is not a result of --json, it has no 'stage'")
    return result


def is_of_rungs(result: dict) -> bool:
    return result["stage"] == "rungs"


def conditions(result: dict) -> dict:
    """Where these differ, step times say nothing about the stages."""
    found = {key: result[key] for key in ("world_size", "device", "backend")}
    if is_of_rungs(result):
        found["models"] = {size: of["model"] for size, of in result["models"].items()}
    else:
        found["model"] = result["model"]
    return found


def differences(results: dict[str, dict]) -> list[str]:
    """A line for everything that is not the same in all of these results (file -> result)."""
    found = {}
    for name, result in results.items():
        about = {key: result.get(key) for key in NOTED}
        for key, value in result.get("options", {}).items():
            if key not in FILES:
                about["--" + key.replace("_", "-")] = value
        for key, value in about.items():
            found.setdefault(key, {})[name] = value
    lines = []
    for key, values in found.items():
        if len({str(values.get(name)) for name in results}) > 1:
            shown = [f"{name}: {values.get(name)}" for name in results]
            lines.append(f"{key} differs: " + "; ".join(shown))
    return lines


def median(candidate: dict, key: str) -> float:
    """In ms; 0 where the candidate has no such times."""
    if key not in candidate:
        return 0.0
    return 1000 * percentiles(candidate[key])[0]


def summarize(label: str, result: dict) -> dict:
    """The stage's own candidate in one run: medians in ms, ratios to the others of the same run."""
    by_name = {candidate["name"]: candidate for candidate in result["candidates"]}
    name = next(name for name in by_name if name not in NOT_THE_STAGE)
    own = by_name[name]
    step = median(own, "step_seconds")
    exposed = median(own, "exposed_comm_seconds")
    optimizer = median(own, "optimizer_seconds")
    row = {
        "label": label,
        "name": name,
        "step": step,
        "compute": step - exposed - optimizer,
        "exposed": exposed,
        "optimizer": optimizer,
        "collectives": own.get("collectives_per_step"),
        "floor": None,
    }
    for baseline in BASELINES:
        row[baseline] = None
        if baseline in by_name:
            row[baseline] = step / median(by_name[baseline], "step_seconds")
    if "no sync" in by_name:
        row["floor"] = median(by_name["no sync"], "step_seconds")
    return row


def print_rows(rows: list[dict]) -> None:
    """The table; "-" where there is nothing to say."""
    first_of_wrapper = {}
    table = []
    for row in rows:
        before = first_of_wrapper.setdefault(row["name"], row)
        cells = [row["label"], row["name"], f"{row['step']:.1f}"]
        for name in BASELINES:
            cells.append("-" if row[name] is None else f"{row[name]:.3f}")
        cells.append(f"{row['exposed']:.1f}")
        cells.append("-" if row["collectives"] is None else str(row["collectives"]))
        if row is before:
            cells.append("-")
        else:
            cells.append(f"{100 * (row['step'] / before['step'] - 1):+.1f} %")
        table.append(cells)
    header = ["file", "wrapper", "step ms", "/no sync", "/torch DDP"]
    print_table([*header, "exposed ms", "collectives", "change"], table)
    say("Medians over all steps of all ranks; ratios to the candidates of the same run; change: of")
    say("the step, against the first file with the same wrapper, which may have met the machine in")
    say("another mood: compare the ratios. The broadcasts of 06 count as the optimizer's time.")


def print_rungs(results: dict[str, dict]) -> None:
    """A row for each model, run and rung."""
    rows = []
    for size in next(iter(results.values()))["models"]:
        for label, result in results.items():
            measured = result["models"][size]
            medians = draw_rungs.medians(measured)
            by_name = {candidate["name"]: candidate for candidate in measured["candidates"]}
            for name, candidate in by_name.items():
                bar = by_name["torch DDP"]["step_seconds"]
                row = [f"{size}, {label}", name, f"{medians[name]['step']:.3f}"]
                row.append(milliseconds(candidate["exposed_comm_seconds"])[0])
                row.append(ratio(candidate["step_seconds"], bar))
                rows.append([*row, str(candidate["collectives_per_step"])])
    header = ["model, network", "rung", "/no sync", "exposed, ms", "/torch DDP", "all-reduces"]
    print_table(header, rows)
    say("p50 over all steps of all ranks; ratios to no sync and torch DDP of the same run.")


def spread(seconds: list[float]) -> list[str]:
    """Mean, min and max, in ms."""
    return [f"{1000 * value:.1f}" for value in (fmean(seconds), min(seconds), max(seconds))]


def print_per_rank(label: str, result: dict) -> None:
    """A row for every candidate and rank: mean, min and max of its steps."""
    rows = []
    for candidate in result["candidates"]:
        by_rank = candidate["step_seconds"]
        if not isinstance(by_rank[0], list):
            fail(f"argument --per-rank: {label} holds no samples by rank")
        for rank, steps in enumerate(by_rank):
            row = [candidate["name"], str(rank), *spread(steps)]
            if "exposed_comm_seconds" in candidate:
                row += spread(candidate["exposed_comm_seconds"][rank])
            else:
                row += ["-"] * 3
            rows.append(row)
    say(f"\n{label}, by rank, in ms")
    print_table(["", "rank", "step", "min", "max", "exposed", "min", "max"], rows)
    say("step, exposed: means over the steps of one rank. In an all-reduce the ranks wait for the")
    say("slowest: its steps are as long as theirs, but it is the one that exposes least.")


def draw(rows: list[dict], result: dict, path: Path) -> None:
    """A stacked bar per run: compute, exposed communication, optimizer.

    In steps without synchronization of the same run where every run has them, else in ms.
    """
    from matplotlib.figure import Figure

    relative = all(row["floor"] for row in rows)
    unit = "÷ no sync of its run" if relative else "ms"
    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    parts = [
        ("compute", "compute", "#56B4E9"),
        ("exposed", "exposed communication", "#D55E00"),
        ("optimizer", "optimizer", "#999999"),
    ]
    positions = list(range(len(rows)))
    bottom = [0.0] * len(rows)
    for key, label, color in parts:
        heights = [row[key] / (row["floor"] if relative else 1) for row in rows]
        axes.bar(positions, heights, bottom=bottom, color=color, width=0.6, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 9}
    for position, (row, height) in enumerate(zip(rows, bottom, strict=True)):
        text = f"{height:.2f}" if relative else f"{height:.0f} ms"
        if row["torch DDP"]:
            text += f"\n{row['torch DDP']:.2f} × torch DDP"
        axes.annotate(text, (position, height), **above)
    where = "{world_size} ranks, {backend} on {device}".format(**result)
    axes.set_title(f"{result['model']['size']} model, {where}")
    axes.set_ylabel(f"median training step, {unit}")
    axes.set_ylim(0, 1.25 * max(bottom))
    axes.set_xticks(positions, [f"{row['label']}\n{row['name']}" for row in rows], fontsize=9)
    axes.legend(ncols=3, loc="upper center", fontsize=9)
    figure.savefig(path, format="png")


def main() -> None:
    os.environ["RANK"] = "0"  # whatever the shell's is: this is the only process
    parser = Parser(__doc__)
    written_by = "written by --json, of one stage or of one `make compare` each"
    parser.add_argument("files", nargs="+", metavar="[LABEL=]FILE.json", help=written_by)
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="the picture, a PNG")
    per_rank = "also mean, min and max of every rank"
    parser.add_argument("--per-rank", action="store_true", help=per_rank)
    args = parser.parse_args()
    results = read(args.files)
    first = next(iter(results.values()))
    if is_of_rungs(first):
        print_rungs(results)
        if args.plot:
            draw_rungs.draw_networks(results, args.plot)
        return
    for line in differences(results):
        say(line)
    rows = [summarize(label, result) for label, result in results.items()]
    print_rows(rows)
    if args.per_rank:
        for label, result in results.items():
            print_per_rank(label, result)
    if args.plot:
        draw(rows, first, args.plot)
        say(f"written: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
