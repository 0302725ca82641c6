"""07: compare the results of resnet_ddp.py, one device against N: a table and a picture.

resnet_ddp.py does so when it has written 07_resnet_ddp_N.json, N ranks, and that of one device is
there, too: speedup.png is drawn beside them.
"""

import json
from pathlib import Path

import numpy
from matplotlib.figure import Figure

from common.report import print_table
from common.setup import say

# Of a batch, from bottom to top: what is measured, its name and its colour (of Okabe and Ito's
# palette, which the colour-blind can tell apart).
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


def find_runs(folder: Path) -> list[dict]:
    """Returns the run of one device, then by N those that can be compared; [] without one device.

    They are the JSON, options and all in one, with what the table and the picture show of it.
    """
    results = [json.loads(path.read_text()) for path in folder.glob("07_resnet_ddp_*.json")]
    results = [result["options"] | result for result in results]
    results.sort(key=lambda result: result["world_size"])
    single = results[0]
    runs = []
    for run in results if single["world_size"] == 1 else []:
        run["name"] = f"DDP × {run['world_size']}" if runs else "single"
        run["phases"] = [1000 * numpy.mean(run[phase]) / run["dilation"] for phase in PHASES]
        run["total"] = run["train_seconds"] / run["dilation"]
        differing = [name for name in COMMON if run[name] != single[name]]
        if differing:
            say(f"{run['name']} is not compared: {', '.join(differing)} differ from one device's")
        else:
            runs.append(run)
    return runs


def print_comparison(runs: list[dict]) -> None:
    rows = []
    for run in runs:
        batch = sum(run["phases"])
        speedup = runs[0]["total"] / run["total"]
        row = [
            run["name"],
            f"{run['total']:.1f}",
            f"{batch:.1f}",
            f"{run['phases'][0] / batch:.1%}",
            f"{run['images'] / run['total']:.1f}",
            f"{speedup:.2f}",
            f"{speedup / run['world_size']:.1%}",
            f"{run['evaluations'][-1]['accuracy']:.2%}",
        ]
        rows.append(row)
    header = ["", "total s", "batch ms", "data", "images/s", "speed-up", "efficiency", "accuracy"]
    print_table(header, rows)


def draw(runs: list[dict], path: Path) -> None:
    """A bar for each run, a batch by its phases, within the ideal: that of one device ÷ N."""
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    names = [run["name"] for run in runs]
    below = 0
    heights_of_phases = numpy.transpose([run["phases"] for run in runs])
    for (name, colour), heights in zip(PHASES.values(), heights_of_phases, strict=True):
        bars = axes.bar(names, heights, width=0.6, bottom=below, color=colour, label=name)
        below += heights
    axes.bar_label(bars, [f"{batch:.0f} ms" for batch in below], padding=2)
    ideal = [below[0] / run["world_size"] for run in runs]
    axes.bar(names, ideal, width=0.7, fill=False, linestyle="--", label="one device ÷ N")
    axes.legend(reverse=True, loc="upper left", bbox_to_anchor=(1, 1))
    title = "ResNet-18: mean time of a batch of {global_batch} images of {image_size} px"
    axes.set(title=title.format(**runs[0]), ylabel="ms")
    axes.margins(y=0.1)
    figure.savefig(path)


def compare(folder: Path) -> None:
    """Compare and draw the runs in this folder, if there are one device and others."""
    runs = find_runs(folder)
    if len(runs) > 1:
        say()
        print_comparison(runs)
        draw(runs, folder / "speedup.png")
        say(f"written: {folder / 'speedup.png'}")
