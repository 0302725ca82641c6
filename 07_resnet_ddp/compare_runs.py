"""07: compare the results of resnet_ddp.py, one device against N: a table and a picture.

resnet_ddp.py does so when it has written 07_single.json or 07_ddp_N.json and the other one is
there, too: speedup.png is drawn beside them.
"""

import json
from pathlib import Path

import numpy

# From Okabe and Ito's palette, which the colour-blind can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
PARTS = {  # of a batch, from bottom to top: what is measured, its name and its colour
    "data_seconds": ("data", "#CC79A7"),
    "forward_seconds": ("forward", "#56B4E9"),
    "backward_seconds": ("backward", "#0072B2"),
    "exposed_comm_seconds": ("exposed all-reduce", "#D55E00"),
    "optimizer_seconds": ("optimizer", "#999999"),
}

# What runs must have in common to be compared, of the result's head and of its options; a
# checkpoint, too, belongs to these options.
HEAD = ["device", "threads_per_rank", "data"]
OPTIONS = ["epochs", "image_size", "global_batch", "steps_per_epoch", "lr", "momentum"]
OPTIONS += ["warmup_epochs", "amp", "workers", "seed"]


def summarize(result: dict) -> dict:
    """What the table and the picture show of a run; times of a batch are in ms."""
    options = result["options"]
    settings = {name: result[name] for name in HEAD}
    settings |= {name: options[name] for name in OPTIONS}
    caption = f"ResNet-18, {result['data']}, {options['image_size']} px, "
    caption += f"--global-batch {options['global_batch']}, {result['device']}, "
    caption += f"threads per rank: {result['threads_per_rank']}, {options['scaling']} scaling"
    parts = {part: 1000 * float(numpy.mean(result[part])) for part in PARTS}
    batch = sum(parts.values())
    return {
        "name": result["name"],
        "caption": caption,
        "settings": settings,
        "world_size": result["world_size"],
        "total": result["train_seconds"],
        "batch": batch,
        "parts": parts,
        "data share": parts["data_seconds"] / batch,
        "throughput": result["images_per_second"],
        "accuracy": result["evaluations"][-1]["accuracy"],
    }


def read(path: Path) -> dict:
    """The summary of one result. Ends with one line if the file is none."""
    from common.setup import fail

    try:
        return summarize(json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        fail(f"{path}: is not a result of resnet_ddp.py ({type(error).__name__}: {error})")


def find_runs(folder: Path) -> list[dict]:
    """07_single.json, then the 07_ddp_N.json of the same settings by N; without a pair, nothing."""
    from common.setup import say

    single_file = folder / "07_single.json"
    ddp_files = sorted(folder.glob("07_ddp_*.json"), key=lambda path: (len(path.name), path.name))
    if not single_file.exists() or not ddp_files:
        return []
    single = read(single_file)
    settings = single["settings"]
    runs = [single]
    for path in ddp_files:
        ddp = read(path)
        different = [name for name in settings if ddp["settings"][name] != settings[name]]
        if different:
            reason = f"07_single.json has another {', '.join(different)}"
            say(f"{path.name} is left out of the comparison: {reason}")
        else:
            runs.append(ddp)
    for run in runs:
        run["speedup"] = run["throughput"] / single["throughput"]
        run["time speedup"] = single["total"] / run["total"]
    return runs


def print_comparison(runs: list[dict]) -> None:
    from common.report import print_table

    rows = []
    for run in runs:
        row = [
            run["name"],
            f"{run['total']:.1f}",
            f"{run['batch']:.1f}",
            f"{run['data share']:.1%}",
            f"{run['throughput']:.1f}",
            f"{run['speedup']:.2f}",
            f"{run['time speedup']:.2f}",
            f"{run['speedup'] / run['world_size']:.1%}",
            f"{run['accuracy']:.2%}",
        ]
        rows.append(row)
    header = ["", "total s", "batch ms", "data", "images/s", "speed-up", "in time"]
    header += ["efficiency", "accuracy"]
    print_table(header, rows)


def three_digits(value: float) -> str:
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}"


def draw_speedup(runs: list[dict], path: Path) -> None:
    """Total time, batch time, throughput and speed-up: a bar for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    figure.suptitle(f"One device against N\n{runs[-1]['caption']}", fontsize=11)
    names = [run["name"] for run in runs]
    colours = [BLUE] + [ORANGE] * (len(runs) - 1)
    panels = [
        ("total", "Total training time", "seconds"),
        ("batch", "Mean time of a batch", "ms"),
        ("throughput", "Throughput", "images/s over all ranks"),
        ("speedup", "Speed-up in throughput", "× single"),
    ]
    grid = list(figure.subplots(2, 2).flat)
    for axes, (key, title, unit) in zip(grid, panels, strict=True):
        heights = [run[key] for run in runs]
        bars = axes.bar(names, heights, width=0.6, color=colours)
        axes.bar_label(bars, [three_digits(height) for height in heights], padding=2)
        axes.set(title=title, ylabel=unit, ylim=(0, 1.2 * max(heights)))
        if key == "batch":
            draw_parts(runs, axes)

    # The last panel shows what would be ideal as well.
    speedup = grid[-1]
    ideal = [run["world_size"] for run in runs]
    left = [i - 0.4 for i in range(len(runs))]
    right = [i + 0.4 for i in range(len(runs))]
    speedup.hlines(ideal, left, right, "black", "dashed", label="ideal: number of processes")
    speedup.set_ylim(0, 1.3 * max(ideal))
    speedup.legend(loc="upper left")
    figure.savefig(path)


def draw_parts(runs: list[dict], axes) -> None:
    """The parts of a batch over the bars of the whole."""
    names = [run["name"] for run in runs]
    below = numpy.zeros(len(runs))
    for part, (name, colour) in PARTS.items():
        heights = [run["parts"][part] for run in runs]
        axes.bar(names, heights, width=0.6, bottom=below, color=colour, label=name)
        below += heights
    handles, labels = axes.get_legend_handles_labels()
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    axes.legend(handles[::-1], labels[::-1], fontsize=8, **beside)


def compare(folder: Path) -> None:
    """Compare and draw the runs in this folder, if there are two."""
    from common.setup import say

    runs = find_runs(folder)
    if len(runs) < 2:
        return
    say()
    print_comparison(runs)
    draw_speedup(runs, folder / "speedup.png")
    say(f"written: {folder / 'speedup.png'}")
