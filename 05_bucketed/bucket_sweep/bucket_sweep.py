"""05: which bucket size is best? Measured, and predicted by a model with two constants.

Small buckets start early and leave little to wait for after backward, but each costs a call; large
ones are the other way round. This script measures BucketedDDP and torch DDP with buckets of several
sizes, and stages 02 and 04 that have none, all in turn in one run, and compares what they cost with
the course's model: overhead(n) = s / (n·w) + n·o for n buckets, s bytes of gradients, an all-reduce
bandwidth w (bytes per second) and a fixed cost o (seconds) of a call, both measured in that run.

    make 05_bucketed/bucket_sweep NPROC=2                                  (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/bucket_sweep/bucket_sweep.py   (one host)

Source: Stanford CS336, assignment 2, "DDP bucketed benchmarking".
"""

import math
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def overhead(buckets: float, size: float, bandwidth: float, call: float) -> float:
    """Seconds left over after backward: one bucket's transfer, and every bucket's call.

    Nothing hides the transfer of the last bucket any more, because backward is over.
    """
    return size / (buckets * bandwidth) + buckets * call


def best_number_of_buckets(size: float, bandwidth: float, call: float) -> float:
    """Where `overhead` is smallest: its derivative in n, o − s / (n²·w), is 0 at √(s / (w·o))."""
    return math.sqrt(size / (bandwidth * call))


def constants(network) -> tuple[float, float]:
    """(w, o) of what calibrate.py has measured: a call by itself takes o + bytes / w seconds."""
    sent = 2 * (network.ranks - 1) / network.ranks  # bytes that leave a rank, for each of a call
    return network.bandwidth / sent, network.call_alone()


# ==================================================================================================
# Below this line: the measurement, the table, the picture.

RUNGS = {"NaiveDDP": "02", "OverlapDDP": "04", "BucketedDDP": "05"}  # of simulate.py
NO_LIMIT = math.inf  # a bucket size: one bucket for everything
STYLES = {  # of the picture: mark, colour
    "NaiveDDP": ("D", "#CC79A7"),
    "OverlapDDP": ("^", "#009E73"),
    "BucketedDDP": ("o", "#0072B2"),
    "torch DDP": ("s", "#D55E00"),
}


def kinds_and_sizes(args) -> list[tuple[str, float | None]]:
    """What is measured: (kind, bucket size in MB), None where there are no buckets."""
    pairs = []
    if not args.no_baseline:
        pairs += [("NaiveDDP", None), ("OverlapDDP", None)]
    pairs.append(("BucketedDDP", NO_LIMIT))
    for megabytes in sorted(set(args.bucket_sizes_mb), reverse=True):
        pairs.append(("BucketedDDP", megabytes))
        if not args.no_baseline:
            pairs.append(("torch DDP", megabytes))
    return pairs


def label(kind: str, megabytes: float | None) -> str:
    """How a candidate is called."""
    return kind if megabytes is None else f"{kind} {megabytes:g} MB"


def wrap(training, kind: str, megabytes: float | None, gradient_as_bucket_view: bool):
    """The model, wrapped as (kind, bucket size in MB) wants it."""
    from bucketed import BucketedDDP
    from naive_ddp import NaiveDDP
    from overlap_ddp import OverlapDDP

    if kind == "NaiveDDP":
        return NaiveDDP(training.model)
    if kind == "OverlapDDP":
        return OverlapDDP(training.model)
    if kind == "BucketedDDP":
        return BucketedDDP(training.model, megabytes)

    def mark_last_gradient(_):
        training.watch.mark("last gradient")

    # torch DDP waits within backward. What it exposes begins with the first layer's gradient.
    training.model.token_embedding.weight.register_post_accumulate_grad_hook(mark_last_gradient)
    return DistributedDataParallel(
        training.model, bucket_cap_mb=megabytes, gradient_as_bucket_view=gradient_as_bucket_view
    )


def all_fit(replicas: int, gradient_bytes: int, device: torch.device) -> bool:
    """Is there memory on every host for so many replicas at once?"""
    from common.setup import available_memory

    # Weights, gradients, two moments and a bucket buffer per replica, and a fifth more.
    needed = 1.2 * 5 * gradient_bytes * replicas
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = available_memory()
        needed *= int(os.environ["LOCAL_WORLD_SIZE"])
    fits = torch.tensor(free > needed, dtype=torch.int32, device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits)


