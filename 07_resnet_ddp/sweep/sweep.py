r"""07: the time of one training iteration with DDP, over models and over growing numbers of ranks.

For each model it measures one rank without DDP, then DDP on 1, 2, 4, … ranks of the first machine
and on all ranks of 1, 2, 3, … machines. `2M/8G` is two machines with eight GPUs (or CPU processes)
on each. Every such subset is a process group of its own, and the ranks outside wait. Scaling is
perfect if a rank trains as many examples per second as it does alone; how far it falls short
depends on the model, by the bytes of its gradients for each FLOP of computing.

    make 07_resnet_ddp/sweep NPROC=2
    make 07_resnet_ddp/sweep ARGS="--model my_model.py:Mine"        (a class like Benchmark below)
    torchrun --standalone --nproc-per-node 8 07_resnet_ddp/sweep/sweep.py --full --json sweep.json
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        07_resnet_ddp/sweep/sweep.py --full         (two hosts; R is 0 on HOST0, else 1)
    python 07_resnet_ddp/sweep/sweep.py --rank R --world-size 16 --master-addr HOST0 \
        --master-port 29400 --full                  (as upstream's: once for each of 16 ranks)

The defaults are small, for a CPU; --full takes upstream's models, images and batches.

Source: PyTorch's benchmarks/distributed/ddp, whose optimizer, flags and JSON layout these are.
"""

import os
import runpy
import shutil
import subprocess
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
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
from common import report, setup, timing


class Benchmark:
    """Says what is trained: torchvision's model of a name, on a batch of noise.

    A class of one's own, --model FILE.py:NAME, is made of the first three arguments, and has a
    batch_size, a `model`, which is its name, and the same three methods.
    """

    def __init__(
        self, device, distributed_backend: str, bucket_size: int, model: str, image_size: int
    ):
        self.device = device
        self.batch_size = 8
        self.model = model
        self.image_size = image_size

    def create_model(self) -> nn.Module:
        return models.get_model(self.model).to(self.device)

    def generate_inputs(self) -> list[torch.Tensor]:
        """Return the arguments of the model's forward."""
        size = self.batch_size, 3, self.image_size, self.image_size
        return [torch.rand(size, device=self.device)]

    def generate_target(self) -> torch.Tensor:
        return torch.randint(1000, (self.batch_size,), device=self.device)


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


