"""05: which bucket size is best? Measured, and predicted by a model with two constants.

Small buckets start early and leave little to wait for after backward, but each costs a call; large
ones are the other way round. This script measures BucketedDDP and torch DDP with buckets of several
sizes, and stages 02 to 04 that have none, all in turn in one run, and compares what they cost with
the course's model: overhead(n) = s / (n·w) + n·o for n buckets, s bytes of gradients, an all-reduce
bandwidth w (bytes per second) and a fixed cost o (seconds) of a call, both measured in that run.

    make 05_bucketed/bucket_sweep NPROC=2                                  (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/bucket_sweep/bucket_sweep.py   (one host)

Source: Stanford CS336, assignment 2, "DDP bucketed benchmarking".
"""

import gc
import math
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "predict"), str(FOLDER.parent.parent)]

import calibrate  # noqa: E402
from bucketed import LanguageModel  # noqa: E402
from simulate import Network, Step, simulate  # noqa: E402

from common import report, setup, timing  # noqa: E402
from common.setup import say  # noqa: E402


def overhead(buckets: float, size: float, bandwidth: float, call: float) -> float:
    """Seconds left over after backward: one bucket's transfer, and every bucket's call.

    Nothing hides the transfer of the last bucket any more, because backward is over.
    """
    return size / (buckets * bandwidth) + buckets * call


def best_number_of_buckets(size: float, bandwidth: float, call: float) -> float:
    """Where `overhead` is smallest: its derivative in n, o − s / (n²·w), is 0 at √(s / (w·o))."""
    return math.sqrt(size / (bandwidth * call))


def constants(network: Network) -> tuple[float, float]:
    """(w, o) of what calibrate.py has measured: a call by itself takes o + bytes / w seconds."""
    sent = 2 * (network.ranks - 1) / network.ranks  # bytes that leave a rank, for each of a call
    return network.bandwidth / sent, network.call_alone


# ==================================================================================================
# Below this line: the measurement, the table, the picture.

NO_LIMIT = math.inf  # a bucket size: one bucket for everything
RUNGS = {"NaiveDDP": "02", "FlatDDP": "03", "OverlapDDP": "04", "BucketedDDP": "05"}
LEGEND = """\
Overhead: step p50 − no sync p50; formula: s/(n·w) + n·o with the buckets of the row;
model: simulate.py, with what calibrate.py measured in the same run; speed-up: against one
bucket for everything (inf MB)."""
STYLES = {  # of the picture: mark, colour
    "BucketedDDP": ("o", "#0072B2"),
    "torch DDP": ("s", "#D55E00"),
}


def kinds_and_sizes(bucket_sizes_mb: list[float]) -> list[tuple[str, float | None]]:
    """What is measured: (kind, bucket size in MB), None where there are no buckets."""
    pairs = [("NaiveDDP", None), ("FlatDDP", None), ("OverlapDDP", None)]
    pairs.append(("BucketedDDP", NO_LIMIT))
    for megabytes in sorted(set(bucket_sizes_mb), reverse=True):
        pairs += [("BucketedDDP", megabytes), ("torch DDP", megabytes)]
    return pairs


def label(kind: str, megabytes: float | None) -> str:
    return kind if megabytes is None else f"{kind} {megabytes:g} MB"


def wrap(model, kind: str, megabytes: float | None):
    """The model, wrapped as (kind, bucket size in MB) wants it."""
    if kind in RUNGS:
        return calibrate.wrap(model, RUNGS[kind], megabytes)
    return DistributedDataParallel(model, bucket_cap_mb=megabytes)


def all_fit(buffers: int, gradient_bytes: int, device: torch.device) -> bool:
    """Is there memory on every host for the model and so many wrappers' buffers at once?"""
    # Weights, gradients, two moments and each wrapper's buckets, and a fifth more.
    needed = 1.2 * (4 + buffers) * gradient_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = setup.available_memory()
        needed *= int(os.environ["LOCAL_WORLD_SIZE"])
    fits = torch.tensor(free > needed, dtype=torch.int32, device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits)


