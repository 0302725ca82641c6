"""01: what the measured times say: the α–β model fitted to them, and the picture.

allreduce.py ends with this table and this picture. The model: t(S) = α + 2(n-1)/n · S/β. A call
costs α seconds whatever its size, and each of the 2(n-1)/n · S bytes that leave a rank costs 1/β
seconds.

Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994.
"""

from pathlib import Path

import numpy


def fit(sizes_bytes: list[float], seconds: list[float], world_size: int) -> tuple:
    """Fit t(S) = α + 2(n-1)/n · S/β to the times of calls of several sizes.

    Returns α in seconds, β in bytes per second, and the root mean square of the relative errors.
    These are what least squares make small, so that a small size counts as much as a large one. An
    α below 0: in large tensors a byte costs more.
    """
    times = numpy.array(seconds)
    traffic = 2 * (world_size - 1) / world_size * numpy.array(sizes_bytes)
    seconds_per_byte, alpha = numpy.polyfit(traffic, times, 1, w=1 / times)
    errors = (alpha + seconds_per_byte * traffic) / times - 1
    return alpha, 1 / seconds_per_byte, numpy.sqrt(numpy.mean(errors**2))


# ==================================================================================================
# Below this line: the table and the picture.

COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]


def fit_and_draw(rows: list[dict], path: Path | None) -> list[dict]:
    """Fit the model to each algorithm and number of ranks, print a table, return it for the JSON.

    The picture, where there is a path: the backends' own, points measured and lines fitted.
    """
    from matplotlib.figure import Figure

    from common.report import print_table
    from common.setup import say

    measured = {}
    for row in rows:
        points = measured.setdefault((row["algorithm"], row["world_size"]), [])
        points.append((row["size_bytes"], row["p50"]))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    fits, table = [], []
    for (name, world_size), points in measured.items():
        if world_size == 1 or len(points) == 1:
            continue  # there is nothing to fit
        sizes, times = numpy.array(points).T
        alpha, beta, error = fit(sizes, times, world_size)
        of_fit = {"alpha": alpha, "beta": beta, "error": error}
        fits.append({"algorithm": name, "world_size": world_size, **of_fit})
        cells = [f"{1e6 * alpha:.0f}", f"{beta / 1e9:.2f}", f"{100 * error:.1f} %"]
        table.append([name, str(world_size), *cells])
        if name in ("gloo", "nccl"):
            color = COLORS[len(axes.lines) // 2 % len(COLORS)]
            label = f"{name}, {world_size} ranks"
            axes.loglog(sizes / 2**20, 1000 * times, "o", color=color, label=label)
            many = numpy.geomspace(min(sizes), max(sizes), 200)
            model = alpha + 2 * (world_size - 1) / world_size * many / beta
            axes.loglog(many / 2**20, 1000 * model, color=color)
    if fits:
        say("\nmodel: t(S) = α + 2(n-1)/n · S/β, fitted to the p50s")
        print_table(["algorithm", "ranks", "α, µs", "β, GB/s", "error (rms)"], table)
    if fits and path:
        axes.set_title("All-reduce on one machine: small calls cost the call, large ones the bytes")
        axes.set(xlabel="tensor size, MB", ylabel="time of a call, ms")
        axes.grid(alpha=0.3)
        axes.legend(title="points: measured (p50)\nlines: α + 2(n-1)/n · S/β")
        figure.savefig(path, dpi=120, format="png")
        say(f"written: {path}")
    return fits