def train(benchmark, model: nn.Module, steps: int) -> list[float]:
    """Train on one batch again and again; return the seconds of each step."""
    inputs, target = benchmark.generate_inputs(), benchmark.generate_target()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    watch = timing.Stopwatch(target.device)
    seconds = []
    for step in range(1, steps + 1):
        setup.progress(f"step {step} of {steps}")
        watch.mark("start")
        F.cross_entropy(model(*inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.mark("end")
        seconds.append(watch.seconds("start", "end"))  # on CUDA this waits for the GPU, once a step
    return seconds


def measure_subset(args, benchmark, ranks: list[int], use_ddp: bool, backend: str) -> list:
    """Train on these ranks, in a process group of their own, while all others wait.

    Returns the seconds per step of each of these ranks, warm-up included.
    """
    # Every rank has to create every group, even one that it is not in.
    with setup.without_gloo_greeting():
        group = dist.new_group(ranks, timedelta(seconds=args.timeout), backend)
    seconds = None
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
        with setup.network():
            seconds = train(benchmark, model, args.warmup + args.steps)
        del model  # DDP's reducer uses the group until it is gone
        dist.destroy_process_group(group)
    all_ranks = timing.gather(seconds)  # ranks that do not train wait here
    return [all_ranks[rank] for rank in ranks]


def cost_of(benchmark) -> dict[str, float]:
    """Return what DDP sends and what a rank computes in a step: megabytes, and billions of FLOPs.

    Backward computes the gradients of inputs and of weights: with forward, three times forward's.
    """
    model = benchmark.create_model()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*benchmark.generate_inputs())
    sent = [parameter for parameter in model.parameters() if parameter.requires_grad]
    megabytes = sum(tensor.nbytes for tensor in sent) / 1e6
    gflop = 3 * counter.get_total_flops() / 1e9
    return {"megabytes": megabytes, "gflop": gflop, "megabytes_per_gflop": megabytes / gflop}


# ==================================================================================================
# Below this line: the sweep over one model, the hosts' topology, the command line.


HEADER = ["ranks  subset   ", "scaling", "p50 sec/iter", "ex/sec", "p75 sec/iter", "ex/sec"]
HEADER += ["p90 sec/iter", "ex/sec", "p95 sec/iter", "ex/sec"]
LEGEND = """
percentiles over all steps of all ranks of a subset; ex/sec: examples per second of one rank;
scaling: p50 of no ddp, divided by that of the (largest) subset; of a step on one rank: MB of
gradients, GFLOP of forward and backward (3 times forward's), and both per second without DDP"""
WIDTHS = [max(9, len(cell)) for cell in HEADER]


def sweep(args, benchmark, backend: str) -> dict:
    """Measure one model on all subsets, and print a row for each as soon as it is measured.

    Returns an entry of "benchmark_results" of the JSON. Its "result" has one per subset,
    {"ranks": [0, 1, …], "measurements": seconds}.
    """
    setup.say(f"\nBenchmark: {benchmark.model} with batch size {benchmark.batch_size}\n")
    # Each rank first trains for itself, uncounted, which loads libraries and chooses kernels.
    train(benchmark, benchmark.create_model(), args.warmup + 1)
    dist.barrier()
    report.print_row(HEADER, WIDTHS)
    result = []
    for label, ranks, use_ddp in plan(dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])):
        of_ranks = measure_subset(args, benchmark, ranks, use_ddp, backend)
        measurements = numpy.array(of_ranks)[:, args.warmup :].flatten()
        result.append({"ranks": ranks, "measurements": measurements.tolist()})
        alone = numpy.median(result[0]["measurements"])
        scaling = alone / numpy.median(measurements)
        row = [f"{len(ranks):5}  {label}", f"{scaling:.2f}"]
        for seconds in report.percentiles(measurements):
            row += [f"{seconds:.4f}s", f"{benchmark.batch_size / seconds:.1f}/s"]
        report.print_row(row, WIDTHS)
    entry = {"model": benchmark.model, "batch_size": benchmark.batch_size, "result": result}
    return entry | cost_of(benchmark) | {"seconds_alone": alone, "scaling": scaling}


def print_scaling(results: list[dict]) -> None:
    """Print what the model has to do with how it scales, on the largest subset."""
    rows = []
    for one in results:
        row = [
            one["model"],
            f"{one['megabytes']:.2f}",
            f"{one['gflop']:.2f}",
            f"{one['megabytes_per_gflop']:.2f}",
            f"{one['gflop'] / one['seconds_alone']:.2f}",
            f"{one['megabytes'] / one['seconds_alone']:.2f}",
            f"{one['scaling']:.2f}",
        ]
        rows.append(row)
    setup.say()
    header = ["model", "MB", "GFLOP", "MB/GFLOP", "GFLOP/s", "MB/s", "scaling"]
    report.print_table(header, rows)


def print_topology() -> None:
    """Print how GPUs are connected, where nvidia-smi tells; end the run if hosts differ in it."""
    text = ""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "topo", "-m"]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    for rank, other in enumerate(timing.gather(text)):
        if other != text:
            setup.fail(f"nvidia-smi topo -m says something else on rank {rank}'s host than here")
    if text:
        setup.say(f"nvidia-smi topo -m:\n{text}")


FULL = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]


