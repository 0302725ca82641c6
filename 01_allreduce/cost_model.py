"""01: what the measured times say: a model of two numbers, fitted to them, and the picture.

allreduce.py ends with this table and this picture. The model: t(S) = o + S/w. A call costs o
seconds whatever its size, and w is the bandwidth that large tensors reach, in bytes per second.

Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994.
"""

from pathlib import Path

import numpy


def fit(sizes_bytes: list[float], seconds: list[float]) -> tuple[float, float, float]:
    """Fit t(S) = o + S/w to the times of calls of several sizes, on a logarithmic scale.

    Returns o in seconds, w in bytes per second, and the typical relative error. Half as long counts
    as much as twice as long, and a small tensor as much as a large one. What is searched is the
    size at which o costs as much as the bytes: Hockney's n½.
    """
    half = numpy.geomspace(1, 1e12, 10_001)  # in steps of 0.3 per cent
    errors = numpy.log(seconds)[:, None] - numpy.log(numpy.add.outer(sizes_bytes, half))
    best = errors.std(axis=0).argmin()
    w = 1 / numpy.exp(errors[:, best].mean())
    return half[best] / w, w, numpy.expm1(errors[:, best].std())


# ==================================================================================================
# Below this line: the table and the picture.

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]
LEGEND = "busbw = w · 2(n-1)/n, that of large tensors; error: how far p50s typically are from it"


def fit_and_draw(rows: list[dict], path: Path | None) -> list[dict]:
    """Fit the model to each algorithm and number of ranks, print a table, return it for the JSON.

    The picture, where there is a path, shows the backends' own: points measured and lines fitted.
    """
    from common.report import new_figure, print_table, save_figure
    from common.setup import say

    measured = {}
    for row in rows:
        measured.setdefault((row["algorithm"], row["world_size"]), []).append(row)
    figure, axes = new_figure(8, 5)
    fits, table = [], []
    for (name, world_size), of_sizes in measured.items():
        if world_size == 1 or len(of_sizes) == 1:
            continue  # there is nothing to fit
        sizes = numpy.array([row["size_bytes"] for row in of_sizes])
        p50s = numpy.array([row["p50"] for row in of_sizes])
        o, w, error = fit(sizes, p50s)
        of_fit = {"call_seconds": o, "bytes_per_second": w, "error": error}
        fits.append({"algorithm": name, "world_size": world_size, **of_fit})
        busbw = w * 2 * (world_size - 1) / world_size
        cells = [f"{1e6 * o:.0f}", f"{w / 1e9:.2f}", f"{busbw / 1e9:.2f}", f"{100 * error:.0f} %"]
        table.append([name, str(world_size), *cells])
        if name in ("gloo", "nccl"):
            color = COLORS[len(axes.lines) // 2 % len(COLORS)]
            label = f"{name}, {world_size} ranks"
            axes.loglog(sizes / 2**20, 1000 * p50s, "o", color=color, label=label)
            many = numpy.geomspace(min(sizes), max(sizes), 200)
            axes.loglog(many / 2**20, 1000 * (o + many / w), color=color)
    if fits:
        say("\nmodel: t(S) = o + S/w, fitted to the p50s on a logarithmic scale")
        print_table(["algorithm", "ranks", "o, µs", "w, GB/s", "busbw", "error"], table)
        say(LEGEND)
    if fits and path:
        axes.set_title("All-reduce on one machine. Small tensors: latency. Large: bandwidth.")
        axes.set(xlabel="tensor size, MB", ylabel="time of a call, ms")
        axes.grid(alpha=0.3)
        axes.legend(title="points: p50\nlines: o + S/w, fitted", alignment="left")
        save_figure(figure, path)
    return fits
