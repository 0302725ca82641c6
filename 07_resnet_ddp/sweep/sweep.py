r"""07: the time of one training iteration with DDP, over models and over growing numbers of ranks.

For each model: first without DDP on one rank, then DDP on 1, 2, 4, … ranks of the first machine and
on all ranks of 1, 2, 3, … machines. `2M/8G` is two machines with eight GPUs (or CPU processes) on
each. Every such subset is a process group of its own; the ranks outside wait. Scaling is perfect
where a rank trains as many examples per second as alone.

    make 07_resnet_ddp/sweep NPROC=2
    torchrun --standalone --nproc-per-node 8 07_resnet_ddp/sweep/sweep.py --full --json sweep.json
    torchrun --standalone --nproc-per-node 8 07_resnet_ddp/sweep/sweep.py \
        --model my_model.py:MyBenchmark
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        07_resnet_ddp/sweep/sweep.py --full         (two hosts; R is 0 on HOST0, else 1)

The defaults are small, for a CPU; --full takes upstream's models, images and batches. Started as
upstream's, with --rank, --world-size, --master-addr and --master-port, it needs no torchrun. For a
model of your own see sweep_models.py; compare two results with sweep_diff.py.

Source: PyTorch's benchmarks/distributed/ddp, whose optimizer and JSON layout these are.
"""

import argparse
import os
import shutil
import subprocess
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent.parent)]

import sweep_models  # noqa: E402
from upstream import as_ours  # noqa: E402

from common import report, setup, timing  # noqa: E402


def plan(ranks: int, local_size: int) -> list[tuple[str, list[int], bool]]:
    """What to measure with `ranks` ranks, `local_size` of them on each machine.

    A list of (label, ranks that train, with DDP?). Within the first machine the sizes double until
    it is full; from there on whole machines are added.
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


def train(benchmark, args, device, label: str, model: nn.Module) -> list[float]:
    """Train on one batch of a sweep_models.Benchmark again and again.

    Returns the seconds of each step after the first --warmup; on a terminal says in which it is.
    """
    inputs = benchmark.generate_inputs()
    target = benchmark.generate_target()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    watch = timing.Stopwatch(device)
    seconds = []
    for i in range(args.warmup + args.steps):
        setup.progress(f"{label}: step {i + 1} of {args.warmup + args.steps}")
        watch.mark("start")
        logits = model(*inputs)
        # googlenet and inception_v3 have auxiliary classifiers, which must be trained as well,
        # because DDP waits for them.
        heads = logits if isinstance(logits, tuple) else (logits,)
        loss = sum(F.cross_entropy(head, target) for head in heads)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.mark("end")
        # On CUDA this waits for the GPU, once per step.
        seconds.append(watch.seconds("start", "end"))
    return seconds[args.warmup :]


def measure_subset(benchmark, ranks: list[int], use_ddp: bool, args, train_model) -> list[float]:
    """Train on these ranks, in a process group of their own, while all others wait.

    Returns what `train_model` returns of all these ranks' models, in one list.
    """
    # Every rank has to create every group, also those that it is not in.
    timeout = timedelta(seconds=min(args.timeout, 1e6))
    backend = "slow_network" if args.network else args.backend
    with setup.without_gloo_greeting():
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
    seconds = []
    if dist.get_rank() in ranks:
        torch.manual_seed(dist.get_rank())
        model = benchmark.create_model()
        if use_ddp:
            model = DistributedDataParallel(
                model,
                broadcast_buffers=False,
                process_group=group,
                bucket_cap_mb=args.bucket_size_mb,
            )
        with setup.on_the_network():
            seconds = train_model(model)
        del model  # DDP's reducer uses the group until it is gone
        dist.destroy_process_group(group)
    all_seconds = [None] * dist.get_world_size()
    dist.all_gather_object(all_seconds, seconds)  # who does not train waits here
    return sum(all_seconds, [])


# ==================================================================================================
# Below this line: the sweep over one model, what the machines look like, the command line.


def sweep(name: str, args, device) -> dict:
    """Measure one model on all subsets and print a line for each.

    Returns an entry of "benchmark_results" of the JSON. Its "result" has one per subset,
    {"ranks": [0, 1, …], "measurements": seconds}.
    """
    benchmark = sweep_models.make(name, args, device)
    setup.say(f"\nBenchmark: {name} with batch size {benchmark.batch_size}\n")
    header = ["ranks"]
    for percentile in (50, 75, 90, 95):
        header += [f"p{percentile} sec/iter", "ex/sec"]
    widths = [15, *4 * [14, 8]]
    report.print_row(header, widths)

    # First each rank for itself, uncounted: libraries are loaded, memory is taken, kernels are
    # chosen.
    torch.manual_seed(dist.get_rank())
    train(benchmark, args, device, f"{name}, uncounted", benchmark.create_model())
    dist.barrier()
    result = []
    for label, ranks, use_ddp in plan(dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])):
        train_model = partial(train, benchmark, args, device, f"{name}, {label}")
        measurements = measure_subset(benchmark, ranks, use_ddp, args, train_model)
        result.append({"ranks": ranks, "measurements": measurements})
        row = [f"{len(ranks):5}  {label}"]
        for seconds in report.percentiles(measurements):
            row += [f"{seconds:.4f}s", f"{benchmark.batch_size / seconds:.1f}/s"]
        report.print_row(row, widths)
    return {"model": name, "batch_size": benchmark.batch_size, "result": result}


def topology() -> str:
    """How this host is built: `nvidia-smi topo -m`, and without it the cores and NUMA nodes."""
    if shutil.which("nvidia-smi"):
        answer = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
        if answer.returncode == 0:
            return answer.stdout.strip("\n")
    nodes = []
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        nodes.append(f"{path.parent.name}: cores {path.read_text().strip()}")
    return (
        f"{os.cpu_count()} cores, {report.processor_name()}; NUMA {', '.join(nodes) or 'unknown'}"
    )


def check_hosts() -> None:
    """Print how the hosts are built. Ends the run where they differ, because results would mix."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, (os.environ["LOCAL_WORLD_SIZE"], topology()))
    for _, host in set(hosts):
        setup.say(f"\n{host}")
    if len(set(hosts)) > 1:
        setup.fail("the machines differ in ranks or topology (see above), and results would mix")


