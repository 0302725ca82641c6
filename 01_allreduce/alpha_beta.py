"""01: what the measured times say: the α–β model fitted to them, and the picture.

allreduce.py ends with this table and this picture. Here they are made again from the file that its
--json wrote.

    python 01_allreduce/alpha_beta.py results/01_allreduce.json --plot results/01_allreduce.png
    python 01_allreduce/alpha_beta.py FILE.json FILE.json FILE.json   (the medians of several runs)

The model: t(S) = α + 2(n-1)/n · S/β. A call costs α seconds whatever its size, and each of the
2(n-1)/n · S bytes that leave a rank costs 1/β seconds.

Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]  # of the world sizes
# By algorithm: how the line is drawn, the mark, and what the mark is filled with.
BACKEND_LOOK = ("-", "o", None)
LOOKS = {
    "ring": ("--", "s", "none"),
    "shared": ("-.", "^", None),
    "gloo-cuda": ((0, (1, 1)), "D", None),
}


def call_seconds(all_reduce, device: torch.device, pause: float = 0.0, calls: int = 50) -> float:
    """What a call costs whatever it carries: an all-reduce of 1 KB, in seconds, the same on all.

    A median, of the slowest rank. Without a pause the calls follow one another, as those of many
    small buckets do, and the threads that wait for messages are awake. With one, all ranks meet
    before each call and then sleep so many seconds: threads and cores have to be woken.
    """
    tensor = torch.zeros(256, device=device)
    seconds = []
    for _ in range(calls):
        if pause > 0:
            dist.barrier()
            time.sleep(pause)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    median = torch.tensor(sorted(seconds)[calls // 2], dtype=torch.float64, device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


def lines_of(rows: list[dict]) -> dict:
    """The rows by (algorithm, world size): what the model is fitted to, a line of the picture."""
    lines = {}
    for row in rows:
        lines.setdefault((row["algorithm"], row["world_size"]), []).append(row)
    return lines


def fit_all(rows: list[dict], fit) -> list[dict]:
    """Fit the model to each algorithm and world size, and print the table.

    `fit` is the function of allreduce.py, handed in because that file is the script that runs.
    """
    from common.report import print_table
    from common.setup import say

    fits = []
    table = []
    for (name, world_size), line in lines_of(rows).items():
        sizes = [row["size_bytes"] for row in line]
        times = [row["p50"] for row in line]
        measured = []
        for key in ("awake", "asleep"):
            measured.append(f"{1e6 * line[0][key]:.0f}" if key in line[0] else "-")
        try:
            alpha, beta, error = fit(sizes, times, world_size)
        except ValueError as reason:
            table.append([name, str(world_size), "-", "-", f"no fit: {reason}", *measured])
            continue
        one = {"algorithm": name, "world_size": world_size}
        one |= {"alpha": alpha, "beta": beta, "error": error}
        fits.append(one)
        figures = [f"{1e6 * alpha:.0f}", f"{beta / 1e9:.2f}", f"{100 * error:.1f} %"]
        table.append([name, str(world_size), *figures, *measured])
    say("\nmodel: t(S) = α + 2(n-1)/n · S/β, fitted to the p50s")
    header = ["α, µs", "β, GB/s", "error (rms)", "awake, µs", "asleep, µs"]
    print_table(["algorithm", "ranks", *header], table)
    say("awake, asleep: a call of 1 KB, right after another one and after a pause of 10 ms")
    return fits


def medians_of(results: list[dict]) -> list[dict]:
    """The rows of several runs as one: the medians of p50, of ratio, and of the cost of a call.

    "ratios" of a row are the bandwidths in the runs, each divided by gloo's in the same run. Rows
    that not all runs have are left out.
    """
    runs = []
    for result in results:
        rows = {}
        for row in result["rows"]:
            rows[row["algorithm"], row["world_size"], row["size_bytes"]] = row
        runs.append(rows)
    medians = []
    for key, first in runs[0].items():
        if not all(key in run for run in runs):
            continue
        row = {name: first[name] for name in ("algorithm", "world_size", "size_bytes")}
        for name in ("p50", "awake", "asleep"):
            row[name] = statistics.median(run[key][name] for run in runs)
        gloo = ("gloo", *key[1:])
        row["ratios"] = [run[gloo]["p50"] / run[key]["p50"] for run in runs if gloo in run]
        row["wrong"] = sum(run[key]["wrong"] for run in runs)
        medians.append(row)
    return medians


def print_medians(rows: list[dict]) -> None:
    """The table of several runs: what `medians_of` returns."""
    from common.report import print_table
    from common.setup import say

    table = []
    for row in rows:
        n, size = row["world_size"], row["size_bytes"]
        busbw = 2 * (n - 1) / n * size / row["p50"] / 1e9
        cells = [row["algorithm"], str(n), f"{size / 2**20:g}", f"{1000 * row['p50']:.2f}"]
        cells += [f"{busbw:.2f}", " ".join(f"{ratio:.2f}" for ratio in row["ratios"])]
        cells.append(f"{statistics.median(row['ratios']):.2f}" if row["ratios"] else "-")
        table.append([*cells, str(row["wrong"])])
    header = ["algorithm", "ranks", "MB", "p50, ms", "busbw", "× gloo", "median", "#wrong"]
    print_table(header, table)
    say("medians of the runs; × gloo: busbw to gloo's own, in each run; #wrong: of all runs")


def ticks_of(sizes: list[float]) -> list[float]:
    """The measured sizes that are far enough from each other to be written below a log axis."""
    sizes = sorted(set(sizes))
    apart = (sizes[-1] / sizes[0]) ** (1 / 9)
    ticks = sizes[:1]
    for size in sizes[1:]:
        if size >= apart * ticks[-1]:
            ticks.append(size)
    return ticks


def draw(path: Path, rows: list[dict], fits: list[dict], copy: float) -> None:
    """Draw busbw over size and, beside it, time over size with the fitted model."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    from common.setup import say

    figure = Figure(figsize=(10, 5), layout="constrained")
    bandwidth, time = figure.subplots(1, 2)
    world_sizes = sorted({row["world_size"] for row in rows})
    for (name, n), line in lines_of(rows).items():
        color = COLORS[world_sizes.index(n) % len(COLORS)]
        linestyle, marker, inside = LOOKS.get(name, BACKEND_LOOK)
        style = {"color": color, "marker": marker, "markerfacecolor": inside}
        sizes = [row["size_bytes"] / 2**20 for row in line]
        busbw = [2 * (n - 1) / n * row["size_bytes"] / row["p50"] / 1e9 for row in line]
        bandwidth.plot(sizes, busbw, linestyle=linestyle, label=f"{name}, {n} ranks", **style)
        time.plot(sizes, [1000 * row["p50"] for row in line], linestyle="none", **style)
        for one in fits:
            if (one["algorithm"], one["world_size"]) == (name, n):
                x = torch.logspace(math.log10(min(sizes)), math.log10(max(sizes)), 50)
                model = 1000 * (one["alpha"] + 2 * (n - 1) / n * x * 2**20 / one["beta"])
                time.plot(x, model, linestyle=linestyle, color=color, linewidth=1)
    bandwidth.axhline(copy / 1e9, color="black", linestyle=":", label="memory copy, one process")
    bandwidth.set(title="Bus bandwidth", ylabel="busbw, GB/s")
    time.set(title="Time: measured (marks) and fitted model (lines)")
    time.set(ylabel="time of the slowest rank, ms")
    ticks = ticks_of([row["size_bytes"] / 2**20 for row in rows])
    for axes in (bandwidth, time):
        axes.set(xscale="log", yscale="log", xlabel="tensor size, MB")
        axes.grid(alpha=0.3)
        axes.set_xticks(ticks, [f"{size:g}" if size >= 1 else f"{size:.2g}" for size in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_yticks([], minor=True)
    figure.legend(*bandwidth.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle("All-reduce of float32 tensors on one machine, p50")
    figure.savefig(path, dpi=150, format="png")
    say(f"written: {path}")


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from allreduce import fit

        from common import setup
    except ModuleNotFoundError as error:
        beside = "copy the repository's folder common/ and allreduce.py beside this script"
        sys.exit(f"error: {error}: {beside}")

    parser = setup.Parser(__doc__)
    files = {"nargs": "+", "metavar": "FILE.json", "help": "written by --json of allreduce.py"}
    parser.add_argument("files", **files)
    parser.add_argument("--plot", type=setup.output_file, metavar="FILE", help="the picture, a PNG")
    args = parser.parse_args()
    try:
        results = [json.loads(Path(file).read_text()) for file in args.files]
        rows = results[0]["rows"]
        copy = statistics.median(result["copy_bytes_per_second"] for result in results)
        if len(results) > 1:
            rows = medians_of(results)
            setup.say(f"01_allreduce: {len(results)} runs, memory copy {copy / 1e9:.2f} GB/s")
            print_medians(rows)
        if not rows:
            raise ValueError("it has no rows")
        fits = fit_all(rows, fit)
    except (OSError, ValueError, KeyError, TypeError) as error:
        which = ", ".join(args.files)
        setup.fail(f"{which}: is not a result of allreduce.py --json ({error})")
    if args.plot:
        draw(args.plot, rows, fits, copy)


if __name__ == "__main__":
    main()
