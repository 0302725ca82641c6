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
PANELS = [  # of a run: what is shown, title, unit, how a bar's number is written
    ("train_seconds", "Total time", "s", "%.1f"),
    ("batch", "Mean time of a batch", "ms", "%.0f"),
    ("images_per_second", "Throughput", "images/s over all ranks", "%.0f"),
    ("speedup", "Speed-up in throughput, dashed: ideal", "× one device", "%.2f"),
]
# The options that runs must have in common to be compared; a checkpoint, too, belongs to these.
SETTINGS = ["device", "threads", "data", "decode", "scaling", "epochs", "image_size"]
SETTINGS += ["global_batch", "steps_per_epoch", "lr", "amp", "workers", "seed"]


def find_runs(folder: Path) -> list[dict]:
    """The run of one device, then by N those of the same settings; [] without one device.

    They are the JSON with what the table and the picture show of it; times of a batch are in ms.
    """
    runs = [json.loads(path.read_text()) for path in folder.glob("07_resnet_ddp_*.json")]
    runs.sort(key=lambda run: run["world_size"])
    single = runs[0]
    if single["world_size"] > 1:
        return []
    comparable = []
    for run in runs:
        run["phases"] = {phase: 1000 * numpy.mean(run[phase]) for phase in PHASES}
        run["batch"] = sum(run["phases"].values())
        run["speedup"] = run["images_per_second"] / single["images_per_second"]
        others = [name for name in SETTINGS if run["options"][name] != single["options"][name]]
        if others:
            say(f"{run['name']} is not compared: {', '.join(others)} differ from one device's")
        else:
            comparable.append(run)
    return comparable


def print_comparison(runs: list[dict]) -> None:
    header = ["", "total s", "batch ms", "data", "images/s", "speed-up", "in time"]
    header += ["efficiency", "accuracy"]
    rows = []
    for run in runs:
        row = [
            run["name"],
            f"{run['train_seconds']:.1f}",
            f"{run['batch']:.1f}",
            f"{run['phases']['data_seconds'] / run['batch']:.1%}",
            f"{run['images_per_second']:.1f}",
            f"{run['speedup']:.2f}",
            f"{runs[0]['train_seconds'] / run['train_seconds']:.2f}",
            f"{run['speedup'] / run['world_size']:.1%}",
            f"{run['evaluations'][-1]['accuracy']:.2%}",
        ]
        rows.append(row)
    print_table(header, rows)


def draw(runs: list[dict], path: Path) -> None:
    """Total time, time of a batch with its phases, throughput and speed-up: a bar for each run."""
    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    caption = "ResNet-18, {image_size} px, --global-batch {global_batch}, {scaling} scaling"
    figure.suptitle(caption.format(**runs[0]["options"]))
    names = [run["name"] for run in runs]
    for axes, panel in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        quantity, title, unit, number_format = panel
        bars = axes.bar(names, [run[quantity] for run in runs], width=0.6, color="#666666")
        axes.bar_label(bars, fmt=number_format, padding=2)
        axes.set(title=title, ylabel=unit)
        axes.margins(y=0.2)
        if quantity == "batch":
            below = numpy.zeros(len(runs))
            for phase, (name, colour) in PHASES.items():  # over the bars of the whole
                heights = [run["phases"][phase] for run in runs]
                axes.bar(names, heights, width=0.6, bottom=below, color=colour, label=name)
                below += heights
            axes.legend(reverse=True, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        if quantity == "speedup":
            ideal = [run["world_size"] for run in runs]
            axes.bar(names, ideal, width=0.6, fill=False, linestyle="dashed")
    figure.savefig(path)


def compare(folder: Path) -> None:
    """Compare and draw the runs in this folder, if there are one device and others."""
    runs = find_runs(folder)
    if len(runs) > 1:
        say()
        print_comparison(runs)
        draw(runs, folder / "speedup.png")
        say(f"written: {folder / 'speedup.png'}")
