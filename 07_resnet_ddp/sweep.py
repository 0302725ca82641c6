"""07: the time of one training iteration with DDP, over models and over growing numbers of ranks.

For each model: first without DDP on one rank, then DDP on 1, 2, 4, … ranks of the first machine and on all ranks of 1,
2, 3, … machines. `2M/8G` is two machines with eight GPUs (or CPU processes) on each. Every such subset is a process
group of its own; the ranks outside wait. Scaling is perfect where a rank trains as many examples per second as alone.

    make 07_resnet_ddp/sweep NPROC=2                                (small, for a CPU; FULL=1: the models below)
    torchrun --standalone --nproc-per-node 8 07_resnet_ddp/sweep.py --json sweep.json                   (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        07_resnet_ddp/sweep.py --json sweep.json                    (two hosts; R is 0 on HOST0, else 1)

Compare two such files with sweep_diff.py. Source: PyTorch's benchmarks/distributed/ddp, whose models, sizes, optimizer,
labels and JSON layout these are.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def plan(ranks: int, local_size: int) -> list[tuple[str, list[int], bool]]:
    """What to measure with `ranks` ranks, `local_size` of them on each machine: [(label, ranks that train, with DDP?)].

    Within the first machine the sizes double until it is full; from there on whole machines are added.
    """
    subsets = [("no ddp", [0], False)]
    size = 1
    while size < local_size:
        subsets.append((f"1M/{size}G", list(range(size)), True))
        size *= 2
    for machines in range(1, ranks // local_size + 1):
        subsets.append((f"{machines}M/{local_size}G", list(range(machines * local_size)), True))
    return subsets


def train(
    model: nn.Module, batch_size: int, image_size: int, iterations: int, warmup: int, watch
) -> list[float]:
    """Train on one batch of random images again and again: seconds of each iteration that is counted."""
    images = torch.rand(
        batch_size, 3, image_size, image_size, device=next(model.parameters()).device
    )
    labels = torch.randint(1000, (batch_size,), device=images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    seconds = []
    for _ in range(warmup + iterations):
        watch.mark("start")
        logits = model(images)
        # googlenet and inception_v3 have auxiliary classifiers, which must be trained as well, for DDP waits for them.
        heads = logits if isinstance(logits, tuple) else (logits,)
        sum(F.cross_entropy(head, labels) for head in heads).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.mark("end")
        seconds.append(
            watch.seconds("start", "end")
        )  # on CUDA this waits for the GPU, once per iteration
    return seconds[warmup:]


def measure_subset(
    create_model, ranks: list[int], use_ddp: bool, train_model, args, device
) -> list[float]:
    """Train on these ranks, in a process group of their own, while all others wait: the samples of all these ranks."""
    # Every rank has to create every group, also those that it is not in.
    group = dist.new_group(
        ranks, timeout=timedelta(seconds=min(args.timeout, 1e6)), backend=args.distributed_backend
    )
    seconds = []
    if dist.get_rank() in ranks:
        torch.manual_seed(dist.get_rank())
        model = create_model().to(device)
        if use_ddp:
            model = DistributedDataParallel(
                model,
                [device] if device.type == "cuda" else None,
                broadcast_buffers=False,
                process_group=group,
                bucket_cap_mb=args.bucket_size,
            )
        seconds = train_model(model)
        del model  # DDP's reducer uses the group until it is gone
        dist.destroy_process_group(group)
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, seconds)  # who does not train waits here
    return [second for one in everyones for second in one]


# ======================================================================================================================
# Below this line: the sweep over one model, what the machines look like, the command line.


def sweep(name: str, args, device) -> list[dict]:
    """Measure one model on all subsets and print a line for each: [{"ranks": [0, 1, …], "measurements": seconds}]."""
    import torchvision

    from common.report import percentiles
    from common.timing import Stopwatch

    rank, local_size = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])

    def create_model():
        return torchvision.models.get_model(name, weights=None)

    def train_model(model):
        return train(
            model, args.batch_size, args.image_size, args.iterations, args.warmup, Stopwatch(device)
        )

    if rank == 0:
        print(f"\nBenchmark: {name} with batch size {args.batch_size}\n")
        print(
            f"{'ranks':15}"
            + "".join(f"{f'p{p} sec/iter':>16}{'ex/sec':>10}" for p in (50, 75, 90, 95)),
            flush=True,
        )
    # First each rank for itself, uncounted: libraries are loaded, memory is taken, kernels are chosen.
    torch.manual_seed(rank)
    train_model(create_model().to(device))
    dist.barrier()
    result = []
    for label, ranks, use_ddp in plan(dist.get_world_size(), local_size):
        measurements = measure_subset(create_model, ranks, use_ddp, train_model, args, device)
        result.append({"ranks": ranks, "measurements": measurements})
        if rank == 0:
            cells = [
                f"{seconds:>15.4f}s{args.batch_size / seconds:>8.1f}/s"
                for seconds in percentiles(measurements)
            ]
            print(f"{len(ranks):>5}  {label:8}" + "".join(cells), flush=True)
    return result


def topology() -> str:
    """How this machine is built: what `nvidia-smi topo -m` says, else its cores, processor and NUMA nodes."""
    from common.report import processor_name

    if shutil.which("nvidia-smi"):
        answer = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
        if answer.returncode == 0:
            return answer.stdout.strip("\n")
    nodes = sorted(
        Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"),
        key=lambda path: int(path.parent.name[4:]),
    )
    nodes = [f"node {path.parent.name[4:]}: cores {path.read_text().strip()}" for path in nodes]
    return f"{os.cpu_count()} cores, {processor_name()}; NUMA " + (
        ", ".join(nodes) or "nodes unknown"
    )


def check_hosts(args) -> str:
    """The topology of the hosts. Ends the run where they differ, in topology or number of ranks: results would mix."""
    from common.setup import fail

    host = f"{socket.gethostname()} (machine {os.environ.get('GROUP_RANK', 0)})"
    mine = host, topology(), int(os.environ["LOCAL_WORLD_SIZE"])
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    topologies = {host: topology for host, topology, _ in everyones}
    if len({size for _, _, size in everyones}) > 1:
        sizes = ", ".join(
            f"{size} on {host}"
            for host, size in {host: size for host, _, size in everyones}.items()
        )
        fail(f"every machine must have the same number of ranks, and there are {sizes}")
    if len(set(topologies.values())) == 1:
        return everyones[0][1]
    report = "\n".join(f"{host}:\n{topology}" for host, topology in topologies.items())
    if not args.allow_mixed:
        if dist.get_rank() == 0:
            print(f"The machines differ:\n{report}", flush=True)
        fail("the machines' topologies differ (see above); --allow-mixed measures all the same")
    return f"The machines differ:\n{report}"


def check_models(args) -> None:
    """End the run now if a model cannot be trained on such images; tried without memory, on torch's meta device."""
    from common.setup import fail

    try:
        import torchvision
    except ImportError as error:
        fail(
            f"the models come from torchvision, which cannot be imported ({error}): pip install torchvision"
        )
    known = torchvision.models.list_models(module=torchvision.models)
    for name in args.model:
        if name not in known:
            fail(
                f"argument --model: {name!r} is no classification model of torchvision; there are {', '.join(known)}"
            )
        try:
            with torch.device("meta"):
                images = torch.rand(args.batch_size, 3, args.image_size, args.image_size)
                torchvision.models.get_model(name, weights=None)(images)
        except (
            Exception
        ) as error:  # assertions, shapes that don't fit, batch norm over a single value, …
            reason = (str(error) or type(error).__name__).splitlines()[0]
            fail(
                f"argument --image-size: {name} cannot train on {args.batch_size} images of {args.image_size} × "
                f"{args.image_size} pixels ({reason})"
            )


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common.report import write_json
        from common.setup import (
            Parser,
            fail,
            output_file,
            positive_number,
            process_group,
            whole_number,
        )
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="of torchvision's classification models; repeatable "
        "(default: resnet50, resnet101, resnext50_32x4d, resnext101_32x8d)",
    )
    parser.add_argument(
        "--batch-size", type=whole_number(1), default=32, help="images per rank (default: 32)"
    )
    parser.add_argument(
        "--image-size",
        type=whole_number(1, 10_000),
        default=224,
        help="pixels a side (default: 224)",
    )
    parser.add_argument(
        "--bucket-size",
        type=whole_number(1),
        default=25,
        help="of DDP's buckets, in MB (default: 25)",
    )
    parser.add_argument(
        "--warmup",
        type=whole_number(0),
        default=5,
        help="iterations before the counted ones (default: 5)",
    )
    parser.add_argument(
        "--iterations", type=whole_number(1), default=10, help="counted iterations (default: 10)"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: CUDA where there is one",
    )
    parser.add_argument(
        "--distributed-backend",
        choices=["auto", "gloo", "nccl"],
        default="auto",
        help="auto: nccl where every rank of this host has a GPU of its own, gloo otherwise",
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=300.0,
        metavar="SECONDS",
        help="how long a rank waits for the others of its subset (default: 300)",
    )
    parser.add_argument(
        "--allow-mixed",
        action="store_true",
        help="measure although the machines' topologies differ",
    )
    parser.add_argument(
        "--json",
        type=output_file,
        metavar="PATH",
        help="the result as PyTorch's benchmark writes it",
    )
    args = parser.parse_args()
    # The published setting has broadcast_buffers=False; that torch has a newer name for it is not this script's subject.
    warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
    args.model = list(
        dict.fromkeys(
            args.model or ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
        )
    )
    check_models(args)

    # Not torch.cuda.is_available(): "--device cuda" without a GPU is process_group's to report.
    gpu_per_rank = args.device != "cpu" and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", 1)
    )
    if args.distributed_backend == "nccl" and not gpu_per_rank:
        fail(
            "argument --distributed-backend: 'nccl' needs CUDA and a GPU per rank of this host; use gloo or fewer ranks"
        )
    if args.distributed_backend == "auto":
        args.distributed_backend = "nccl" if gpu_per_rank else "gloo"

    # The group of all ranks only carries samples and makes ranks wait: gloo, so that a waiting rank's GPU stays free, and
    # for as long as the subsets need. torchrun ends the waiting ranks if a training one fails.
    waiting = argparse.Namespace(device=args.device, backend="gloo", timeout=7 * 24 * 3600)
    with process_group(waiting) as device:
        waiting.timeout = args.timeout  # from now on what runs out of time is the group of a subset
        machine = check_hosts(args)
        report = {
            "pytorch_version": torch.__version__,
            "cuda_version": torch.version.cuda,
            "distributed_backend": args.distributed_backend,
            "bucket_size": args.bucket_size,
            "benchmark_results": [],
        }
        if dist.get_rank() == 0:
            print(
                "PyTorch {pytorch_version}, CUDA {cuda_version}, {distributed_backend}, buckets of {bucket_size} MB".format(
                    **report
                )
            )
            print(
                f"{torch.get_num_threads()} threads per rank; {args.image_size} × {args.image_size} pixels, {args.iterations}"
                f" iterations after {args.warmup} for warming up\n\n{machine}",
                flush=True,
            )
        for name in args.model:
            result = sweep(name, args, device)
            report["benchmark_results"].append(
                {"model": name, "batch_size": args.batch_size, "result": result}
            )
            if args.json and dist.get_rank() == 0:
                write_json(
                    args.json, report
                )  # after every model: an interrupted sweep keeps what it has
        if dist.get_rank() == 0:
            print(
                "\npercentiles over all iterations of all ranks of a subset; ex/sec: examples per second of one rank"
            )


if __name__ == "__main__":
    main()
