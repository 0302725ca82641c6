"""One table and one picture for the JSON files of stages 02 to 06, or of two runs of one stage, before and after a change.

make compare                                                      (runs the stages with the same settings first)
python -m common.compare results/before.json results/after.json --plot results/compare.png
"""

import argparse
import json
import sys
from pathlib import Path

from common.report import percentiles, print_table
from common.setup import Parser, fail, output_file

SAME = (
    "world_size",
    "device",
    "backend",
    "model",
)  # where these differ, step times say nothing about the stages
BASELINES = ("no sync", "torch DDP")
NOT_THE_STAGE = (
    *BASELINES,
    "AdamW",
    "torch ZeRO",
    "torch ZeRO view",
)  # the last three stand beside stage 06


def read(paths: list[str]) -> list[dict]:
    """The results, in order. Ends with one line if a file is no result or was measured on something else."""
    results = []
    for path in paths:
        try:
            result = json.loads(Path(path).read_text())
            missing = [key for key in ("stage", "candidates", *SAME) if key not in result]
        except (OSError, ValueError) as error:
            fail(f"{path}: cannot be read ({error})")
        except TypeError:
            missing = ["stage"]
        if missing:
            fail(f"{path}: is not a result of --json, it has no {missing[0]!r}")
        for key in SAME:
            first = results[0][key] if results else result[key]
            if result[key] != first:
                fail(
                    f"{path}: cannot be compared with {paths[0]}, their {key} differ: {result[key]} and {first}"
                )
        results.append(result)
    return results


def summarize(result: dict) -> dict:
    """The stage's own candidate in one run: medians in ms, ratios to the other candidates of the same run."""
    median = {
        one["name"]: 1000 * percentiles(one["step_seconds"])[0] for one in result["candidates"]
    }
    own = next(one for one in result["candidates"] if one["name"] not in NOT_THE_STAGE)
    exposed, optimizer = (
        1000 * percentiles(own[key])[0] if key in own else 0.0
        for key in ("exposed_comm_seconds", "optimizer_seconds")
    )
    step = median[own["name"]]
    return {
        "stage": result["stage"],
        "name": own["name"],
        "step": step,
        "exposed": exposed,
        "optimizer": optimizer,
        "compute": step - exposed - optimizer,
        "collectives": own.get("collectives_per_step"),
        **{name: step / median[name] if name in median else None for name in BASELINES},
    }


def draw(rows: list[dict], result: dict, path: Path) -> None:
    """A stacked bar per run: compute, exposed communication, optimizer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    labels = [f"{row['stage']}\n{row['name']}" for row in rows]
    positions, bottom = list(range(len(rows))), [0.0] * len(rows)
    for part, color in (("compute", "#56B4E9"), ("exposed", "#D55E00"), ("optimizer", "#999999")):
        heights = [row[part] for row in rows]
        name = "exposed communication" if part == "exposed" else part
        axes.bar(positions, heights, bottom=bottom, color=color, width=0.6, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for position, row in zip(positions, rows, strict=True):
        text = f"{row['step']:.0f} ms" + (
            f"\n{row['torch DDP']:.2f} × torch DDP" if row["torch DDP"] else ""
        )
        axes.annotate(
            text,
            (position, row["step"]),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    model = result["model"]
    axes.set(
        ylabel="training step (median), ms",
        ylim=(0, 1.25 * max(row["step"] for row in rows)),
        title=f"{model['size']} model, {result['world_size']} ranks, {result['backend']} on {result['device']}",
    )
    axes.set_xticks(positions, labels, fontsize=9)
    axes.legend(ncols=3, loc="upper center", fontsize=9)
    figure.savefig(path, format="png")


def main() -> None:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE.json", help="written by --json of stages 02 to 06"
    )
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="the picture, a PNG")
    args = parser.parse_args()
    results = read(args.files)
    rows = [summarize(result) for result in results]

    def ratio(value):
        return "-" if value is None else f"{value:.3f}"

    first_of_stage = {}
    table = []
    for row in rows:
        before = first_of_stage.setdefault(row["stage"], row)
        change = "-" if before is row else f"{100 * (row['step'] / before['step'] - 1):+.1f} %"
        table.append(
            [
                row["stage"],
                row["name"],
                f"{row['step']:.1f}",
                ratio(row["no sync"]),
                ratio(row["torch DDP"]),
                f"{row['exposed']:.1f}",
                "-" if row["collectives"] is None else str(row["collectives"]),
                change,
            ]
        )
    header = [
        "stage",
        "wrapper",
        "step ms",
        "/no sync",
        "/torch DDP",
        "exposed ms",
        "collectives",
        "change",
    ]
    print_table(header, table)
    print(
        "Medians over all steps of all ranks; ratios to the candidates of the same run; change: of the step, against the\n"
        "first file of the same stage. The optimizer of 06 is sharded, and its broadcasts count as the optimizer's time."
    )
    if args.plot:
        draw(rows, results[0], args.plot)
        print(f"picture: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
