"""One table and one picture for JSON files of stages 02 to 06, such as before and after a change.

    python -m common.ladder.compare results/before.json results/after.json --plot results/change.png
    python -m common.ladder.compare results/run.json --per-rank        (is one of the ranks slower?)

To compare the rungs with each other, `make compare` (rungs.py) measures them in one run.
"""

import json
import os
import sys
from pathlib import Path
from statistics import fmean

from common.report import percentiles, print_table
from common.setup import Parser, fail, output_file, say

# Where these differ, step times say nothing about the stages.
SAME = ("world_size", "device", "backend", "model")
# Where these differ, the reader must know; of the options all but those that name files.
NOTED = ("torch", "device_name", "threads_per_rank")
FILES = ("json", "plot", "trace", "save")
# The candidates that are not the stage's own; the last three stand beside stage 06.
BASELINES = ("no sync", "torch DDP")
NOT_THE_STAGE = (*BASELINES, "AdamW", "torch ZeRO", "torch ZeRO view")


def read(paths: list[str]) -> list[dict]:
    """The results, in order.

    Ends with one line if a file is no result or was measured on something else than the first.
    """
    results = []
    for path in paths:
        result = read_one(path)
        for key in SAME:
            first = result[key]
            if results:
                first = results[0][key]
            if result[key] != first:
                differ = f"their {key} differ: {result[key]} and {first}"
                fail(f"{path}: cannot be compared with {paths[0]}, {differ}")
        results.append(result)
    return results


def read_one(path: str) -> dict:
    """The result in this file; ends with one line if there is none."""
    try:
        result = json.loads(Path(path).read_text())
        missing = [key for key in ("stage", "candidates", *SAME) if key not in result]
    except (OSError, ValueError) as error:
        fail(f"{path}: cannot be read ({error})")
    except TypeError:  # JSON, but nothing that has keys
        missing = ["stage"]
    if missing:
        fail(f"{path}: is not a result of --json, it has no {missing[0]!r}")
    return result


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


def labels(paths: list[str]) -> list[str]:
    """The files' names, or their whole paths where two have one name."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else paths


def median(candidate: dict, key: str) -> float:
    """In ms; 0 where the candidate has no such times."""
    if key not in candidate:
        return 0.0
    return 1000 * percentiles(candidate[key])[0]


def summarize(label: str, result: dict) -> dict:
    """The stage's own candidate in one run: medians in ms, ratios to the others of the same run."""
    own = next(one for one in result["candidates"] if one["name"] not in NOT_THE_STAGE)
    step = median(own, "step_seconds")
    exposed = median(own, "exposed_comm_seconds")
    optimizer = median(own, "optimizer_seconds")
    row = {"label": label, "name": own["name"]}
    row |= {"step": step, "exposed": exposed, "optimizer": optimizer}
    row |= {"compute": step - exposed - optimizer, "collectives": own.get("collectives_per_step")}
    row |= dict.fromkeys((*BASELINES, "floor"))
    for one in result["candidates"]:
        if one["name"] in BASELINES:
            row[one["name"]] = step / median(one, "step_seconds")
        if one["name"] == "no sync":
            row["floor"] = median(one, "step_seconds")
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


def print_per_rank(label: str, result: dict) -> None:
    """A row for every candidate and rank: mean, min and max of its steps."""
    rows = []
    for candidate in result["candidates"]:
        by_rank = candidate["step_seconds"]
        if not isinstance(by_rank[0], list):
            fail(f"argument --per-rank: {label} holds no samples by rank")
        for rank, steps in enumerate(by_rank):
            row = [candidate["name"], str(rank)]
            exposed = candidate.get("exposed_comm_seconds")
            for seconds in (steps, exposed and exposed[rank]):
                times = [fmean(seconds), min(seconds), max(seconds)] if seconds else []
                row += [f"{1000 * time:.1f}" for time in times] or ["-"] * 3
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
    written_by = "written by --json of stages 02 to 06"
    parser.add_argument("files", nargs="+", metavar="FILE.json", help=written_by)
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="the picture, a PNG")
    per_rank = "also mean, min and max of every rank"
    parser.add_argument("--per-rank", action="store_true", help=per_rank)
    args = parser.parse_args()
    results = read(args.files)
    by_label = dict(zip(labels(args.files), results, strict=True))
    for line in differences(by_label):
        say(line)
    rows = [summarize(label, result) for label, result in by_label.items()]
    print_rows(rows)
    if args.per_rank:
        for label, result in by_label.items():
            print_per_rank(label, result)
    if args.plot:
        draw(rows, results[0], args.plot)
        say(f"written: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