def join_as_upstream(args) -> None:
    """Say by flags, as upstream's script does, what torchrun would: a process for each rank."""
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    given = [vars(args)[name.lower()] for name in names]
    if "LOCAL_RANK" in os.environ or given == [None] * 4:  # started by torchrun, or by nothing
        return
    if None in given:
        setup.fail("argument --rank, --world-size, --master-addr, --master-port: all four or none")
    if args.rank >= args.world_size:
        setup.fail(f"argument --rank: '{args.rank}' is not below --world-size {args.world_size}")
    os.environ |= {name: str(value) for name, value in zip(names, given, strict=True)}
    # Upstream has eight GPUs on every machine; here as many ranks as GPUs, or all on one machine.
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    local_size = min(args.world_size, gpus or args.world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
    os.environ["LOCAL_RANK"] = str(args.rank % local_size)


FULL = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
UPSTREAM = {  # flags that have another name here
    "--bucket-size": "--bucket-size-mb",
    "--distributed-backend": "--backend",
    "--iterations": "--steps",
}


def add_arguments(parser) -> None:
    add = parser.add_argument
    models = "a classification model of torchvision, or FILE.py:CLASS of your own; repeatable"
    add("--model", action="append", metavar="NAME", help=f"{models} (default: resnet18)")
    add("--batch-size", type=setup.whole_number(1), help="images per rank (default: 8)")
    add("--image-size", type=setup.whole_number(1, 10_000), help="pixels a side (default: 64)")
    upstreams = f"other defaults, upstream's: {', '.join(FULL)}; 32 images; 224 pixels"
    add("--full", action="store_true", help=upstreams)
    add("--bucket-size-mb", type=setup.whole_number(1), default=25, help="of DDP")
    add("--steps", type=setup.whole_number(1), default=10, help="measured")
    add("--warmup", type=setup.whole_number(0), default=5, help="steps before them, not measured")
    layout = "everything measured, as PyTorch's benchmark writes it"
    add("--json", type=setup.output_file, metavar="FILE", help=layout)
    setup.add_process_group_arguments(parser)
    # Upstream's way to start it, a process at a time.
    rank = "this process's; this and the next three: instead of torchrun, which knows them"
    add("--rank", type=setup.whole_number(0), default=os.environ.get("RANK"), help=rank)
    add("--world-size", type=setup.whole_number(1), help="number of ranks")
    add("--master-addr", metavar="ADDRESS", help="the machine of rank 0")
    add("--master-port", type=setup.whole_number(1, 65535), metavar="PORT", help="a free one there")


def main():
    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args(as_ours(sys.argv[1:], UPSTREAM))
    args.model = args.model or (FULL if args.full else ["resnet18"])
    # The published setting has broadcast_buffers=False; that torch has a newer name for it is not
    # this script's subject.
    warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
    join_as_upstream(args)

    # The group of all ranks only carries samples and makes ranks wait: gloo, so that a waiting
    # rank's GPU stays free, and for as long as the subsets need. torchrun ends the waiting ranks if
    # a training one fails.
    week = 7 * 24 * 3600
    waiting = argparse.Namespace(device=args.device, backend="gloo", network=None, timeout=week)
    with setup.process_group(waiting) as device:
        waiting.timeout = args.timeout  # from now on what runs out of time is the group of a subset
        setup.choose_device(args)  # the backend of the subsets
        sweep_models.check(args)
        result = report.begin("07_resnet_ddp/sweep", args, device)
        result |= {
            "pytorch_version": torch.__version__,
            "cuda_version": torch.version.cuda,
            "distributed_backend": args.backend,
            "bucket_size": args.bucket_size_mb,
            "benchmark_results": [],
        }
        pixels = args.image_size or (224 if args.full else 64)
        setup.say(
            f"subsets over {args.backend}, buckets of {args.bucket_size_mb} MB; {pixels} × "
            f"{pixels} pixels; {args.steps} steps, after {args.warmup} to warm up"
        )
        gpus = torch.cuda.device_count()
        setup.say(f"CUDA {torch.version.cuda or 'none'}, {gpus} GPUs on this host")
        check_hosts()
        for name in args.model:
            result["benchmark_results"].append(sweep(name, args, device))
            # After every model: an interrupted sweep keeps what it has.
            report.write_json(args.json, result)
        legend = "percentiles over all steps of all ranks of a subset"
        setup.say(f"\n{legend}; ex/sec: examples per second of one rank")


if __name__ == "__main__":
    main()
