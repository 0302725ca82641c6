"""05: which bucket size is best? Measured, and predicted by a model with two constants.

Small buckets start early and leave little to wait for after backward, but each costs a call; large
ones are the other way round. This script measures BucketedDDP and torch DDP with buckets of several
sizes, interleaved in one run, and compares the time left over after backward with the course's
model: overhead(n) = s / (n·w) + n·o for n buckets, s bytes of gradients, an all-reduce bandwidth w
(bytes per second) and a fixed cost o (seconds) of a call, both calibrated first.

    make 05_bucketed/bucket_sweep NPROC=2                                  (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/bucket_sweep.py   (one host)

Source: Stanford CS336, assignment 2, "DDP bucketed benchmarking".
"""

import argparse
import math
import sys
import time
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
    """(w, o) of this process group: a call takes o + bytes / w seconds."""
    small = 1024
    large = 25 * 2**20
    seconds_of_small = median_seconds(small, device)
    seconds_of_large = median_seconds(large, device)
    return (large - small) / (seconds_of_large - seconds_of_small), seconds_of_small


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


def wrap(model, kind: str, megabytes: float, stage, device: torch.device):
    """The model, wrapped as the candidate (kind, bucket size in MB) wants it."""
    if kind == "no sync":
        return model
    if kind == "BucketedDDP":
        return stage.BucketedDDP(model, megabytes)
    devices = [device] if device.type == "cuda" else None
    view = kind == "torch DDP, view"
    return DistributedDataParallel(
        model, devices, bucket_cap_mb=megabytes, gradient_as_bucket_view=view
    )


