r"""07: the time of one training iteration with DDP, over models and over growing numbers of ranks.

For each model it measures one rank without DDP, then DDP on 1, 2, 4, … ranks of the first machine
and on all ranks of 1, 2, 3, … machines. `2M/8G` is two machines with eight GPUs (or CPU processes)
on each. Every such subset is a process group of its own, and the ranks outside wait. Scaling is
perfect if a rank trains as many examples per second as it does alone.

    make 07_resnet_ddp/sweep NPROC=2
    torchrun --standalone --nproc-per-node 8 07_resnet_ddp/sweep/sweep.py --full --json sweep.json
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        07_resnet_ddp/sweep/sweep.py --full         (two hosts; R is 0 on HOST0, else 1)

The defaults are small, for a CPU; --full takes upstream's models, images and batches. Compare two
results with sweep_diff.py.

Source: PyTorch's benchmarks/distributed/ddp, whose optimizer, flags and JSON layout these are.
"""

import argparse
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision import models

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from common import report, setup, timing


def plan(ranks: int, local_size: int) -> list[tuple[str, list[int], bool]]:
    """Return (label, ranks that train, with DDP?) for each subset of `ranks`, smallest first.

    Each machine has `local_size` of them. The subsets double until the first machine is full; from
    there on whole machines are added.
    """
    subsets = [("no ddp", [0], False)]
    size = 1
    while size < local_size:
        subsets.append((f"1M/{size}G", list(range(size)), True))
        size *= 2
    for machines in range(1, ranks // local_size + 1):
        members = list(range(machines * local_size))
        subsets.append((f"{machines}M/{local_size}G", members, True))
    return subsets


def new_model(name: str, device: torch.device) -> nn.Module:
    return models.get_model(name).to(device)


def train(args, model: nn.Module, device: torch.device) -> list[float]:
    """Train on one batch of noise again and again; return seconds per step, warm-up included."""
    size = args.batch_size, 3, args.image_size, args.image_size
    inputs = torch.rand(size, device=device)
    target = torch.randint(1000, (args.batch_size,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    watch = timing.Stopwatch(device)
    seconds = []
    steps = args.warmup + args.steps
    for step in range(1, steps + 1):
        setup.progress(f"step {step} of {steps}")
        watch.mark("start")
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.mark("end")
        seconds.append(watch.seconds("start", "end"))  # on CUDA this waits for the GPU, once a step
    return seconds


def measure_subset(args, name: str, device, ranks: list[int], use_ddp: bool, options) -> list:
    """Train on these ranks, in a process group of their own, while all others wait.

    Returns what each of these ranks measured, a list of lists; `options` are new_group's.
    """
    # Every rank has to create every group, even one that it is not in.
    with setup.without_gloo_greeting():
        group = dist.new_group(ranks, **options)
    seconds = None
    if dist.get_rank() in ranks:
        torch.manual_seed(dist.get_rank())
        model = new_model(name, device)
        if use_ddp:
            model = DistributedDataParallel(
                model,
                broadcast_buffers=False,
                process_group=group,
                bucket_cap_mb=args.bucket_size_mb,
            )
        with setup.wire():
            seconds = train(args, model, device)
        del model  # DDP's reducer uses the group until it is gone
        dist.destroy_process_group(group)
    all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, seconds)  # ranks that do not train wait here
    return [all_ranks[rank] for rank in ranks]


# ==================================================================================================
# Below this line: the sweep over one model, the command line.


HEADER = ["ranks", "p50 sec/iter", "ex/sec", "p75 sec/iter", "ex/sec"]
HEADER += ["p90 sec/iter", "ex/sec", "p95 sec/iter", "ex/sec"]


def sweep(args, name: str, device: torch.device, options: dict) -> dict:
    """Measure one model on all subsets, and print a table with a row for each.

    Returns an entry of "benchmark_results" of the JSON. Its "result" has one per subset,
    {"ranks": [0, 1, …], "measurements": seconds}.
    """
    # Each rank first trains for itself, uncounted, which loads libraries and chooses kernels.
    train(args, new_model(name, device), device)
    dist.barrier()
    result = []
    rows = []
    for label, ranks, use_ddp in plan(dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])):
        of_ranks = measure_subset(args, name, device, ranks, use_ddp, options)
        measurements = numpy.array(of_ranks)[:, args.warmup :].flatten()
        result.append({"ranks": ranks, "measurements": measurements.tolist()})
        row = [f"{len(ranks):5}  {label}"]
        for seconds in report.percentiles(measurements):
            row += [f"{seconds:.4f}s", f"{args.batch_size / seconds:.1f}/s"]
        rows.append(row)
    setup.say(f"\nBenchmark: {name} with batch size {args.batch_size}\n")
    report.print_table(HEADER, rows)
    return {"model": name, "batch_size": args.batch_size, "result": result}


FULL = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]


def add_arguments(parser) -> None:
    """Add the flags; upstream's are understood in both of its spellings."""
    add = parser.add_argument
    whole = setup.whole_number
    known = models.list_models(models)
    name = setup.checked(str, known.__contains__, "a classification model of torchvision")
    text = "torchvision's model of this name; repeatable (default: resnet18)"
    add("--model", action="append", type=name, metavar="NAME", help=text)
    add("--batch-size", type=whole(1), help="images per rank (default: 8)")
    add("--image-size", type=whole(1, 10_000), help="pixels a side (default: 64)")
    add("--full", action="store_true", help=f"{', '.join(FULL)}; 32 images; 224 pixels")
    add("--bucket-size-mb", "--bucket-size", "--bucket_size", type=whole(1), default=25)
    add("--steps", type=whole(1), default=10, help="measured")
    add("--warmup", type=whole(0), default=5, help="steps before them, not measured")
    layout = "everything measured, as PyTorch's benchmark writes it"
    add("--json", type=setup.output_file, metavar="FILE", help=layout)
    setup.add_process_group_arguments(parser)
    upstreams = {"choices": ["gloo", "nccl"], "default": argparse.SUPPRESS, "help": "as --backend"}
    add("--distributed-backend", "--distributed_backend", dest="backend", **upstreams)


def main():
    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    names = args.model or (FULL if args.full else ["resnet18"])
    args.batch_size = args.batch_size or (32 if args.full else 8)
    args.image_size = args.image_size or (224 if args.full else 64)
    # The published setting; newer torch has another name for it.
    warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)

    # The group of all ranks only carries samples and makes ranks wait, as long as the subsets need.
    # It is gloo's, so that a waiting rank's GPU stays free. If a training rank fails, torchrun ends
    # those that wait.
    week = 7 * 24 * 3600
    with setup.process_group(args.device, "gloo", week) as device:
        _, backend = setup.choose_device(args.device, args.backend)
        options = {"backend": backend}
        options["timeout"] = timedelta(seconds=args.timeout)
        result = report.begin("07_resnet_ddp/sweep", args, device)
        result |= {"backend": backend, "distributed_backend": backend}
        result |= {"pytorch_version": torch.__version__, "cuda_version": torch.version.cuda}
        result |= {"bucket_size": args.bucket_size_mb, "benchmark_results": []}
        setup.say(
            f"subsets over {backend}, buckets of {args.bucket_size_mb} MB, "
            f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs on this host"
        )
        for name in names:
            result["benchmark_results"].append(sweep(args, name, device, options))
            # After every model: an interrupted sweep keeps what it has.
            report.write_json(args.json, result)
        legend = "percentiles over all steps of all ranks of a subset"
        setup.say(f"\n{legend}; ex/sec: examples per second of one rank")


if __name__ == "__main__":
    main()