def measure(pairs: list, args, batch_shape: tuple[int, int], alone, device) -> dict:
    """Measure (kind, bucket size) pairs in turn with `no sync` and the experiments of calibrate.py.

    `alone`: the calibrate.Training of those two; each pair has one of its own. Returns "rows",
    "no_sync", and what simulate.py has to know: "step" and "network".
    """
    import calibrate
    from simulate import simulate

    from common import report, timing

    candidates = {"no sync": partial(alone.step, alone.model)}
    for kind, megabytes in pairs:
        training = calibrate.Training(args, batch_shape, device)
        model = wrap(training, kind, megabytes, args.gradient_as_bucket_view)
        candidates[label(kind, megabytes)] = partial(training.step, model)
    everything = calibrate.with_experiments(candidates, alone, every=3)
    samples = timing.measure(everything, args.steps, args.warmup)
    gradient_bytes = [parameter.nbytes for parameter in alone.parameters]
    step, network = calibrate.step_and_network(samples, gradient_bytes, dist.get_world_size())
    step_alone = step.forward + step.backward + step.optimizer
    no_sync = report.percentiles(samples["no sync"]["step_seconds"])[0]
    rows = []
    for kind, megabytes in pairs:
        name = label(kind, megabytes)
        row = {"kind": kind, "bucket_size_mb": megabytes, **samples[name]}
        row["buckets"] = timing.count_collectives(candidates[name])
        p50 = report.percentiles(row["step_seconds"])[0]
        row["ratio_to_no_sync"] = p50 / no_sync
        row["overhead_seconds"] = p50 - no_sync
        row["simulated_seconds"] = None  # torch DDP is not one of those that simulate.py knows
        if kind in RUNGS:
            simulated = simulate(step, network, RUNGS[kind], megabytes or 25.0)
            row["simulated_seconds"] = simulated.step_seconds - step_alone
        rows.append(row)
    return {"rows": rows, "no_sync": samples["no sync"], "step": step, "network": network}


def print_rows(rows: list[dict]) -> None:
    """The table: percentiles of the step, medians of the rest, in ms."""
    from common import report
    from common.setup import say

    one_bucket = next(row for row in rows if row["bucket_size_mb"] == NO_LIMIT)
    table = []
    for row in rows:
        size = "-" if row["bucket_size_mb"] is None else f"{row['bucket_size_mb']:g}"
        cells = [row["kind"], size, str(row["buckets"])]
        cells += report.milliseconds(row["step_seconds"])
        cells.append(f"{row['ratio_to_no_sync']:.3f}")
        cells.append(report.milliseconds(row["exposed_comm_seconds"])[0])
        for key in ("overhead_seconds", "predicted_seconds", "simulated_seconds"):
            cells.append("-" if row[key] is None else f"{1000 * row[key]:.1f}")
        cells.append(f"{one_bucket['ratio_to_no_sync'] / row['ratio_to_no_sync']:.3f}")
        table.append(cells)
    header = ["step, ms", "bucket MB", "buckets", "p50", "p75", "p90", "p95", "/no sync"]
    report.print_table([*header, "exposed", "overhead", "formula", "model", "speed-up"], table)
    say("Overhead: step p50 − no sync p50; formula: s/(n·w) + n·o with the buckets of the row;")
    say(
        "model: simulate.py, with what calibrate.py measured in the same run; speed-up: against one"
    )
    say("bucket for everything (inf MB).")


def sweep(args, device: torch.device) -> None:
    """Measure all candidates, print the table, write the files."""
    import bucketed
    import calibrate

    from common import report
    from common.setup import say

    result = report.begin("05_bucketed/bucket_sweep", args, device)
    model = report.describe(bucketed.LanguageModel, bucketed.SIZES, args, replicas=2)
    gradient_bytes = model["parameters"] * getattr(torch, args.dtype).itemsize
    batch_shape = model["batch_size"], model["context_length"]
    pairs = kinds_and_sizes(args)
    at_once = all_fit(len(pairs) + 1, gradient_bytes, device)
    alone = calibrate.Training(args, batch_shape, device)
    if at_once:
        groups = [measure(pairs, args, batch_shape, alone, device)]
    else:  # the memory of each is free again before the next
        groups = [measure([pair], args, batch_shape, alone, device) for pair in pairs]

    rows = [row for group in groups for row in group["rows"]]
    bandwidth, call = constants(groups[0]["network"])
    for row in rows:
        row["predicted_seconds"] = overhead(row["buckets"], gradient_bytes, bandwidth, call)
    best = gradient_bytes / best_number_of_buckets(gradient_bytes, bandwidth, call) / 2**20
    result |= {
        "model": model,
        "gradient_bytes": gradient_bytes,
        "bandwidth": bandwidth,
        "call_seconds": call,
        "predicted_best_mb": best,
        "rows": rows,
        "no_sync": [group["no_sync"] for group in groups],
        "simulated": [[asdict(group["step"]), asdict(group["network"])] for group in groups],
    }
    found = f"w = {bandwidth / 1e9:.2f} GB/s, o = {1e6 * call:.0f} µs"
    megabytes = f"s = {gradient_bytes / 2**20:.1f} MB of gradients"
    say(f"calibrated: {found}; with {megabytes} the formula's best bucket has {best:.1f} MB")
    order = "interleaved" if at_once else "one at a time against the same no sync"
    floor = report.milliseconds(groups[0]["no_sync"]["step_seconds"])[0]
    say(f"{len(pairs)} candidates and no sync, {order}; no sync: {floor} ms")
    print_rows(rows)
    say_the_best(result)
    if args.plot and dist.get_rank() == 0:
        draw(result, args.plot)
        say(f"written: {args.plot}")
    report.write_json(args.json, result)