def benchmark_of(args, model: str, device: torch.device, backend: str):
    """Return the benchmark that --model names: torchvision's model, or FILE.py:NAME."""
    file, _, name = model.rpartition(":")
    arguments = device, backend, args.bucket_size_mb
    try:
        if file:
            sys.path.append(str(Path(file).resolve().parent))  # for what it imports
            benchmark = runpy.run_path(file)[name](*arguments)
        else:
            models.get_model_builder(model)
            benchmark = Benchmark(*arguments, model, args.image_size or (224 if args.full else 64))
            benchmark.batch_size = 32 if args.full else 8
        benchmark.batch_size = args.batch_size or benchmark.batch_size
    except Exception as error:  # whatever the file does
        setup.fail(
            f"argument --model: '{model}' is neither a classification model of torchvision nor a "
            f"FILE.py:NAME that can be loaded ({error!r})"
        )
    return benchmark


def add_arguments(parser) -> None:
    """Add the flags; all of upstream's are among them."""
    add = parser.add_argument
    whole = setup.whole_number
    text = "a model of torchvision, or FILE.py:NAME; repeatable (default: resnet18)"
    add("--model", action="append", metavar="NAME", help=text)
    add("--batch-size", type=whole(1), help="images per rank (default: 8, or FILE.py:NAME's)")
    add("--image-size", type=whole(1, 10_000), help="pixels a side (default: 64)")
    add("--full", action="store_true", help=f"{', '.join(FULL)}; 32 images; 224 pixels")
    add("--bucket-size-mb", "--bucket-size", type=whole(1), default=25)
    add("--steps", type=whole(1), default=10, help="measured")
    add("--warmup", type=whole(0), default=5, help="steps before them, not measured")
    layout = "everything measured, as PyTorch's benchmark writes it"
    add("--json", type=setup.output_file, metavar="FILE", help=layout)
    setup.add_process_group_arguments(parser)
    add("--distributed-backend", dest="backend", choices=["gloo", "nccl"], help="as --backend")
    text = "without torchrun, as upstream"
    add("--rank", type=whole(0), default=os.environ.get("RANK"), help=text)
    add("--world-size", type=whole(1), help=text)
    add("--master-addr", help=text)
    add("--master-port", type=whole(1, 65535), help=text)


def be_started_as_upstream(args) -> None:
    """Set what torchrun would from --rank, --world-size, --master-addr and --master-port.

    All hosts have as many ranks: one for each GPU, or on a CPU all of them on this host.
    """
    for name in ("rank", "world_size", "master_addr", "master_port"):
        if (value := getattr(args, name)) is not None:
            os.environ[name.upper()] = str(value)
    if args.rank is not None and args.world_size is not None:  # else torchrun has set the others
        gpus = 0 if args.device == "cpu" else torch.cuda.device_count()
        local_size = min(gpus or args.world_size, args.world_size)
        os.environ["LOCAL_WORLD_SIZE"] = str(local_size)
        os.environ["LOCAL_RANK"] = str(args.rank % local_size)


def main():
    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    be_started_as_upstream(args)
    names = args.model or (FULL if args.full else ["resnet18"])
    # The published setting; newer torch has another name for it.
    warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)

    # The group of all ranks only carries samples and makes ranks wait, as long as the subsets need.
    # It is gloo's, so that a waiting rank's GPU stays free. If a training rank fails, torchrun ends
    # those that wait.
    week = 7 * 24 * 3600
    with setup.process_group(args.device, "gloo", week) as device:
        _, backend = setup.choose_device(args.device, args.backend)
        benchmarks = [benchmark_of(args, name, device, backend) for name in names]
        result = report.begin("07_resnet_ddp/sweep", args, device)
        result |= {"backend": backend, "distributed_backend": backend}
        result |= {"pytorch_version": torch.__version__, "cuda_version": torch.version.cuda}
        result |= {"bucket_size": args.bucket_size_mb, "benchmark_results": []}
        setup.say(f"subsets over {backend}, buckets of {args.bucket_size_mb} MB")
        print_topology()
        for benchmark in benchmarks:
            result["benchmark_results"].append(sweep(args, benchmark, backend))
            # After every model: an interrupted sweep keeps what it has.
            report.write_json(args.json, result)
        print_scaling(result["benchmark_results"])
        setup.say(LEGEND)


if __name__ == "__main__":
    main()
