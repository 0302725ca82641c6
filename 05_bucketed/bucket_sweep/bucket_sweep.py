"""05: which bucket size is best? Measured, simulated, and by a formula.

Small buckets start early and leave little to wait for after backward, but each costs a call; large
ones are the other way round. This script measures BucketedDDP and torch's DDP with buckets of
several sizes, and holds against it the simulation of predict.py, and the course's formula,
overhead(n) = s / (n·w) + n·o for n buckets, s bytes of gradients, an all-reduce's bytes per second
w and its fixed cost o. Both take o and w from all-reduces of the same run, beside which nothing
computes.

    make 05_bucketed/bucket_sweep NPROC=2                                  (see also ARGS="--help")
    make 05_bucketed/bucket_sweep NETWORK=1gbit,1ms
    torchrun --standalone --nproc-per-node 2 05_bucketed/bucket_sweep/bucket_sweep.py

A trace of one size: make 05_bucketed ARGS="--bucket-size-mb 1 --trace results/1mb.json".
The sizes of the course's experiment need a larger model (`small` takes 13 GB). Of one larger still
every wrapper is built, measured and freed before the next one, and torch's DDP is left out:

    make 05_bucketed/bucket_sweep NETWORK=5gbit,1ms ARGS="--size small --bucket-sizes-mb \\
        1,10,100,1000 --batch-size 1"

Source: Stanford CS336, assignment 2, "DDP bucketed benchmarking".
"""

import math
import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "predict"), str(FOLDER.parent.parent)]

from predict import Network, measure_beside, rows_of_stages

from common import ladder, report, setup
from common.ladder import TORCH_DDP
from common.setup import say


def overhead(buckets: float, size: float, network: Network) -> float:
    """Return the seconds left after backward: one bucket's transfer, and every bucket's call.

    Nothing hides the transfer of the last bucket any more, because backward is over.
    """
    return size / (buckets * network.bytes_per_second) + buckets * network.call_seconds


def best_number_of_buckets(size: float, network: Network) -> float:
    """Return where `overhead` is smallest: its derivative, o − s / (n²·w), is 0 at √(s / (w·o))."""
    return math.sqrt(size / (network.bytes_per_second * network.call_seconds))


# ==================================================================================================
# Below this line: the measurement, the table, the picture.

NO_LIMIT = "BucketedDDP, no limit"


def sweep(args, device: torch.device, result: dict) -> Network:
    """Measure every size, add to the result what both models say, and return what calls cost."""
    in_turn = args.size in ("nano", "mini", "small")  # others take too much memory
    ours = {NO_LIMIT: rows_of_stages(None)["BucketedDDP"]}
    torchs = {}
    for mb in sorted(set(args.bucket_sizes_mb), reverse=True):
        ours[f"BucketedDDP, {mb:g} MB"] = rows_of_stages(mb)["BucketedDDP"]
        if in_turn:
            torchs[f"{TORCH_DDP}, {mb:g} MB"] = ladder.torch_ddp(mb)[TORCH_DDP]
    groups = [ours | torchs]
    if not in_turn:
        groups = [{}, *({name: row} for name, row in ours.items())]
    alone = measure_beside(args, device, groups, result)
    network = alone.network
    if not in_turn:
        say("Each row was built, measured and freed before the next, not in turn with the others.")
    size = result["gradient_bytes"] = sum(parameter.nbytes for parameter in alone.ready)
    best_mb = size / best_number_of_buckets(size, network) / 2**20
    say(f"formula: of {size / 2**20:.1f} MB of gradients the best bucket has {best_mb:.1f} MB")
    floor = report.percentiles(result["rows"][0]["step_seconds"])[0]
    result["overheads"] = []
    for timed in result["rows"]:
        name = timed["name"]
        buckets = timed["collectives"]
        step = report.percentiles(timed["step_seconds"])[0]
        row = {"name": name, "buckets": buckets, "step": step}
        row |= {"measured": None, "simulated": None, "formula": None}
        if buckets:
            row["measured"] = step - floor
            row["formula"] = overhead(buckets, size, network)
        if name in ours:
            row["simulated"] = alone.step(ours[name]) - floor
        row["ranks"] = []
        for steps in timed["step_seconds"]:
            row["ranks"].append({"min": min(steps), "mean": numpy.mean(steps), "max": max(steps)})
        result["overheads"].append(row)
    return network


def print_rows(rows: list[dict]) -> None:
    """Print a row for each size, in ms."""
    table = []
    no_limit = rows[1]["step"]
    for row in rows:
        cells = [row["name"], str(row["buckets"]), f"{1000 * row['step']:.1f}"]
        for way in ("measured", "simulated", "formula"):
            cells.append("-" if row[way] is None else f"{1000 * row[way]:.1f}")
        table.append([*cells, f"{no_limit / row['step']:.2f}"])
    header = ["step, ms", "buckets", "p50", "overhead", "simulated", "formula", "speed-up"]
    report.print_table(header, table)
    say(
        "p50: of all steps of all ranks; overhead: p50 minus that of no communication; simulated:\n"
        "by predict.py; formula: s/(n·w) + n·o with the row's n buckets, and the o and w of\n"
        "all-reduces that are launched together; speed-up: over one bucket for all."
    )


def draw(result: dict, network: Network, path: Path) -> None:
    """Draw the overhead of each size, from small to large: measured, simulated; the formula."""
    rows = [row for row in result["overheads"] if row["simulated"] is not None]
    buckets = [row["buckets"] for row in rows]
    figure, axes = report.new_figure(8, 4.5)
    numbers = numpy.geomspace(1, max(buckets), 100)
    curve = [1000 * overhead(number, result["gradient_bytes"], network) for number in numbers]
    axes.plot(numbers, curve, ":", color="black", label="formula")
    simulated = [1000 * row["simulated"] for row in rows]
    axes.plot(buckets, simulated, "x", color="#CC79A7", ms=10, mew=2.5, label="simulated")
    measured = [1000 * row["measured"] for row in rows]
    axes.plot(buckets, measured, "o", color="#332288", ms=8, label="measured")
    axes.set_xscale("log")
    axes.invert_xaxis()  # many calls are small buckets
    sizes = [row["name"].partition(", ")[2].removesuffix(" MB") for row in rows]
    axes.set_xticks(buckets, [f"{size}\n{n}" for size, n in zip(sizes, buckets, strict=True)])
    axes.minorticks_off()
    axes.set_xlabel("largest bucket in MB; all-reduces in a step")
    axes.set_ylabel("overhead: step − no communication, ms")
    axes.set_ylim(bottom=min(0, *measured))
    axes.legend(frameon=False)
    report.save_figure(figure, path)


def main():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    sizes = setup.list_of(setup.positive_number)  # one bucket for all is measured anyway
    add("--bucket-sizes-mb", type=sizes, default="0.5,1,2,4,5,10,25", metavar="MB,…")
    ladder.add_training_arguments(parser, steps=6)
    setup.add_plot_arguments(parser, "bucket_sweep.png")
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("05_bucketed/bucket_sweep", args, device)
        network = sweep(args, device, result)
        print_rows(result["overheads"])
        if args.plot and dist.get_rank() == 0:
            draw(result, network, args.plot)
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
