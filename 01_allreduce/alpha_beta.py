"""01: what the measured times say: the α–β model fitted to them, and the picture.

allreduce.py ends with this table and this picture. The model: t(S) = α + 2(n-1)/n · S/β. A call
costs α seconds whatever its size, and each of the 2(n-1)/n · S bytes that leave a rank costs 1/β
seconds.

Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def fit(
    sizes_bytes: list[float], seconds: list[float], world_size: int
) -> tuple[float, float, float]:
    """Fit t(S) = α + 2(n-1)/n · S/β to the times of calls of several sizes.

    Returns α in seconds, β in bytes per second, and the root mean square of the relative errors.
    Least squares of the relative errors, so that a small size counts as much as a large one; α is
    not let below 0. ValueError where there is nothing to fit: fewer than two different sizes, one
    rank, or times that do not grow.
    """
    if world_size < 2 or len(set(sizes_bytes)) < 2:
        raise ValueError("needs two ranks and two sizes")
    times = torch.tensor(seconds, dtype=torch.float64)
    traffic = 2 * (world_size - 1) / world_size * torch.tensor(sizes_bytes, dtype=torch.float64)
    # columns @ (α, 1/β) is to be 1 for every size.
    columns = torch.stack([1 / times, traffic / times], dim=1)
    target = torch.ones(len(times), 1, dtype=torch.float64)
    alpha, seconds_per_byte = torch.linalg.lstsq(columns, target).solution.flatten().tolist()
    if alpha < 0:
        alpha = 0.0
        seconds_per_byte = torch.linalg.lstsq(columns[:, 1:], target).solution.item()
    if seconds_per_byte <= 0:
        raise ValueError("the time does not grow with the size")
    errors = columns @ torch.tensor([[alpha], [seconds_per_byte]], dtype=torch.float64) - target
    return alpha, 1 / seconds_per_byte, errors.square().mean().sqrt().item()


def call_seconds(
    all_reduce: Callable, device: torch.device, pause: float = 0.0, calls: int = 50
) -> float:
    """What a call costs whatever it carries: an all-reduce of 1 KB, in seconds, the same on all.

    A median, of the slowest rank. Without a pause the calls follow one another, as those of many
    small buckets do, and the threads that wait for messages are awake. With one, all ranks meet
    before each call and then sleep so many seconds: threads and cores have to be woken.
    """
    from common.timing import Stopwatch

    tensor = torch.zeros(256, device=device)
    watch = Stopwatch(device)
    seconds = []
    for _ in range(calls):
        if pause > 0:
            dist.barrier()
            time.sleep(pause)
        watch.mark("start")
        all_reduce(tensor)
        watch.mark("end")
        seconds.append(watch.seconds("start", "end"))
    median = torch.tensor(sorted(seconds)[calls // 2], dtype=torch.float64, device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


# ==================================================================================================
# Below this line: the table and the picture.


def lines_of(rows: list[dict]) -> dict:
    """The rows by (algorithm, world size): what the model is fitted to, a line of the picture."""
    lines = {}
    for row in rows:
        lines.setdefault((row["algorithm"], row["world_size"]), []).append(row)
    return lines


def fit_all(rows: list[dict]) -> list[dict]:
    """Fit the model to each algorithm and world size, and print the table."""
    from common.report import print_table
    from common.setup import say

    fits = []
    table = []
    for (name, world_size), line in lines_of(rows).items():
        sizes = [row["size_bytes"] for row in line]
        times = [row["p50"] for row in line]
        measured = [f"{1e6 * line[0]['awake']:.0f}", f"{1e6 * line[0]['asleep']:.0f}"]
        try:
            alpha, beta, error = fit(sizes, times, world_size)
        except ValueError as reason:
            table.append([name, str(world_size), "-", "-", f"no fit: {reason}", *measured])
            continue
        row = {"algorithm": name, "world_size": world_size}
        fits.append({**row, "alpha": alpha, "beta": beta, "error": error})
        fitted = [f"{1e6 * alpha:.0f}", f"{beta / 1e9:.2f}", f"{100 * error:.1f} %"]
        table.append([name, str(world_size), *fitted, *measured])
    say("\nmodel: t(S) = α + 2(n-1)/n · S/β, fitted to the p50s")
    header = ["α, µs", "β, GB/s", "error (rms)", "awake, µs", "asleep, µs"]
    print_table(["algorithm", "ranks", *header], table)
    say("awake, asleep: a call of 1 KB, right after another one and after a pause of 10 ms")
    return fits


COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]  # of the world sizes
# By algorithm: how the line is drawn, the mark, and what the mark is filled with.
LOOK_OF_BACKEND = ("-", "o", None)
LOOKS = {
    "plain ring": (":", "v", "none"),
    "ring": ("--", "s", "none"),
    "shared": ("-.", "^", None),
    "gloo-cuda": ((0, (1, 1)), "D", None),
}


def draw(path: Path, rows: list[dict], fits: list[dict], copy: float) -> None:
    """Draw busbw over size and, beside it, time over size with the fitted model.

    copy: bytes per second of a memory copy, a line to compare with.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    from common.setup import say

    figure = Figure(figsize=(10, 5), layout="constrained")
    bandwidth, time = figure.subplots(1, 2)
    world_sizes = sorted({row["world_size"] for row in rows})
    fit_of = {(found["algorithm"], found["world_size"]): found for found in fits}
    for (name, world_size), line in lines_of(rows).items():
        color = COLORS[world_sizes.index(world_size) % len(COLORS)]
        linestyle, marker, inside = LOOKS.get(name, LOOK_OF_BACKEND)
        style = {"color": color, "marker": marker, "markerfacecolor": inside}
        label = f"{name}, {world_size} ranks"
        megabytes = [row["size_bytes"] / 2**20 for row in line]
        share = 2 * (world_size - 1) / world_size  # of its bytes, that leave a rank
        busbw = [share * row["size_bytes"] / row["p50"] / 1e9 for row in line]
        bandwidth.plot(megabytes, busbw, linestyle=linestyle, label=label, **style)
        time.plot(megabytes, [1000 * row["p50"] for row in line], linestyle="none", **style)
        if found := fit_of.get((name, world_size)):
            x = torch.logspace(math.log10(min(megabytes)), math.log10(max(megabytes)), 50)
            model = found["alpha"] + share * x * 2**20 / found["beta"]
            time.plot(x, 1000 * model, linestyle=linestyle, color=color, linewidth=1)
    bandwidth.axhline(copy / 1e9, color="black", linestyle=":", label="memory copy, one process")
    bandwidth.set(title="Bus bandwidth", ylabel="busbw, GB/s")
    time.set(title="Time: measured (marks) and fitted model (lines)")
    time.set(ylabel="time of the slowest rank, ms")
    ticks = sorted({row["size_bytes"] / 2**20 for row in rows})
    for axes in (bandwidth, time):
        axes.set(xscale="log", yscale="log", xlabel="tensor size, MB")
        axes.grid(alpha=0.3)
        axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_yticks([], minor=True)
    figure.legend(*bandwidth.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle("All-reduce of float32 tensors on one machine, p50")
    figure.savefig(path, dpi=150, format="png")
    say(f"written: {path}")
