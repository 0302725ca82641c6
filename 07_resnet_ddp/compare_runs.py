"""07: compare the results of resnet_ddp.py, one device against N: a table and two pictures.

    python 07_resnet_ddp/compare_runs.py              (the folder results/ of the repository)
    python 07_resnet_ddp/compare_runs.py RESULTS      (the folder of resnet_ddp.py --results)

RESULTS holds 07_single.json and at least one 07_ddp_N.json. comparison.png and breakdown.png are
drawn beside them. resnet_ddp.py does the same by itself as soon as it has written the second file.
"""

import json
import os
import statistics
import sys
from pathlib import Path

# From Okabe and Ito's palette, which the colour-blind can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"


def times(result: dict, part: str) -> list[float]:
    """All ranks' and steps' ms of `data`, of `compute` (which synchronises) or of both, `batch`."""
    parts = ["data", "compute"] if part == "batch" else [part]
    samples = []
    for step in result["steps"]:
        for rank in range(result["world_size"]):
            seconds = sum(step[f"{name}_seconds"][rank] for name in parts)
            samples.append(1000 * seconds)
    return samples


def summarize(result: dict) -> dict:
    """What the table and the pictures show of a run; times of a batch are means in ms."""
    name = "single"
    if result["name"] == "ddp":
        name = f"DDP × {result['world_size']}"
    caption = "ResNet-18, {data}, {image_size} px, --global-batch {global_batch}, {device}, "
    caption += "threads per process: {threads_per_rank}"
    return {
        "name": name,
        "caption": f"{caption.format(**result['settings'])}, {result['scaling']} scaling",
        "settings": result["settings"],
        "world_size": result["world_size"],
        "total": result["train_seconds"],
        "data": statistics.fmean(times(result, "data")),
        "compute": statistics.fmean(times(result, "compute")),
        "batch": statistics.fmean(times(result, "batch")),
        "throughput": result["images_per_second"],
        "accuracy": result["evaluations"][-1]["accuracy"],
    }


def read(path: Path) -> dict:
    """The summary of one result. Ends with one line if the file is none."""
    from common.setup import fail

    try:
        return summarize(json.loads(path.read_text()))
    except OSError as error:
        fail(f"{path}: cannot be read ({error.strerror})")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        fail(f"{path}: is not a result of resnet_ddp.py ({type(error).__name__}: {error})")


def find_runs(folder: Path) -> list[dict]:
    """07_single.json, then the 07_ddp_N.json of the same settings by N; without a pair, nothing."""
    single_file = folder / "07_single.json"
    ddp_files = sorted(folder.glob("07_ddp_*.json"), key=lambda path: (len(path.name), path.name))
    if not single_file.exists() or not ddp_files:
        return []
    single = read(single_file)
    settings = single["settings"]
    runs = [single]
    for path in ddp_files:
        ddp = read(path)
        different = [name for name in settings if ddp["settings"].get(name) != settings[name]]
        if different:
            reason = f"07_single.json has another {', '.join(different)}"
            print(f"{path.name} is left out of the comparison: {reason}", flush=True)
        else:
            runs.append(ddp)
    for run in runs:
        run["speedup"] = run["throughput"] / single["throughput"]
    return runs


def print_comparison(runs: list[dict]) -> None:
    from common.report import print_table

    rows = []
    for run in runs:
        row = [run["name"], f"{run['total']:.1f}", f"{run['batch']:.1f}"]
        row += [f"{run['throughput']:.1f}", f"{run['speedup']:.2f}"]
        row += [f"{run['speedup'] / run['world_size']:.1%}", f"{run['accuracy']:.2%}"]
        rows.append(row)
    header = ["", "total s", "batch ms", "images/s", "speed-up", "efficiency", "accuracy"]
    print_table(header, rows)


def three_digits(value: float) -> str:
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}"


