"""07: compare the results of resnet_ddp.py, one device against N: a table and a picture.

resnet_ddp.py does so when it has written 07_ddp_N.json and 07_single.json is there, too:
speedup.png is drawn beside them.
"""

import json
from pathlib import Path

import numpy

# Of a batch, from bottom to top: what is measured, its name and its colour (of Okabe and Ito's
# palette, which the colour-blind can tell apart).
PARTS = {
    "data_seconds": ("data", "#CC79A7"),
    "forward_seconds": ("forward", "#56B4E9"),
    "backward_seconds": ("backward", "#0072B2"),
    "exposed_comm_seconds": ("exposed all-reduce", "#D55E00"),
    "optimizer_seconds": ("optimizer", "#999999"),
}

# What runs must have in common to be compared, of the result's head and of its options; a
# checkpoint, too, belongs to these.
HEAD = ["device", "threads_per_rank", "data"]
OPTIONS = ["scaling", "epochs", "image_size", "global_batch", "steps_per_epoch", "lr"]
OPTIONS += ["amp", "workers", "seed"]


def settings_of(result: dict) -> dict:
    settings = {name: result[name] for name in HEAD}
    return settings | {name: result["options"][name] for name in OPTIONS}


def read(path: Path) -> dict:
    """A result with what the table and the picture show of it; times of a batch are in ms."""
    from common.setup import fail

    try:
        run = json.loads(path.read_text())
        run["settings"] = settings_of(run)
        run["parts"] = {part: 1000 * float(numpy.mean(run[part])) for part in PARTS}
        run["batch"] = sum(run["parts"].values())
        run["accuracy"] = run["evaluations"][-1]["accuracy"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"{path}: is not a result of resnet_ddp.py ({type(error).__name__}: {error})")
    return run


def find_runs(folder: Path) -> list[dict]:
    """07_single.json, then the 07_ddp_N.json of the same settings by N."""
    from common.setup import say

    single = read(folder / "07_single.json")
    runs = [single]
    for path in folder.glob("07_ddp_*.json"):
        ddp = read(path)
        different = []
        for name, value in ddp["settings"].items():
            if value != single["settings"][name]:
                different.append(f"{name} {single['settings'][name]} and not {value}")
        if different:
            reason = f"07_single.json has {', '.join(different)}"
            reason += "; give both the same flags, --threads too"
            say(f"{path.name} is left out of the comparison: {reason}")
        else:
            runs.append(ddp)
    for run in runs:
        run["speedup"] = run["images_per_second"] / single["images_per_second"]
    return sorted(runs, key=lambda run: (run["name"] != "single", run["world_size"]))


def print_comparison(runs: list[dict]) -> None:
    from common.report import print_table

    rows = []
    for run in runs:
        row = [
            run["name"],
            f"{run['train_seconds']:.1f}",
            f"{run['batch']:.1f}",
            f"{run['parts']['data_seconds'] / run['batch']:.1%}",
            f"{run['images_per_second']:.1f}",
            f"{run['speedup']:.2f}",
            f"{runs[0]['train_seconds'] / run['train_seconds']:.2f}",
            f"{run['speedup'] / run['world_size']:.1%}",
            f"{run['accuracy']:.2%}",
        ]
        rows.append(row)
    header = ["", "total s", "batch ms", "data", "images/s", "speed-up", "in time"]
    header += ["efficiency", "accuracy"]
    print_table(header, rows)


def draw_speedup(runs: list[dict], path: Path) -> None:
    """A bar for each run: the mean time of a batch, by its parts, and what would be ideal."""
    from matplotlib.figure import Figure

    settings = runs[0]["settings"]
    caption = "ResNet-18, {data}, {image_size} px, --global-batch {global_batch}, {device}, "
    caption += "threads per rank: {threads_per_rank}, {scaling} scaling"
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    names = [run["name"] for run in runs]
    below = numpy.zeros(len(runs))
    for part, (name, colour) in PARTS.items():
        heights = [run["parts"][part] for run in runs]
        axes.bar(names, heights, width=0.6, bottom=below, color=colour, label=name)
        below += heights
    for place, run in enumerate(runs):
        text = f"{run['batch']:.0f} ms, speed-up {run['speedup']:.2f}"
        axes.text(place, run["batch"], text, ha="center", va="bottom")
    ideal = [runs[0]["batch"] / run["world_size"] for run in runs]
    if settings["scaling"] == "weak":
        ideal = [runs[0]["batch"]] * len(runs)
    left = [i - 0.4 for i in range(len(runs))]
    right = [i + 0.4 for i in range(len(runs))]
    axes.hlines(ideal, left, right, "black", "dashed", label="ideal")
    axes.set(title=caption.format(**settings), ylabel="mean time of a batch, ms")
    axes.title.set_fontsize(9)
    axes.set_ylim(0, 1.15 * max(below))
    axes.legend(reverse=True, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)


def compare(folder: Path) -> None:
    """Compare and draw the runs in this folder, if there are two."""
    from common.setup import say

    if not (folder / "07_single.json").exists():
        return
    runs = find_runs(folder)
    if len(runs) < 2:
        return
    say()
    print_comparison(runs)
    draw_speedup(runs, folder / "speedup.png")
    say(f"written: {folder / 'speedup.png'}")
