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
    These are what least squares make small, so that a small size counts as much as a large one. An
    α below 0: in large tensors a byte costs more.
    """
    times = numpy.array(seconds)
    traffic = 2 * (world_size - 1) / world_size * numpy.array(sizes_bytes)
    seconds_per_byte, alpha = numpy.polyfit(traffic, times, 1, w=1 / times)
    errors = (alpha + seconds_per_byte * traffic) / times - 1
    return float(alpha), float(1 / seconds_per_byte), float(numpy.sqrt(numpy.mean(errors**2)))


# ==================================================================================================
# Below this line: the table and the picture.


def lines_of(rows: list[dict]) -> dict[tuple[str, int], tuple[list, list]]:
    """(algorithm, world size): (sizes in bytes, p50s in seconds), a line of the picture each."""
    lines = {}
    for row in rows:
        sizes, times = lines.setdefault((row["algorithm"], row["world_size"]), ([], []))
        sizes.append(row["size_bytes"])
        times.append(row["p50"])
    return lines


def fit_all(rows: list[dict]) -> list[dict]:
    """Fit the model to each algorithm and world size, and print the table."""
    from common.report import print_table
    from common.setup import say

    fits = []
    table = []
    for (name, world_size), (sizes, times) in lines_of(rows).items():
        cells = ["-", "-", "-"]
        if world_size > 1 and len(set(sizes)) > 1:
            alpha, beta, error = fit(sizes, times, world_size)
            line = {"algorithm": name, "world_size": world_size}
            fits.append(line | {"alpha": alpha, "beta": beta, "error": error})
            cells = [f"{1e6 * alpha:.0f}", f"{beta / 1e9:.2f}", f"{100 * error:.1f} %"]
        table.append([name, str(world_size), *cells])
    say("\nmodel: t(S) = α + 2(n-1)/n · S/β, fitted to the p50s")
    print_table(["algorithm", "ranks", "α, µs", "β, GB/s", "error (rms)"], table)
    return fits


COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]  # of the world sizes


def draw(path: Path, rows: list[dict], copy: float) -> None:
    """Draw busbw over size: gloo's or nccl's lines, and those of the fastest that is ours.

    copy: bytes per second of a memory copy, a line to compare with.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    from common.setup import say

    lines = lines_of(rows)
    ours = "shared" if any(name == "shared" for name, _ in lines) else "ring"
    world_sizes = sorted({world_size for _, world_size in lines})
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for (name, world_size), (sizes, times) in lines.items():
        if name in ("gloo", "nccl", ours):
            traffic = 2 * (world_size - 1) / world_size * numpy.array(sizes)  # leaves a rank
            color = COLORS[world_sizes.index(world_size) % len(COLORS)]
            style = "s--" if name == ours else "o-"
            label = f"{name}, {world_size} ranks"
            busbw = traffic / numpy.array(times) / 1e9
            axes.plot(numpy.array(sizes) / 2**20, busbw, style, color=color, label=label)
    axes.axhline(copy / 1e9, color="black", linestyle=":", label="memory copy, one process")
    axes.set_title(f"All-reduce of float32 tensors on one machine; dashed: {ours}")
    axes.set(xscale="log", yscale="log", xlabel="tensor size, MB", ylabel="busbw (p50), GB/s")
    axes.grid(alpha=0.3)
    ticks = sorted({row["size_bytes"] / 2**20 for row in rows})
    axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=len(world_sizes) + 1)
    figure.savefig(path, dpi=120, format="png")
    say(f"written: {path}")