def draw_comparison(runs: list[dict], path: Path) -> None:
    """Total time, batch time, throughput and speed-up: a bar for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    figure.suptitle(f"One device against N\n{runs[-1]['caption']}", fontsize=11)
    names = [run["name"] for run in runs]
    colours = [BLUE] + [ORANGE] * (len(runs) - 1)
    panels = [
        ("total", "Total training time", "seconds"),
        ("batch", "Mean batch time", "ms"),
        ("throughput", "Throughput", "images/s over all ranks"),
        ("speedup", "Speed-up in throughput", "× single"),
    ]
    for axes, (key, title, unit) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        heights = [run[key] for run in runs]
        bars = axes.bar(names, heights, width=0.6, color=colours)
        axes.bar_label(bars, [three_digits(height) for height in heights], padding=2)
        axes.set(title=title, ylabel=unit, ylim=(0, 1.2 * max(heights)))

    # The last panel, the speed-up, shows what would be ideal as well.
    ideal = [run["world_size"] for run in runs]
    left = [i - 0.4 for i in range(len(runs))]
    right = [i + 0.4 for i in range(len(runs))]
    axes.hlines(ideal, left, right, "black", "dashed", label="ideal: number of processes")
    axes.set_ylim(0, 1.3 * max(ideal))
    axes.legend(loc="upper left")
    figure.savefig(path)


def draw_breakdown(runs: list[dict], path: Path) -> None:
    """Where the time of a batch goes: data below, compute above; in ms and as shares."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    figure.suptitle(f"Where the time of a batch goes\n{runs[-1]['caption']}", fontsize=11)
    absolute, relative = figure.subplots(1, 2)
    data = [run["data"] for run in runs]
    compute = [run["compute"] for run in runs]
    draw_stacks(absolute, runs, data, compute)
    absolute.set_ylabel("ms per batch (mean)")
    data = [100 * run["data"] / run["batch"] for run in runs]
    compute = [100 * run["compute"] / run["batch"] for run in runs]
    draw_stacks(relative, runs, data, compute)
    relative.set_ylabel("% of the batch time")
    relative.set_yticks(range(0, 101, 20))
    figure.savefig(path)


def draw_stacks(axes, runs: list[dict], data: list[float], compute: list[float]) -> None:
    names = [run["name"] for run in runs]
    axes.bar(names, data, width=0.6, color=ORANGE, label="data")
    bars = axes.bar(
        names, compute, width=0.6, color=BLUE, bottom=data, label="compute and synchronise"
    )
    labels = []
    heights = []
    for lower, upper in zip(data, compute, strict=True):
        labels.append(f"compute {upper:.1f}\ndata {lower:.1f}")
        heights.append(lower + upper)
    axes.bar_label(bars, labels, padding=2)
    axes.set_ylim(0, 1.4 * max(heights))
    axes.legend(loc="upper center", ncols=2)


def compare(folder: Path) -> bool:
    """Compare and draw the runs in this folder. Returns whether there were two to compare."""
    runs = find_runs(folder)
    if len(runs) < 2:
        return False
    print_comparison(runs)
    draw_comparison(runs, folder / "comparison.png")
    draw_breakdown(runs, folder / "breakdown.png")
    print(f"drawn: {folder.name}/comparison.png and {folder.name}/breakdown.png", flush=True)
    return True


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = setup.Parser(__doc__)
    results = folder.parent / "results"
    where = "with 07_single.json and 07_ddp_N.json (default: results/ of the repository)"
    parser.add_argument("results", nargs="?", default=str(results), metavar="RESULTS", help=where)
    args = parser.parse_args()
    results = Path(args.results)
    if not args.results or not results.is_dir():
        setup.fail(f"argument RESULTS: {args.results!r} is not a folder")
    if not os.access(results, os.W_OK):
        setup.fail(f"argument RESULTS: {args.results!r} is not writable, for the pictures")
    if not compare(results.resolve()):
        needed = "a 07_single.json and a 07_ddp_N.json of the same settings"
        setup.fail(f"argument RESULTS: {args.results!r} does not hold {needed}")


if __name__ == "__main__":
    main()