def measure(pairs: list, args, training, experiments: bool) -> dict:
    """Measure `no sync` and (kind, bucket size) pairs in turn, with calibrate.py's experiments.

    All wrap the one model of `training`. Returns the samples by name, as timing.measure does, and
    adds the number of collectives. Traces of what is in `pairs` are written if --trace says so.
    """
    steps = {"no sync": partial(training.step, training.model)}
    for pair in pairs:
        steps[label(*pair)] = partial(training.step, wrap(training.model, *pair))
    everything = steps
    if experiments:
        everything = calibrate.with_experiments(steps, training, every=3)
    samples = timing.measure(everything, args.steps, args.warmup)
    samples["no sync"]["collectives_per_step"] = 0
    for pair in pairs:
        name = label(*pair)
        trace = None
        if args.trace:
            trace = Path(args.trace) / (name.lower().replace(" ", "-") + ".json")
        samples[name]["collectives_per_step"] = timing.count_collectives(steps[name], trace)
    return samples


def candidates_of(pairs: list, samples: dict, step: Step, network: Network) -> list[dict]:
    """`no sync` and the pairs that were measured with it, each with what it costs."""
    no_sync = report.percentiles(samples["no sync"]["step_seconds"])[0]
    candidates = []
    for kind, megabytes in [("no sync", None), *pairs]:
        name = label(kind, megabytes)
        candidate = {"name": name, "kind": kind, "bucket_size_mb": megabytes, **samples[name]}
        p50 = report.percentiles(candidate["step_seconds"])[0]
        candidate["ratio_to_no_sync"] = p50 / no_sync
        candidate["overhead_seconds"] = p50 - no_sync
        candidate["simulated_seconds"] = None  # torch DDP is none that simulate.py knows
        if kind in RUNGS:
            simulated = simulate(step, network, RUNGS[kind], megabytes)
            candidate["simulated_seconds"] = simulated - step.seconds_alone
        candidates.append(candidate)
    return candidates


def sweep(args, device: torch.device) -> dict:
    """Measure all candidates; returns what --json writes."""
    result = report.begin("05_bucketed/bucket_sweep", args, device)
    # One replica. The sixth copy: in its second step torch DDP has old buckets and new ones.
    model = report.describe(LanguageModel, args, replicas=1, copies=6)
    batch_shape = model["batch_size"], model["context_length"]
    training = calibrate.Training(args, batch_shape, device)
    gradient_bytes = sum(training.gradient_bytes)
    # torch DDP waits within backward. What it exposes begins with the first layer's gradient.
    timing.mark_last_gradient(training.watch, training.model.token_embedding.weight)

    pairs = kinds_and_sizes(args.bucket_sizes_mb)
    groups = [pairs]
    order = "interleaved"
    if not all_fit(len(pairs), gradient_bytes, device):
        groups = [[pair] for pair in pairs]
        order = "one at a time against the same no sync"
    candidates = []
    for number, group in enumerate(groups):
        samples = measure(group, args, training, experiments=number == 0)
        gc.collect()  # the wrappers of a group end, with their buckets, before the next
        if number == 0:
            step = calibrate.step_of(samples, training.gradient_bytes)
            network = calibrate.network_of(samples, step, dist.get_world_size())
        candidates += candidates_of(group, samples, step, network)

    bandwidth, call = constants(network)
    for candidate in candidates:
        if candidate["kind"] != "no sync":
            buckets = candidate["collectives_per_step"]
            candidate["formula_seconds"] = overhead(buckets, gradient_bytes, bandwidth, call)
    best = gradient_bytes / best_number_of_buckets(gradient_bytes, bandwidth, call) / 2**20
    found = f"w = {bandwidth / 1e9:.2f} GB/s, o = {1e6 * call:.0f} µs"
    megabytes = f"s = {gradient_bytes / 2**20:.1f} MB of gradients"
    say(f"calibrated: {found}; with {megabytes} the formula's best bucket has {best:.1f} MB")
    floor = report.milliseconds(candidates[0]["step_seconds"])[0]
    say(f"{len(pairs)} candidates and no sync, {order}; no sync: {floor} ms")
    return result | {
        "model": model,
        "gradient_bytes": gradient_bytes,
        "bandwidth": bandwidth,
        "call_seconds": call,
        "formula_best_mb": best,
        "interleaved": len(groups) == 1,
        "candidates": candidates,
    }


