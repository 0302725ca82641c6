"""05: which bucket size is best? Measured, and predicted by a model with two constants.

Small buckets start early and leave little to wait for after backward, but each costs a call; large ones are the other
way round. This script measures BucketedDDP and torch DDP with buckets of several sizes, interleaved in one run, and
compares the time left over after backward with the course's model: overhead(n) = s / (n·w) + n·o for n buckets, s bytes
of gradients, an all-reduce bandwidth w (bytes per second) and a fixed cost o (seconds) of a call, both calibrated first.

    make 05_bucketed/bucket_sweep NPROC=2                                      (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 05_bucketed/bucket_sweep.py       (one host)

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
    """Seconds left over after backward: one bucket's transfer, which nothing hides any more, and every bucket's call."""
    return size / (buckets * bandwidth) + buckets * call


def best_number_of_buckets(size: float, bandwidth: float, call: float) -> float:
    """Where `overhead` is smallest: its derivative in n, o − s / (n²·w), is zero at n = √(s / (w·o))."""
    return math.sqrt(size / (bandwidth * call))


def calibrate(device: torch.device, calls: int = 100) -> tuple[float, float]:
    """(w, o) of this process group: a call takes o + bytes / w seconds. From calls of 1 KB and 25 MB, the median ones."""
    seconds_of = {}
    for elements in (256, 25 * 2**18):
        tensor, seconds = torch.zeros(elements, device=device), []
        for _ in range(calls):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        median = torch.tensor(sorted(seconds)[calls // 2], device=device)
        dist.all_reduce(
            median, dist.ReduceOp.MAX
        )  # all ranks go on with the same figures: the slowest rank's
        seconds_of[4 * elements] = median.item()
    (small, call), (large, whole) = seconds_of.items()
    return (large - small) / (whole - call), call


# ======================================================================================================================
# Below this line: the measurement, the table, the picture.


def candidate(wrap, stage, args, device):
    """The function that trains a replica of its own for one step and returns the step's times."""
    from common.timing import Stopwatch

    *shape, batch_size, context_length = stage.SIZES[args.size]
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(shape[-1], (2, batch_size, context_length), device=device)
    torch.manual_seed(args.seed)
    with device:
        model = wrap(stage.LanguageModel(*shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    watch = Stopwatch(device)
    waits_in_backward = isinstance(model, DistributedDataParallel)
    if waits_in_backward:
        model.module.token_embedding.weight.register_post_accumulate_grad_hook(
            lambda _: watch.mark("gradients are there")
        )

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
        return {
            "step_seconds": watch.seconds("start", "end"),
            "exposed_comm_seconds": watch.seconds(
                "gradients are there", "gradients are synchronized"
            ),
        }

    return step


def available_bytes(device: torch.device) -> float:
    """Memory that is free now on the GPU, or on this host where the system tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(
            next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
        )
    except OSError:
        return math.inf


def count_all_reduces(step) -> int:
    """The all-reduces of one step, which the profiler sees."""
    with torch.profiler.profile() as profiler:
        step()
    return sum(event.count for event in profiler.key_averages() if event.key == "c10d::allreduce_")


def draw(result: dict, path: Path) -> None:
    """Overhead over bucket size: measured points, the predicted curve, both best sizes."""
    import numpy
    from matplotlib.figure import Figure

    size, bandwidth, call = result["gradient_bytes"], result["bandwidth"], result["call_seconds"]
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    buckets = numpy.geomspace(1, max(size / 2**19, 2), 200)
    axes.plot(
        size / buckets / 2**20,
        1000 * overhead(buckets, size, bandwidth, call),
        color="black",
        label="model: s/(n·w) + n·o",
    )
    styles = {
        "BucketedDDP": ("o", "#0072B2"),
        "torch DDP": ("s", "#D55E00"),
        "torch DDP, view": ("^", "#009E73"),
    }
    for kind, (marker, color) in styles.items():
        points = sorted(
            (min(row["bucket_size_mb"], size / 2**20), 1000 * row["overhead_seconds"])
            for row in result["rows"]
            if row["kind"] == kind
        )
        axes.plot(
            *zip(*points, strict=True),
            marker=marker,
            color=color,
            linestyle=":",
            label=f"{kind}, measured",
        )
    axes.axvline(
        result["predicted_best_mb"],
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"best by the model: {result['predicted_best_mb']:.1f} MB",
    )
    axes.axvline(
        min(result["measured_best_mb"], size / 2**20),
        color="#0072B2",
        linestyle="--",
        linewidth=1,
        label=f"best BucketedDDP measured: {result['measured_best_mb']:g} MB",
    )
    axes.set(
        xscale="log",
        xlabel=f"bucket size, MB (at most the model's {size / 2**20:.0f} MB of gradients)",
        ylabel="overhead: step − no sync, ms",
        title=f"Bucket size and overhead, {result['world_size']} ranks, "
        f"{result['backend']} on {result['device']}, {result['size']} model",
    )
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

        from common import report, setup, timing
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: copy bucketed.py and the repository's folder common/ beside this script"
        )

    def sizes(text):
        numbers = [setup.positive_number(word) for word in text.split(",")]
        if max(numbers) > 1e6:
            raise argparse.ArgumentTypeError(
                f"{text!r} has a size above 1000000 MB; one bucket for all is measured anyway"
            )
        return numbers

    parser = setup.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--bucket-sizes-mb", type=sizes, default=[1.0, 10.0, 100.0, 1000.0], metavar="1,10,100,1000"
    )
    parser.add_argument(
        "--size", choices=stage.SIZES, default="tiny", help="of the language model (default: tiny)"
    )
    parser.add_argument(
        "--steps", type=setup.whole_number(1), default=18, help="measured (default: 18)"
    )
    parser.add_argument(
        "--warmup", type=setup.whole_number(0), default=5, help="steps not measured (default: 5)"
    )
    parser.add_argument("--seed", type=setup.whole_number(0), default=0)
    parser.add_argument(
        "--json", type=setup.output_file, metavar="FILE", help="everything measured, raw"
    )
    parser.add_argument("--plot", type=setup.output_file, metavar="FILE", help="the picture, a PNG")
    setup.add_process_group_arguments(parser)
    args = parser.parse_args()

    with setup.process_group(args) as device:
        if dist.get_world_size() == 1:
            setup.fail(
                "torchrun's argument --nproc-per-node (NPROC of make): '1' rank sends nothing; allowed are 2 and more"
            )
        sweep(args, stage, device, report, timing)


def sweep(args, stage, device, report, timing):
    """Calibrate, measure all candidates, print the table, write the files."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = stage.LanguageModel(*stage.SIZES[args.size][:5])
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    bandwidth, call = calibrate(device)
    best = gradient_bytes / best_number_of_buckets(gradient_bytes, bandwidth, call) / 2**20
    if rank == 0:
        print(
            f"bucket_sweep: torch {torch.__version__}, {args.backend} on {device.type}, {world_size} ranks, {args.size} "
            f"model, {gradient_bytes / 2**20:.1f} MB of gradients\ncalibrated: w = {bandwidth / 1e9:.2f} GB/s, "
            f"o = {1e6 * call:.0f} µs, so by the model the best bucket has √(s·w·o) = {best:.1f} MB",
            flush=True,
        )

    def torch_ddp(megabytes, view):
        return lambda model: DistributedDataParallel(
            model,
            [device] if device.type == "cuda" else None,
            bucket_cap_mb=megabytes,
            gradient_as_bucket_view=view,
        )

    wraps = {("BucketedDDP", math.inf): lambda model: stage.BucketedDDP(model, math.inf)}
    for megabytes in args.bucket_sizes_mb:
        wraps["BucketedDDP", megabytes] = lambda model, megabytes=megabytes: stage.BucketedDDP(
            model, megabytes
        )
        wraps["torch DDP", megabytes] = torch_ddp(megabytes, False)
        wraps["torch DDP, view", megabytes] = torch_ddp(megabytes, True)

    # Weights, gradients, two moments and a bucket buffer per replica: all at once, or one after another?
    fits = torch.tensor(
        available_bytes(device)
        > 1.2
        * 5
        * gradient_bytes
        * (len(wraps) + 1)
        * (1 if device.type == "cuda" else world_size),
        dtype=torch.int32,
        device=device,
    )
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    groups = [list(wraps)] if fits else [[key] for key in wraps]
    no_sync = candidate(lambda model: model, stage, args, device)
    rows = []
    for group in groups:
        candidates = {"no sync": no_sync} | {
            key: candidate(wraps[key], stage, args, device) for key in group
        }
        samples = timing.measure(candidates, args.steps, args.warmup)
        floor = report.percentiles(samples["no sync"]["step_seconds"])[0]
        for kind, megabytes in group:
            times = samples[kind, megabytes]
            count = count_all_reduces(candidates[kind, megabytes])
            rows.append(
                {
                    "kind": kind,
                    "bucket_size_mb": megabytes,
                    "buckets": count,
                    **times,
                    "ratio_to_no_sync": report.percentiles(times["step_seconds"])[0] / floor,
                    "overhead_seconds": report.percentiles(times["step_seconds"])[0] - floor,
                    "predicted_seconds": overhead(count, gradient_bytes, bandwidth, call),
                }
            )
        del candidates

    def ratio(
        row,
    ):  # to the no sync of the same measurement, so that rows measured one after another compare, too
        return row["ratio_to_no_sync"]

    ours = min((row for row in rows if row["kind"] == "BucketedDDP"), key=ratio)
    torchs = min((row for row in rows if row["kind"] != "BucketedDDP"), key=ratio)
    if rank == 0:
        print(
            f"{len(wraps)} candidates and no sync, {'interleaved' if fits else 'one at a time against the same no sync'}; "
            f"no sync: {1000 * floor:.1f} ms",
            flush=True,
        )
        report.print_table(
            [
                "step, ms",
                "bucket MB",
                "buckets",
                "p50",
                "p75",
                "p90",
                "p95",
                "exposed",
                "overhead",
                "predicted",
                "speed-up",
            ],
            [
                [
                    row["kind"],
                    f"{row['bucket_size_mb']:g}",
                    str(row["buckets"]),
                    *(
                        f"{1000 * seconds:.1f}"
                        for seconds in report.percentiles(row["step_seconds"])
                    ),
                    *(
                        f"{1000 * seconds:.1f}"
                        for seconds in (
                            report.percentiles(row["exposed_comm_seconds"])[0],
                            row["overhead_seconds"],
                            row["predicted_seconds"],
                        )
                    ),
                    f"{ratio(rows[0]) / ratio(row):.3f}",
                ]
                for row in rows
            ],
        )
        print(
            "Overhead: step p50 − no sync p50; predicted: s/(n·w) + n·o; speed-up: against no bucketing (inf MB).\n"
            f"Best BucketedDDP: {ours['bucket_size_mb']:g} MB, by the model {best:.1f} MB; its ratio to the best torch DDP "
            f"({torchs['kind']}, {torchs['bucket_size_mb']:g} MB): {ratio(ours) / ratio(torchs):.3f}, below 1 is faster",
            flush=True,
        )
        result = {
            "world_size": world_size,
            "backend": args.backend,
            "device": device.type,
            "size": args.size,
            "torch": torch.__version__,
            "gradient_bytes": gradient_bytes,
            "bandwidth": bandwidth,
            "call_seconds": call,
            "predicted_best_mb": best,
            "measured_best_mb": ours["bucket_size_mb"],
            "rows": rows,
        }
        if args.json:
            report.write_json(args.json, result)
        if args.plot:
            draw(result, args.plot)
            print(f"picture: {args.plot}", flush=True)


if __name__ == "__main__":
    main()
