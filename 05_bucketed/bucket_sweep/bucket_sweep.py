"""05: which bucket size is best? Measured, and predicted by a model with two constants.

Small buckets start early and leave little to wait for after backward, but each costs a call; large
ones are the other way round. This script measures BucketedDDP and torch DDP with buckets of several
sizes, and stages 02 and 04 that have none, all in turn in one run, and compares what they cost with
the course's model: overhead(n) = s / (n·w) + n·o for n buckets, s bytes of gradients, an all-reduce
bandwidth w (bytes per second) and a fixed cost o (seconds) of a call, both calibrated first.

    make 05_bucketed/bucket_sweep NPROC=2                                  (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/bucket_sweep.py   (one host)

Source: Stanford CS336, assignment 2, "DDP bucketed benchmarking".
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def overhead(buckets: float, size: float, bandwidth: float, call: float) -> float:
    """Seconds left over after backward: one bucket's transfer, and every bucket's call.

    Nothing hides the transfer of the last bucket any more, because backward is over.
    """
    return size / (buckets * bandwidth) + buckets * call


def best_number_of_buckets(size: float, bandwidth: float, call: float) -> float:
    """Where `overhead` is smallest: its derivative in n, o − s / (n²·w), is 0 at √(s / (w·o))."""
    return math.sqrt(size / (bandwidth * call))


def calibrate(device: torch.device) -> tuple[float, float]:
    """(w, o) of this process group: a call takes o + bytes / w seconds.

    o is stage 01's cost of a small call among others, when the waiting threads are awake.
    """
    from alpha_beta import call_seconds

    from common.setup import progress

    progress("calibrating")
    call = call_seconds(dist.all_reduce, device)
    large = 25 * 2**20
    return large / (median_seconds(large, device) - call), call


def median_seconds(size: int, device: torch.device, calls: int = 100) -> float:
    """The median time of an all-reduce of so many bytes: the slowest rank's, the same on all."""
    tensor = torch.zeros(size // 4, device=device)
    seconds = []
    for _ in range(calls):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = torch.tensor(sorted(seconds)[calls // 2], device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


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


def label(kind: str, megabytes: float | None) -> str:
    """How a candidate is called."""
    return kind if megabytes is None else f"{kind} {megabytes:g} MB"


def wrap(model, kind: str, megabytes: float | None, args, stages: dict, device: torch.device):
    """The model, wrapped as the candidate (kind, bucket size in MB) wants it."""
    if kind == "no sync":
        return model
    if kind == "BucketedDDP":
        return stages[kind](model, megabytes)
    if kind in stages:
        return stages[kind](model)
    devices = [device] if device.type == "cuda" else None
    view = args.gradient_as_bucket_view
    return DistributedDataParallel(
        model, devices, bucket_cap_mb=megabytes, gradient_as_bucket_view=view
    )


def candidate(kind: str, megabytes: float | None, args, batch_shape, stages, device):
    """The function that trains a replica of its own for one step and returns the step's times."""
    import bucketed

    from common.timing import Stopwatch

    shape = bucketed.SIZES[args.size][:5]
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(shape[-1], (2, *batch_shape), device=device)
    torch.manual_seed(args.seed)
    with device:
        model = bucketed.LanguageModel(*shape).to(getattr(torch, args.dtype))
        model = wrap(model, kind, megabytes, args, stages, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = Stopwatch(device)
    waits_in_backward = isinstance(model, DistributedDataParallel)
    if waits_in_backward:  # the last gradient is the first layer's, and comes within backward
        weight = model.module.token_embedding.weight
        weight.register_post_accumulate_grad_hook(lambda _: watch.mark("gradients are there"))

    def step():
        watch.mark("start")
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        if not waits_in_backward:
            watch.mark("gradients are there")
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        watch.mark("gradients are synchronized")
        optimizer.step()
        optimizer.zero_grad()
        watch.mark("end")
        exposed = watch.seconds("gradients are there", "gradients are synchronized")
        return {"step_seconds": watch.seconds("start", "end"), "exposed_comm_seconds": exposed}

    return step


def available_bytes(device: torch.device) -> float:
    """Memory that is free now on the GPU, or on this host where the system tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    system = Path("/proc/meminfo")
    if system.exists():
        for line in system.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    return math.inf


def all_fit(candidates: int, gradient_bytes: int, device: torch.device) -> bool:
    """Is there memory on every host for so many replicas at once?"""
    # Weights, gradients, two moments and a bucket buffer per replica, and a fifth more.
    needed = 1.2 * 5 * gradient_bytes * candidates
    if device.type == "cpu":
        needed *= int(os.environ["LOCAL_WORLD_SIZE"])
    fits = torch.tensor(available_bytes(device) > needed, dtype=torch.int32, device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits)


def gradient_sizes(args) -> list[int]:
    """Bytes of the gradients, from the last parameter to the first."""
    import bucketed

    with torch.device("meta"):
        model = bucketed.LanguageModel(*bucketed.SIZES[args.size][:5])
    return [p.nbytes for p in reversed(list(model.to(getattr(torch, args.dtype)).parameters()))]


def measure_all(names: list, at_once: bool, result: dict, args, make, device) -> float:
    """Append a row for every (kind, bucket size) to result["rows"]; returns no sync's median step.

    All are measured in turn, or else one after another, each in turn with the same `no sync`, and
    with the experiments of calibrate.py. `make` makes a candidate: make(kind, bucket size).
    """
    import calibrate

    from common import report, timing

    groups = [[name] for name in names]
    if at_once:
        groups = [names]
    constants = (result["gradient_bytes"], result["bandwidth"], result["call_seconds"])
    no_sync = make("no sync", None)
    model = result["model"]
    alone = calibrate.build(args, (model["batch_size"], model["context_length"]), device)
    for group in groups:
        candidates = {"no sync": no_sync}
        for kind, megabytes in group:
            candidates[label(kind, megabytes)] = make(kind, megabytes)
        everything = calibrate.with_experiments(candidates, *alone, device, every=3)
        samples = timing.measure(everything, args.steps, args.warmup)
        known = calibrate.step_and_network(samples, result["gradients"], result["world_size"])
        result["simulated"].append([asdict(one) for one in known])
        result["no_sync"].append(samples["no sync"])  # one for each group
        floor = report.percentiles(samples["no sync"]["step_seconds"])[0]
        for kind, megabytes in group:
            name = label(kind, megabytes)
            row = {"kind": kind, "bucket_size_mb": megabytes, **samples[name]}
            row["buckets"] = timing.count_collectives(candidates[name])
            p50 = report.percentiles(row["step_seconds"])[0]
            row |= {"ratio_to_no_sync": p50 / floor, "overhead_seconds": p50 - floor}
            row["predicted_seconds"] = overhead(row["buckets"], *constants)
            row["simulated_seconds"] = simulated_overhead(kind, megabytes, *known)
            result["rows"].append(row)
        del candidates  # their memory is needed for the next group
    return floor


def simulated_overhead(kind: str, megabytes: float | None, step, network) -> float | None:
    """What simulate.py says that a step takes longer than without communication; not of torch's."""
    from simulate import simulate

    if kind not in RUNGS:
        return None
    seconds = simulate(step, network, RUNGS[kind], megabytes or 25.0).step_seconds
    return seconds - (step.forward + step.backward + step.optimizer)


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


def sweep(args, stages: dict, device: torch.device) -> None:
    """Calibrate, measure all candidates, print the table, write the files."""
    import bucketed

    from common import report
    from common.setup import say

    result = report.begin("05_bucketed/bucket_sweep", args, device)
    model = report.describe(bucketed.LanguageModel, bucketed.SIZES, args, replicas=2)
    gradient_bytes = model["parameters"] * getattr(torch, args.dtype).itemsize
    bandwidth, call = calibrate(device)
    best = gradient_bytes / best_number_of_buckets(gradient_bytes, bandwidth, call) / 2**20
    result |= {"model": model, "gradient_bytes": gradient_bytes, "bandwidth": bandwidth}
    result |= {"call_seconds": call, "predicted_best_mb": best, "rows": []}
    result |= {"no_sync": [], "simulated": [], "gradients": gradient_sizes(args)}
    constants = f"w = {bandwidth / 1e9:.2f} GB/s, o = {1e6 * call:.0f} µs"
    megabytes = f"s = {gradient_bytes / 2**20:.1f} MB of gradients"
    say(f"calibrated: {constants}; with {megabytes} the formula's best bucket has {best:.1f} MB")

    kinds = ["BucketedDDP"]
    names = []
    if not args.no_baseline:
        names = [("NaiveDDP", None), ("OverlapDDP", None)]
        kinds.append("torch DDP")
    names.append(("BucketedDDP", NO_LIMIT))
    names += [(kind, size) for size in reversed(args.bucket_sizes_mb) for kind in kinds]
    names = list(dict.fromkeys(names))
    batch_shape = model["batch_size"], model["context_length"]

    def make(kind, megabytes):
        return candidate(kind, megabytes, args, batch_shape, stages, device)

    at_once = all_fit(len(names) + 2, gradient_bytes, device)
    floor = measure_all(names, at_once, result, args, make, device)
    order = "interleaved" if at_once else "one at a time against the same no sync"
    say(f"{len(names)} candidates and no sync, {order}; no sync: {1000 * floor:.1f} ms")
    print_rows(result["rows"])
    say_the_best(result, best)
    if args.plot and dist.get_rank() == 0:
        draw(result, args.plot)
        say(f"written: {args.plot}")
    report.write_json(args.json, result)


def say_the_best(result: dict, predicted: float) -> None:
    """The last line: the best bucket, and how it compares with torch DDP's best."""
    from common.setup import say

    # By the ratio to the no sync beside it, so that rows of different measurements compare, too.
    ranking = sorted(result["rows"], key=lambda row: row["ratio_to_no_sync"])
    ours = next(row for row in ranking if row["kind"] == "BucketedDDP")
    result["measured_best_mb"] = ours["bucket_size_mb"]
    simulated = [row for row in ranking if row["kind"] == "BucketedDDP"]
    by_model = min(simulated, key=lambda row: row["simulated_seconds"])["bucket_size_mb"]
    line = f"best BucketedDDP: {ours['bucket_size_mb']:g} MB, by the formula {predicted:.1f} MB"
    line += f", by the model {by_model:g} MB"
    torchs = [row for row in ranking if row["kind"] == "torch DDP"]
    if torchs:
        ratio = ours["ratio_to_no_sync"] / torchs[0]["ratio_to_no_sync"]
        line += f"; {ratio:.3f} × the best torch DDP ({torchs[0]['bucket_size_mb']:g} MB)"
    say(line)


def points_of(rows: list[dict], kind: str, key: str) -> tuple[list, list]:
    """Numbers of buckets, and the milliseconds of rows of this kind; one point for each number."""
    points = {}
    for row in rows:
        if row["kind"] == kind and row[key] is not None:
            points.setdefault(row["buckets"], 1000 * row[key])
    x = sorted(points)
    return x, [points[buckets] for buckets in x]


def draw(result: dict, path: Path) -> None:
    """Overhead over the number of buckets: measured points and the formula's curve."""
    import numpy
    from matplotlib.figure import Figure

    constants = (result["gradient_bytes"], result["bandwidth"], result["call_seconds"])
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for kind, (marker, color) in STYLES.items():
        x, y = points_of(result["rows"], kind, "overhead_seconds")
        look = {"marker": marker, "color": color, "markersize": 8}
        if x:
            axes.plot(x, y, linestyle=":", label=f"{kind}, measured", **look)
        x, y = points_of(result["rows"], kind, "simulated_seconds")
        if x:
            label = f"{kind}, simulated"
            axes.plot(x, y, markerfacecolor="none", label=label, **look)
    most = max(row["buckets"] for row in result["rows"])
    buckets = numpy.geomspace(1, max(most, 2), 200)
    formula = 1000 * overhead(buckets, *constants)
    axes.plot(buckets, formula, color="black", label="the course's formula: s/(n·w) + n·o")
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
    others = ("01_allreduce", "02_naive_ddp", "04_overlap_ddp")
    neighbours = [folder.parent / name for name in others]
    sys.path[:0] = [str(path) for path in (folder, folder.parent, *neighbours)]
    try:
        import alpha_beta  # noqa: F401
        from bucketed import SIZES, BucketedDDP
        from naive_ddp import NaiveDDP
        from overlap_ddp import OverlapDDP

        from common import setup
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/ and the scripts of 01 to 05"
        sys.exit(f"error: {error}: copy {needed} beside this script")

    def sizes(text):
        numbers = [setup.positive_number(word) for word in text.split(",")]
        if max(numbers) > 1e6:
            limit = "has a size above 1000000 MB; one bucket for all is measured anyway"
            raise argparse.ArgumentTypeError(f"{text!r} {limit}")
        return sorted(set(numbers))

    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--bucket-sizes-mb", type=sizes, default="0.25,1,5,25", metavar="MB,MB,…")
    setup.add_training_arguments(parser, SIZES, steps=10)
    parser.set_defaults(size="deep")
    add("--gradient-as-bucket-view", action="store_true", help="torch DDP's option of that name")
    add("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    args = parser.parse_args()

    with setup.process_group(args) as device:
        if dist.get_world_size() == 1:
            nproc = "torchrun's argument --nproc-per-node (NPROC of make)"
            setup.fail(f"{nproc}: '1' rank sends nothing; allowed are 2 and more")
        stages = {"NaiveDDP": NaiveDDP, "OverlapDDP": OverlapDDP, "BucketedDDP": BucketedDDP}
        sweep(args, stages, device)


if __name__ == "__main__":
    main()