def print_rows(rows: list[dict]) -> None:
    """The table: percentiles of the step, medians of the rest, in ms."""
    one_bucket = next(row for row in rows if row["bucket_size_mb"] == NO_LIMIT)
    table = []
    for row in rows:
        size = "-" if row["bucket_size_mb"] is None else f"{row['bucket_size_mb']:g}"
        cells = [row["kind"], size, str(row["collectives_per_step"])]
        cells += report.milliseconds(row["step_seconds"])
        cells.append(f"{row['ratio_to_no_sync']:.3f}")
        cells.append(report.milliseconds(row["exposed_comm_seconds"])[0])
        for key in ("overhead_seconds", "formula_seconds", "simulated_seconds"):
            cells.append("-" if row[key] is None else f"{1000 * row[key]:.1f}")
        cells.append(f"{one_bucket['ratio_to_no_sync'] / row['ratio_to_no_sync']:.3f}")
        table.append(cells)
    header = ["step, ms", "bucket MB", "buckets", "p50", "p75", "p90", "p95", "/no sync"]
    report.print_table([*header, "exposed", "overhead", "formula", "model", "speed-up"], table)
    say(LEGEND)


def say_the_best(rows: list[dict], formula_best_mb: float) -> None:
    """The last line: the best bucket, and how it compares with torch DDP's best."""

    def ratio(row):  # to the no sync beside it, so that rows of different groups compare, too
        return row["ratio_to_no_sync"]

    bucketed = [row for row in rows if row["kind"] == "BucketedDDP"]
    best = min(bucketed, key=ratio)
    by_model = min(bucketed, key=lambda row: row["simulated_seconds"])
    bar = min([row for row in rows if row["kind"] == "torch DDP"], key=ratio)
    line = f"best BucketedDDP: {best['bucket_size_mb']:g} MB, "
    line += f"by the formula {formula_best_mb:.1f} MB, "
    line += f"by the model {by_model['bucket_size_mb']:g} MB; "
    line += f"{ratio(best) / ratio(bar):.3f} × the best torch DDP ({bar['bucket_size_mb']:g} MB)"
    say(line)


def draw(result: dict, rows: list[dict], path: Path) -> None:
    """Overhead over the number of buckets: BucketedDDP's, torch DDP's and the formula's."""
    import numpy
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    most = 1
    for kind, (marker, color) in STYLES.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        buckets = [row["collectives_per_step"] for row in of_kind]
        measured = [1000 * row["overhead_seconds"] for row in of_kind]
        axes.plot(buckets, measured, marker=marker, color=color, label=kind)
        most = max(most, *buckets)
        if kind == "BucketedDDP":
            for row, *point in zip(of_kind, buckets, measured, strict=True):
                size = f"{row['bucket_size_mb']:g} MB".replace("inf MB", "no limit")
                axes.annotate(size, point, xytext=(0, 14), textcoords="offset points", ha="center")
    buckets = numpy.geomspace(1, max(most, 2), 200)
    of_network = result["bandwidth"], result["call_seconds"]
    formula = 1000 * overhead(buckets, result["gradient_bytes"], *of_network)
    axes.plot(buckets, formula, color="black", linestyle=":", label="the course's formula")
    of_run = "{world_size} ranks, {backend} on {device}".format(**result)
    axes.set_title(f"What synchronization costs: {result['model']['size']} model, {of_run}")
    axes.set_xlabel("all-reduces in a step (more and smaller buckets →)")
    axes.set_ylabel("overhead: step − no sync, ms")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, format="png")


def main():
    allowed = "a number above 0, at most 1000000; one bucket for all is measured anyway"
    size = setup.checked(float, lambda number: 0 < number <= 1e6, allowed)
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--bucket-sizes-mb", type=setup.list_of(size), default="0.25,1,5,25", metavar="MB,MB,…")
    traces = "a Chrome trace per candidate: three more steps of rank 0"
    add("--trace", type=setup.output_folder, metavar="DIR", help=traces)
    setup.add_training_arguments(parser, steps=10)
    parser.set_defaults(size="mini")
    setup.add_plot_arguments(parser, "bucket_sweep.png")
    args = parser.parse_args()

    with setup.process_group(args) as device:
        calibrate.refuse_one_rank()
        result = sweep(args, device)
        rows = [row for row in result["candidates"] if row["kind"] != "no sync"]
        print_rows(rows)
        if result["interleaved"]:  # else the rows' ratios scatter by more than they differ
            say_the_best(rows, result["formula_best_mb"])
        if args.plot and dist.get_rank() == 0:
            draw(result, rows, args.plot)
            say(f"written: {args.plot}")
        report.write_json(args.json, result)


if __name__ == "__main__":
    main()
