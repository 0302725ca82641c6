"""01: what the measured times say: the α–β model fitted to them, and the picture.

allreduce.py ends with this table and this picture. The model: t(S) = α + 2(n-1)/n · S/β. A call
costs α seconds whatever its size, and each of the 2(n-1)/n · S bytes that leave a rank costs 1/β
seconds.

Source: Hockney, "The communication challenge for MPP", Parallel Computing 1994.
"""

from pathlib import Path

import numpy


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
    times = numpy.array(seconds)
    traffic = 2 * (world_size - 1) / world_size * numpy.array(sizes_bytes)
    seconds_per_byte, alpha = numpy.polyfit(traffic, times, 1, w=1 / times)
    if alpha < 0:
        alpha = 0.0
        per_traffic = traffic / times
        seconds_per_byte = per_traffic.sum() / per_traffic.dot(per_traffic)
    if seconds_per_byte <= 0:
        raise ValueError("the time does not grow with the size")
    errors = (alpha + seconds_per_byte * traffic) / times - 1
    return float(alpha), float(1 / seconds_per_byte), float(numpy.sqrt(numpy.mean(errors**2)))


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
        try:
            alpha, beta, error = fit(sizes, times, world_size)
        except ValueError as reason:
            cells = ["-", "-", f"no fit: {reason}"]
        else:
            fits.append({"algorithm": name, "world_size": world_size})
            fits[-1] |= {"alpha": alpha, "beta": beta, "error": error}
            cells = [f"{1e6 * alpha:.0f}", f"{beta / 1e9:.2f}", f"{100 * error:.1f} %"]
        table.append([name, str(world_size), *cells])
    say("\nmodel: t(S) = α + 2(n-1)/n · S/β, fitted to the p50s")
    print_table(["algorithm", "ranks", "α, µs", "β, GB/s", "error (rms)"], table)
    return fits


COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]  # of the world sizes
LOOKS = {"plain ring": (":", "v"), "ring": ("--", "s"), "shared": ("-.", "^")}  # line and mark


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
        linestyle, marker = LOOKS.get(name, ("-", "o"))
        color = COLORS[world_sizes.index(world_size) % len(COLORS)]
        share = 2 * (world_size - 1) / world_size  # of its bytes, that leave a rank
        sizes = numpy.array([row["size_bytes"] for row in line])
        p50 = numpy.array([row["p50"] for row in line])
        label = f"{name}, {world_size} ranks"
        style = {"color": color, "marker": marker, "linestyle": linestyle, "label": label}
        bandwidth.plot(sizes / 2**20, share * sizes / p50 / 1e9, **style)
        time.plot(sizes / 2**20, 1000 * p50, color=color, marker=marker, linestyle="none")
        if found := fit_of.get((name, world_size)):
            x = numpy.geomspace(min(sizes), max(sizes))
            model = found["alpha"] + share * x / found["beta"]
            time.plot(x / 2**20, 1000 * model, color=color, linestyle=linestyle, linewidth=1)
    bandwidth.axhline(copy / 1e9, color="black", linestyle=":", label="memory copy, one process")
    bandwidth.set(title="Bus bandwidth", ylabel="busbw, GB/s")
    time.set(title="Time: measured (marks) and fitted model (lines)")
    time.set(ylabel="time of the slowest rank, ms")
    ticks = sorted({row["size_bytes"] / 2**20 for row in rows})
    for axes in (bandwidth, time):
        axes.set(xscale="log", yscale="log", xlabel="tensor size, MB")
        axes.grid(alpha=0.3)
        axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    figure.legend(*bandwidth.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle("All-reduce of float32 tensors on one machine, p50")
    figure.savefig(path, dpi=150, format="png")
    say(f"written: {path}")
