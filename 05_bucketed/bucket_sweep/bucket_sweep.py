"""05: which bucket size is best? By a formula, by a simulation, and measured.

Small buckets start early and leave little to wait for after backward, but each costs a call; large
ones are the other way round. This script measures BucketedDDP and torch's DDP with buckets of
several sizes in turn, and holds against it the course's formula, overhead(n) = s / (n·w) + n·o for
n buckets, s bytes of gradients, an all-reduce's bytes per second w and its fixed cost o, and the
simulation of predict.py. Both take o and w from all-reduces that run alone, in the same run.

    make 05_bucketed/bucket_sweep NPROC=2                                  (see also ARGS="--help")
    make 05_bucketed/bucket_sweep NETWORK=1gbit,1ms
    torchrun --standalone --nproc-per-node 2 05_bucketed/bucket_sweep/bucket_sweep.py

Source: Stanford CS336, assignment 2, "DDP bucketed benchmarking".
"""

import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "predict"), str(FOLDER.parent.parent)]

from predict import BucketedDDP, measure, predict  # noqa: E402

from common import report, setup  # noqa: E402
from common.setup import say  # noqa: E402


def overhead(buckets: float, size: float, bandwidth: float, call: float) -> float:
    """Seconds left over after backward: one bucket's transfer, and every bucket's call.

    Nothing hides the transfer of the last bucket any more, because backward is over.
    """
    return size / (buckets * bandwidth) + buckets * call


def best_number_of_buckets(size: float, bandwidth: float, call: float) -> float:
    """Where `overhead` is smallest: its derivative in n, o − s / (n²·w), is 0 at √(s / (w·o))."""
    return math.sqrt(size / (bandwidth * call))


# ==================================================================================================
# Below this line: the measurement, the table, the picture.


def sweep(args, device: torch.device) -> dict:
    """Measure every size, and what both models say of it: what --json has besides its head."""
    wrappers = {"BucketedDDP, no limit": partial(BucketedDDP, bucket_size_mb=None)}
    ways = {"BucketedDDP, no limit": (None, True)}
    for mb in sorted(set(args.bucket_sizes_mb), reverse=True):
        wrappers[f"BucketedDDP, {mb:g} MB"] = partial(BucketedDDP, bucket_size_mb=mb)
        wrappers[f"torch DDP, {mb:g} MB"] = partial(DistributedDataParallel, bucket_cap_mb=mb)
        ways[f"BucketedDDP, {mb:g} MB"] = (mb, True)
    gradients, result = measure(args, device, wrappers)
    simulated = predict(gradients, result, ways)
    size = sum(parameter.nbytes for parameter in gradients)
    network = result["all_reduce"]["bytes_per_second"], result["all_reduce"]["call_seconds"]
    best_mb = size / best_number_of_buckets(size, *network) / 2**20
    say(f"formula: of {size / 2**20:.1f} MB of gradients the best bucket has {best_mb:.1f} MB")
    alone = report.percentiles(result["candidates"][0]["step_seconds"])[0]
    overheads = []
    for candidate in result["candidates"][1:]:
        name, buckets = candidate["name"], candidate["collectives_per_step"]
        row = {"name": name, "buckets": buckets}
        row["measured"] = report.percentiles(candidate["step_seconds"])[0] - alone
        row["formula"] = overhead(buckets, size, *network)
        row["simulated"] = simulated[name] - alone if name in ways else None  # torch cuts others
        overheads.append(row)
    return result | {"gradient_bytes": size, "formula_best_mb": best_mb, "overheads": overheads}


def print_rows(result: dict) -> None:
    """A row per candidate, in ms."""
    rows = []
    overheads = [{}, *result["overheads"]]  # no communication has none
    for candidate, ways in zip(result["candidates"], overheads, strict=True):
        row = [candidate["name"], str(candidate["collectives_per_step"])]
        row += report.milliseconds(candidate["step_seconds"])
        row.append(report.milliseconds(candidate["exposed_comm_seconds"])[0])
        for way in ("measured", "formula", "simulated"):
            row.append("-" if ways.get(way) is None else f"{1000 * ways[way]:.1f}")
        rows.append(row)
    header = ["step, ms", "buckets", "p50", "p75", "p90", "p95", "exposed", "overhead"]
    report.print_table([*header, "formula", "simulated"], rows)
    say(
        "Percentiles over all steps of all ranks; exposed: p50, from the last gradient until all\n"
        "are averaged; overhead: p50 minus that of no communication; formula: s/(n·w) + n·o with\n"
        "the row's n buckets; simulated: by predict.py, with the o and w above."
    )


LINES = {"measured": ("#0072B2", "o-"), "simulated": ("#0072B2", "--"), "formula": ("black", ":")}


def draw(result: dict, path: Path) -> None:
    """Overhead over the number of buckets: BucketedDDP's measured and simulated, the formula's."""
    from matplotlib.figure import Figure

    rows = [row for row in result["overheads"] if row["simulated"] is not None]
    buckets = [row["buckets"] for row in rows]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for way, (color, line) in LINES.items():
        heights = [1000 * row[way] for row in rows]
        axes.plot(buckets, heights, line, color=color, linewidth=2, label=way)
    for row in rows:
        size = row["name"].partition(", ")[2]
        place = row["buckets"], 1000 * row["measured"]
        axes.annotate(size, place, (0, 10), textcoords="offset points", ha="center")
    where = result["network"] or {"gloo": "loopback"}.get(result["backend"], result["backend"])
    axes.set_title(f"What communication adds to a step: {where}")
    axes.set_xlabel("all-reduces in a step (smaller buckets →)")
    axes.set_ylabel("overhead: step − no communication, ms")
    axes.set_xscale("log")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def main():
    allowed = "a number above 0, at most 1000000; one bucket for all is measured anyway"
    size = setup.checked(float, lambda number: 0 < number <= 1e6, allowed)
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--bucket-sizes-mb", type=setup.list_of(size), default="0.5,1,5,10,25", metavar="MB,…")
    setup.add_training_arguments(parser, steps=6)
    parser.set_defaults(warmup=2)
    setup.add_plot_arguments(parser, "bucket_sweep.png")
    args = parser.parse_args()
    with setup.process_group(args) as device:
        result = report.begin("05_bucketed/bucket_sweep", args, device)
        result |= sweep(args, device)
        print_rows(result)
        if args.plot and dist.get_rank() == 0:
            draw(result, args.plot)
            say(f"written: {args.plot}")
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