def candidate(kind: str, megabytes: float, args, stage, device: torch.device):
    """The function that trains a replica of its own for one step and returns the step's times."""
    from common.timing import Stopwatch

    *shape, batch_size, context_length = stage.SIZES[args.size]
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length), device=device)
    torch.manual_seed(args.seed)
    with device:
        model = wrap(stage.LanguageModel(*shape), kind, megabytes, stage, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = Stopwatch(device)
    waits_in_backward = isinstance(model, DistributedDataParallel)
    if waits_in_backward:  # the last gradient is the first layer's, and comes within backward
        weight = model.module.token_embedding.weight
        weight.register_post_accumulate_grad_hook(lambda _: watch.mark("gradients are there"))

    def step():
        watch.mark("start")
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        if not waits_in_backward:
            watch.mark("gradients are there")
        if isinstance(model, stage.BucketedDDP):
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
        needed *= dist.get_world_size()
    fits = torch.tensor(available_bytes(device) > needed, dtype=torch.int32, device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return bool(fits)


def measure_all(names: list, at_once: bool, result: dict, args, stage, device) -> float:
    """Append a row for every (kind, bucket size) to result["rows"]; returns no sync's median step.

    All are measured in turn, or else one after another, each in turn with the same `no sync`.
    """
    from common import report, timing

    groups = [[name] for name in names]
    if at_once:
        groups = [names]
    constants = (result["gradient_bytes"], result["bandwidth"], result["call_seconds"])
    no_sync = candidate("no sync", 0, args, stage, device)
    for group in groups:
        candidates = {"no sync": no_sync}
        for kind, megabytes in group:
            candidates[kind, megabytes] = candidate(kind, megabytes, args, stage, device)
        samples = timing.measure(candidates, args.steps, args.warmup)
        floor = report.percentiles(samples["no sync"]["step_seconds"])[0]
        for kind, megabytes in group:
            count = timing.count_collectives(candidates[kind, megabytes])
            row = {"kind": kind, "bucket_size_mb": megabytes, "buckets": count}
            row |= samples[kind, megabytes]
            p50 = report.percentiles(row["step_seconds"])[0]
            row |= {"ratio_to_no_sync": p50 / floor, "overhead_seconds": p50 - floor}
            row["predicted_seconds"] = overhead(count, *constants)
            result["rows"].append(row)
        del candidates  # their memory is needed for the next group
    return floor


def print_rows(rows: list[dict]) -> None:
    """The table: percentiles of the step, medians of the rest, in ms."""
    from common import report

    no_bucketing = rows[0]["ratio_to_no_sync"]
    table = []
    for row in rows:
        cells = [row["kind"], f"{row['bucket_size_mb']:g}", str(row["buckets"])]
        cells += report.milliseconds(row["step_seconds"])
        cells.append(report.milliseconds(row["exposed_comm_seconds"])[0])
        cells += [f"{1000 * row[key]:.1f}" for key in ("overhead_seconds", "predicted_seconds")]
        cells.append(f"{no_bucketing / row['ratio_to_no_sync']:.3f}")
        table.append(cells)
    header = ["step, ms", "bucket MB", "buckets", "p50", "p75", "p90", "p95"]
    report.print_table([*header, "exposed", "overhead", "predicted", "speed-up"], table)
    print(
        "Overhead: step p50 − no sync p50; predicted: s/(n·w) + n·o; "
        "speed-up: against no bucketing (inf MB).",
        flush=True,
    )


def sweep(args, stage, device):
    """Calibrate, measure all candidates, print the table, write the files."""
    from common import report

    is_first = dist.get_rank() == 0
    with torch.device("meta"):
        model = stage.LanguageModel(*stage.SIZES[args.size][:5])
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    bandwidth, call = calibrate(device)
    best = gradient_bytes / best_number_of_buckets(gradient_bytes, bandwidth, call) / 2**20
    result = {"world_size": dist.get_world_size(), "backend": args.backend, "device": device.type}
    result |= {"size": args.size, "torch": torch.__version__, "gradient_bytes": gradient_bytes}
    result |= {"bandwidth": bandwidth, "call_seconds": call, "predicted_best_mb": best}
    result |= {"measured_best_mb": None, "rows": []}
    if is_first:
        line = (
            "bucket_sweep: torch {torch}, {backend} on {device}, {world_size} ranks, {size} model"
        )
        print(f"{line.format(**result)}, {gradient_bytes / 2**20:.1f} MB of gradients")
        constants = f"w = {bandwidth / 1e9:.2f} GB/s, o = {1e6 * call:.0f} µs"
        by_the_model = f"by the model the best bucket has √(s·w·o) = {best:.1f} MB"
        print(f"calibrated: {constants}, so {by_the_model}", flush=True)

    names = [("BucketedDDP", math.inf)]
    for megabytes in args.bucket_sizes_mb:
        for kind in ("BucketedDDP", "torch DDP", "torch DDP, view"):
            if (kind, megabytes) not in names:
                names.append((kind, megabytes))
    at_once = all_fit(len(names) + 1, gradient_bytes, device)
    floor = measure_all(names, at_once, result, args, stage, device)
    if not is_first:
        return

    order = "one at a time against the same no sync"
    if at_once:
        order = "interleaved"
    print(
        f"{len(names)} candidates and no sync, {order}; no sync: {1000 * floor:.1f} ms", flush=True
    )
    print_rows(result["rows"])

    # By the ratio to the no sync beside it, so that rows of different measurements compare, too.
    ranking = sorted(result["rows"], key=lambda row: row["ratio_to_no_sync"])
    ours = next(row for row in ranking if row["kind"] == "BucketedDDP")
    torchs = next(row for row in ranking if row["kind"] != "BucketedDDP")
    result["measured_best_mb"] = ours["bucket_size_mb"]
    ratio = ours["ratio_to_no_sync"] / torchs["ratio_to_no_sync"]
    best_torch = f"the best torch DDP ({torchs['kind']}, {torchs['bucket_size_mb']:g} MB)"
    print(
        f"Best BucketedDDP: {ours['bucket_size_mb']:g} MB, by the model {best:.1f} MB; "
        f"its ratio to {best_torch}: {ratio:.3f}, below 1 is faster",
        flush=True,
    )
    if args.json:
        report.write_json(args.json, result)
    if args.plot:
        draw(result, args.plot)
        print(f"picture: {args.plot}", flush=True)


def draw(result: dict, path: Path) -> None:
    """Overhead over bucket size: measured points, the predicted curve, both best sizes."""
    import numpy
    from matplotlib.figure import Figure

    size, bandwidth, call = result["gradient_bytes"], result["bandwidth"], result["call_seconds"]
    size_mb = size / 2**20
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    buckets = numpy.geomspace(1, max(size / 2**19, 2), 200)
    predicted = 1000 * overhead(buckets, size, bandwidth, call)
    axes.plot(size_mb / buckets, predicted, color="black", label="model: s/(n·w) + n·o")
    styles = {
        "BucketedDDP": ("o", "#0072B2"),
        "torch DDP": ("s", "#D55E00"),
        "torch DDP, view": ("^", "#009E73"),
    }
    for kind, (marker, color) in styles.items():
        points = []
        for row in result["rows"]:
            if row["kind"] == kind:
                points.append((min(row["bucket_size_mb"], size_mb), 1000 * row["overhead_seconds"]))
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, marker=marker, color=color, linestyle=":", label=f"{kind}, measured")
    predicted_best = result["predicted_best_mb"]
    measured_best = result["measured_best_mb"]
    line = {"linestyle": "--", "linewidth": 1}
    label = f"best by the model: {predicted_best:.1f} MB"
    axes.axvline(predicted_best, color="black", label=label, **line)
    label = f"best BucketedDDP measured: {measured_best:g} MB"
    axes.axvline(min(measured_best, size_mb), color="#0072B2", label=label, **line)
    where = "{world_size} ranks, {backend} on {device}, {size} model".format(**result)
    axes.set(title=f"Bucket size and overhead, {where}", xscale="log")
    axes.set_xlabel(f"bucket size, MB (at most the model's {size_mb:.0f} MB of gradients)")
    axes.set_ylabel("overhead: step − no sync, ms")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, format="png")


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import bucketed as stage

        from common import setup
    except ModuleNotFoundError as error:
        beside = "copy bucketed.py and the repository's folder common/ beside this script"
        sys.exit(f"error: {error}: {beside}")

    def sizes(text):
        numbers = [setup.positive_number(word) for word in text.split(",")]
        if max(numbers) > 1e6:
            limit = "has a size above 1000000 MB; one bucket for all is measured anyway"
            raise argparse.ArgumentTypeError(f"{text!r} {limit}")
        return numbers

    parser = setup.Parser(__doc__)
    add = parser.add_argument
    defaults = [1.0, 10.0, 100.0, 1000.0]
    add("--bucket-sizes-mb", type=sizes, default=defaults, metavar="1,10,100,1000")
    of_the_model = "of the language model (default: tiny)"
    add("--size", choices=stage.SIZES, default="tiny", help=of_the_model)
    add("--steps", type=setup.whole_number(1), default=18, help="measured (default: 18)")
    not_measured = "steps not measured (default: 5)"
    add("--warmup", type=setup.whole_number(0), default=5, help=not_measured)
    add("--seed", type=setup.whole_number(0), default=0)
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    add("--plot", type=setup.output_file, metavar="FILE", help="the picture, a PNG")
    setup.add_process_group_arguments(parser)
    args = parser.parse_args()

    with setup.process_group(args) as device:
        if dist.get_world_size() == 1:
            nproc = "torchrun's argument --nproc-per-node (NPROC of make)"
            setup.fail(f"{nproc}: '1' rank sends nothing; allowed are 2 and more")
        sweep(args, stage, device)


if __name__ == "__main__":
    main()
