"""07: compare one device with N in the results of resnet_ddp.py: a table and a picture.

resnet_ddp.py calls this after a run with DDP, on the folder of its results. What was run with other
settings is named and left out. Of several pairs of runs, each in a folder of its own, it shows the
one whose speed-up is the median:

    python 07_resnet_ddp/compare_runs.py results/pair_1 results/pair_2 results/pair_3
"""

import json
import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.report import new_figure, print_table, save_figure
from common.setup import Parser, add_plot_arguments, say

# Of a batch, from bottom to top: what is measured, its name and its color.
PHASES = {
    "data_seconds": ("data", "#CC79A7"),
    "forward_seconds": ("forward", "#56B4E9"),
    "backward_seconds": ("backward", "#0072B2"),
    "exposed_comm_seconds": ("exposed all-reduce", "#F0E442"),
    "optimizer_seconds": ("optimizer", "#999999"),
}
# What runs must have in common to be compared.
COMMON = ["torch", "torchvision", "backend", "network", "device_name", "settings", "workers"]
COMMON += ["epochs", "images"]  # both: after a checkpoint fewer images are measured


def read_run(path: Path) -> dict:
    """Return the JSON, options and all in one, with what the table and the picture show of it."""
    result = json.loads(path.read_text())
    run = result["options"] | result
    run["name"] = f"DDP × {run['world_size']}" if run["world_size"] > 1 else "single"
    run["phases"] = [1000 * numpy.mean(run[phase]) for phase in PHASES]
    return run


def find_runs(folder: Path) -> list[dict]:
    """Return the run of one device, then by N those that can be compared; [] without one device."""
    runs = [read_run(path) for path in folder.glob("07_resnet_ddp_*.json")]
    runs.sort(key=lambda run: run["world_size"])
    if not runs or runs[0]["world_size"] > 1:
        return []
    compared = []
    for run in runs:
        differing = [name for name in COMMON if run[name] != runs[0][name]]
        if differing:
            say(f"{run['name']} is not compared: {', '.join(differing)} differ from one device's")
        else:
            compared.append(run)
    return compared


def speed_up(runs: list[dict]) -> float:
    """Return how many times as fast the last run is as the first one."""
    return runs[0]["train_seconds"] / runs[-1]["train_seconds"]


def print_comparison(runs: list[dict]) -> None:
    rows = []
    for run in runs:
        batch = sum(run["phases"])
        speedup = speed_up([runs[0], run])
        row = [
            run["name"],
            f"{run['train_seconds']:.1f}",
            f"{batch:.1f}",
            f"{run['phases'][0] / batch:.1%}",
            f"{run['images'] / run['train_seconds']:.1f}",
            f"{speedup:.2f}",
            f"{speedup / run['world_size']:.1%}",
            f"{run['evaluations'][-1]['accuracy']:.2%}",
        ]
        rows.append(row)
    header = ["", "total s", "batch ms", "data", "images/s", "speed-up", "efficiency", "accuracy"]
    print_table(header, rows)
    began = sorted(run["started"][:16] for run in runs)  # of an earlier day, if it was left there
    say(f"the first of these runs began at {began[0]} UTC, the last one at {began[-1]}")


def draw(runs: list[dict], path: Path) -> None:
    """Draw a bar for each run, a batch by its phases, beside the ideal, that of one device ÷ N."""
    figure, axes = new_figure(7, 4)
    names = [run["name"] for run in runs]
    below = 0
    heights_of_phases = numpy.transpose([run["phases"] for run in runs])
    for (name, color), heights in zip(PHASES.values(), heights_of_phases, strict=True):
        bars = axes.bar(names, heights, width=0.6, bottom=below, color=color, label=name)
        below += heights
    axes.bar_label(bars, [f"{batch:.0f} ms" for batch in below], padding=2)
    ideal = [below[0] / run["world_size"] for run in runs]
    axes.bar(names, ideal, width=0.7, fill=False, linestyle="--", label="one device ÷ N")
    axes.legend(reverse=True, loc="upper left", bbox_to_anchor=(1, 1))
    title = f"{names[-1]}: {speed_up(runs):.2f} times as fast as one device"
    axes.set(title=title, ylabel="mean time of a batch, ms")
    axes.margins(y=0.1)
    save_figure(figure, path)


def show_median(folders: list[Path], path: Path | None) -> None:
    """Print and draw the runs of the folder whose speed-up is the median; say the range.

    Folders without a run of one device and another one are passed over.
    """
    pairs = sorted((runs for runs in map(find_runs, folders) if len(runs) > 1), key=speed_up)
    if not pairs:
        return
    runs = pairs[len(pairs) // 2]
    say()
    print_comparison(runs)
    if len(pairs) > 1:
        low, middle, high = (f"{speed_up(pair):.2f}" for pair in (pairs[0], runs, pairs[-1]))
        say(f"{runs[-1]['name']}, median of {len(pairs)} pairs: {middle} ({low} to {high})")
    if path:
        draw(runs, path)


if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="--results of runs")
    add_plot_arguments(parser, "speedup.png")
    args = parser.parse_args()
    show_median(args.folders, args.plot)