def say_the_best(result: dict) -> None:
    """The last line: the best bucket, and how it compares with torch DDP's best."""
    from common.setup import say

    def ratio(row):  # to the no sync beside it, so that rows of different groups compare, too
        return row["ratio_to_no_sync"]

    bucketed = [row for row in result["rows"] if row["kind"] == "BucketedDDP"]
    best = min(bucketed, key=ratio)
    by_model = min(bucketed, key=lambda row: row["simulated_seconds"])
    result["measured_best_mb"] = best["bucket_size_mb"]
    line = f"best BucketedDDP: {best['bucket_size_mb']:g} MB, "
    line += f"by the formula {result['predicted_best_mb']:.1f} MB, "
    line += f"by the model {by_model['bucket_size_mb']:g} MB"
    of_torch = [row for row in result["rows"] if row["kind"] == "torch DDP"]
    if of_torch:
        bar = min(of_torch, key=ratio)
        line += f"; {ratio(best) / ratio(bar):.3f} × the best torch DDP"
        line += f" ({bar['bucket_size_mb']:g} MB)"
    say(line)


def points_of(rows: list[dict], kind: str, key: str) -> tuple[list, list]:
    """Numbers of buckets, and the milliseconds of rows of this kind; one point for each number."""
    points = {}
    for row in rows:
        if row["kind"] == kind and row[key] is not None:
            points.setdefault(row["buckets"], 1000 * row[key])
    numbers = sorted(points)
    return numbers, [points[buckets] for buckets in numbers]


def draw(result: dict, path: Path) -> None:
    """Overhead over the number of buckets: measured points, simulated ones, the formula's curve."""
    import numpy
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for kind, (marker, color) in STYLES.items():
        look = {"marker": marker, "color": color, "markersize": 8}
        measured = points_of(rows, kind, "overhead_seconds")
        if measured[0]:
            axes.plot(*measured, linestyle=":", label=f"{kind}, measured", **look)
        simulated = points_of(rows, kind, "simulated_seconds")
        if simulated[0]:
            axes.plot(*simulated, markerfacecolor="none", label=f"{kind}, simulated", **look)
    most = max(row["buckets"] for row in rows)
    buckets = numpy.geomspace(1, max(most, 2), 200)
    seconds = overhead(
        buckets, result["gradient_bytes"], result["bandwidth"], result["call_seconds"]
    )
    label = "the course's formula: s/(n·w) + n·o"
    axes.plot(buckets, 1000 * seconds, color="black", label=label)
    where = "{world_size} ranks, {backend} on {device}".format(**result)
    megabytes = result["gradient_bytes"] / 2**20
    title = f"What synchronization costs: {result['model']['size']} model, {megabytes:.0f} MB"
    axes.set(title=f"{title} of gradients, {where}", xscale="log")
    axes.set_xlabel("all-reduces in a step (more and smaller buckets →)")
    axes.set_ylabel("overhead: step − no sync, ms")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, format="png")


def main():
    folder = Path(__file__).resolve().parent
    stage = folder.parent
    root = stage.parent
    others = [stage / "predict", root / "02_naive_ddp", root / "04_overlap_ddp"]
    sys.path[:0] = [str(path) for path in (folder, stage, root, *others)]
    try:
        import bucketed
        import calibrate  # noqa: F401
        import naive_ddp  # noqa: F401
        import overlap_ddp  # noqa: F401
        import simulate  # noqa: F401

        from common import setup
    except ModuleNotFoundError as error:
        needed = (
            "the repository's folder common/, the scripts of 02, 04, 05 and 05_bucketed/predict"
        )
        sys.exit(f"error: {error}: copy {needed} beside this script")

    allowed = "a number above 0, at most 1000000; one bucket for all is measured anyway"
    size = setup.checked(float, lambda number: 0 < number <= 1e6, allowed)
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--bucket-sizes-mb", type=setup.list_of(size), default="0.25,1,5,25", metavar="MB,MB,…")
    setup.add_training_arguments(parser, bucketed.SIZES, steps=10)
    parser.set_defaults(size="deep")
    add("--gradient-as-bucket-view", action="store_true", help="torch DDP's option of that name")
    setup.add_plot_arguments(parser, "bucket_sweep.png")
    args = parser.parse_args()

    with setup.process_group(args) as device:
        if dist.get_world_size() == 1:
            nproc = "torchrun's argument --nproc-per-node (NPROC of make)"
            setup.fail(f"{nproc}: '1' rank sends nothing; allowed are 2 and more")
        sweep(args, device)


if __name__ == "__main__":
    main()
