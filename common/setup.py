"""Command line, output, data, device and process group."""

import argparse
import atexit
import os
import re
import socket
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

# Before a group is there: imported later (by torch's optimizers) it keeps the group as a default
# argument, so that gloo's threads outlive the group, and Python is sometimes aborted at its end.
import torch.distributed.nn  # noqa: F401
from torch import nn

from tools.check.loading import load, loadable, with_bucket_size

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps torch.profiler's own log off the screen

ROOT = Path(__file__).resolve().parent.parent  # of this repository
SIZES = {  # d_model, d_ff, layers, heads, vocabulary, sequences per rank and step, tokens in each
    "nano": (64, 256, 2, 2, 1_000, 4, 64),
    "mini": (192, 768, 16, 6, 1_000, 10, 64),
    "small": (768, 3072, 12, 12, 10_000, 4, 128),
    "medium": (1024, 4096, 24, 16, 10_000, 4, 128),
    "large": (1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": (1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": (2560, 10_240, 32, 32, 10_000, 4, 128),
    "xl-2026": (2560, 10_240, 32, 32, 10_000, 4, 512),
    "10b": (4608, 12_288, 50, 36, 10_000, 4, 512),
    "0.5b": (1024, 4096, 24, 16, 50_000, 2, 512),
}


def is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str = "") -> None:
    """Print on rank 0, even into a closed pipe (`| head`): what comes later is still written."""
    progress()
    if not is_rank_0():
        return
    sys.stdout.reconfigure(errors="replace")  # its encoding may lack × and ÷
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress(text: str = "") -> None:
    """Show what runs on a terminal's standard error, over what stood there; nothing in a pipe."""
    if is_rank_0() and sys.stderr.isatty():
        print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)


def fail(message: str):
    """Say in one line what is wrong and exit with status 2; of several ranks only rank 0 does."""
    if not is_rank_0():
        # A rank that ends makes torchrun end all the others, and rank 0 may not have said it yet.
        # So the others wait to be ended; what only one of them has found it says in the end.
        time.sleep(10)
    progress()
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """argparse's, but a mistake is a single line, and --help has every default."""

    def __init__(self, description: str):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)

    def add_argument(self, *names, help="", **options):
        if str(options.get("default")) not in ("None", "False", argparse.SUPPRESS):
            help += " (default: %(default)s)"
        return super().add_argument(*names, help=help.lstrip(), **options)

    def error(self, message):
        fail(message)


def checked(convert, is_allowed, allowed: str):
    """A type for argparse: what `convert` makes of the text, if `is_allowed` says so."""

    def check(text: str):
        with suppress(ValueError):
            if is_allowed(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")

    return check


def whole_number(low: int, high: int = 2**31 - 1):
    return checked(int, lambda n: low <= n <= high, f"a whole number from {low} to {high}")


def list_of(convert):
    """A type for argparse: values with commas between them."""
    return lambda text: [convert(word) for word in text.split(",")]


def can_be_written(path: Path) -> bool:
    """A file that can be made or replaced; its folder is made, in a folder that exists."""
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
    is_file = path.is_file() or not path.exists()
    return is_file and path.parent.is_dir() and os.access(path.parent, os.W_OK)


positive_number = checked(float, lambda number: number > 0, "a number above 0")  # inf is one
output_file = checked(Path, can_be_written, "a file that can be written")


def result_file(name: str) -> Path | None:
    """results/NAME of this repository; None if one cannot write there."""
    path = ROOT / "results" / name
    return path if can_be_written(path) else None


def network(text: str) -> str:
    """A type for argparse: a rate and a delay, such as 1gbit,1ms. It prepares the network, too."""
    wire = slow_network().wire
    try:
        wire.connect(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    wire.is_slow = False  # until on_the_network()
    return text


def add_process_group_arguments(parser: Parser) -> None:
    """The flags that `process_group` reads."""
    add = parser.add_argument
    devices = ["auto", "cpu", "cuda"]
    backends = ["auto", "gloo", "nccl"]
    add("--device", choices=devices, default="auto", help="auto: CUDA if there is one")
    add("--backend", choices=backends, default="auto", help="auto: nccl if a GPU per rank")
    emulated = "measure on an emulated network of this rate, and this delay one way: 1gbit,1ms"
    add("--network", type=network, metavar="RATE,DELAY", help=emulated)
    add("--timeout", type=positive_number, default=300.0, help="seconds to wait for other ranks")


def add_training_arguments(parser: Parser, steps: int) -> None:
    """The flags of all that train a language model; `steps` is the default of --steps."""
    add = parser.add_argument
    one = whole_number(1)
    add("--size", choices=SIZES, default="mini", help="CS336 2025: xl, 2.7b; 2026: xl-2026, 10b")
    add("--batch-size", type=one, help="sequences per rank and step (default: the size's)")
    add("--context-length", type=one, help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--steps", type=one, default=steps, help="steps that are measured")
    add("--warmup", type=whole_number(0), default=5, help="steps before them")
    add("--seed", type=whole_number(0), default=0)
    add("--json", type=output_file, metavar="FILE", help="everything measured, raw")
    parser.set_defaults(bucket_size_mb=5.0)  # the flag of 05; torch's DDP has the same everywhere
    add_process_group_arguments(parser)


def add_mine(parser: Parser) -> None:
    mine = "a class of your own, measured beside"
    parser.add_argument("--mine", type=loadable, metavar="FILE.py:NAME", help=mine)


def add_verify_arguments(parser: Parser) -> None:
    """The flags of what verifies before it measures."""
    add = parser.add_argument
    add("--no-verify", action="store_true", help="only measure")
    add("--no-baseline", action="store_true", help="measure this stage alone, to save memory")
    add("--data", metavar="DIR", help="verify on MNIST from this folder instead of the digits")
    add("--download", action="store_true", help="fetch MNIST into --data first")
    add("--save", type=output_file, metavar="FILE", help="the verified classifier's state_dict")
    every = "verify: loss and times of rank 0 every N steps; 0: none"
    add("--log-every", type=whole_number(0), default=0, metavar="N", help=every)
    trace = "Chrome trace of three more steps of each row, on rank 0"
    add("--trace", type=output_file, metavar="FILE", help=trace)


def add_plot_arguments(parser: Parser, name: str) -> None:
    """--plot FILE, by default results/NAME of this repository if one can write, and --no-plot."""
    default = f"results/{name}"

    def picture(text: str) -> Path | None:  # called after --help, so that it makes no folder
        return result_file(name) if text is default else output_file(text)

    add = parser.add_argument
    add("--plot", type=picture, metavar="FILE", default=default, help="picture, PNG")
    add("--no-plot", dest="plot", action="store_const", const=None, help="draw nothing")


def stage_arguments(description: str, steps: int, **options) -> argparse.Namespace:
    """The command line of stages 02 to 06; `options`, numbers above 0, are flags of one of them."""
    parser = Parser(description)
    for name, default in options.items():
        parser.add_argument("--" + name.replace("_", "-"), type=positive_number, default=default)
    add_training_arguments(parser, steps)
    add_verify_arguments(parser)
    add_mine(parser)
    args = parser.parse_args()
    if args.save and args.no_verify:
        parser.error("argument --save: not with --no-verify, which trains no classifier")
    return args


def users_class(args: argparse.Namespace) -> dict:
    """{name of its row: what --mine names}, a wrapper with our size of buckets; {} without it."""
    if not args.mine:
        return {}
    name = f"{args.mine.rpartition(':')[2]} (mine)"
    return {name: with_bucket_size(load(args.mine), args.bucket_size_mb)}


def forget_launcher() -> None:
    """For what starts its own ranks: clear what a torchrun or another job left in this shell."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def choose_device(args: argparse.Namespace) -> torch.device:
    """This rank's device. Replaces "auto" in args.device and args.backend, and sets the threads."""
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if args.device == "auto":
        args.device = "cuda" if gpus else "cpu"
    gpu_per_rank = args.device == "cuda" and gpus >= local_size
    if args.backend == "auto":
        args.backend = "nccl" if gpu_per_rank else "gloo"
    if args.device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none; use cpu")
    if args.backend == "nccl" and not gpu_per_rank:
        fail(
            "argument --backend: 'nccl' needs --device cuda and a GPU per rank; this host has "
            f"{gpus} GPUs for {local_size} ranks; use gloo or fewer ranks"
        )
    several_hosts = int(os.environ["WORLD_SIZE"]) > local_size
    if args.network and (args.device == "cuda" or several_hosts):
        fail(f"argument --network: '{args.network}' is emulated on one host's CPU; --device cpu")
    torch.set_num_threads(threads_per_rank(local_size))
    if args.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank % gpus)
    return torch.device("cuda", local_rank % gpus)


def threads_per_rank(local_world_size: int) -> int:
    """Cores that this process may use, divided by the ranks of this machine; at least 1."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        cores = len(os.sched_getaffinity(0))
    return max(1, int(min(cores, cgroup_limit("cpu.max")) // local_world_size))


CGROUP = Path("/sys/fs/cgroup")


def cgroup_limit(name: str) -> float:
    """What a container may use: cores by cpu.max (quota and period), bytes by memory.max."""
    with suppress(OSError, ValueError):
        limit, *period = (CGROUP / name).read_text().split()  # "max" is no number: no limit
        return int(limit) / int(*period or [1])
    return float("inf")


TORCH_BYTES = 4e8  # that a rank has for itself once torch is imported (2.15, on Linux)


def available_memory() -> float:
    """Bytes that processes can still have: what Linux calls available, elsewhere all there is."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    system = Path("/proc/meminfo")
    if system.exists():
        available = 1024 * int(re.search(r"MemAvailable: *(\d+)", system.read_text())[1])
    return min(available, cgroup_limit("memory.max"))


@cache
def slow_network():
    """The module of 01_allreduce/slow_network, which is needed with --network only."""
    folder = ROOT / "01_allreduce" / "slow_network"
    sys.path.append(str(folder))
    try:
        import slow_network
    except ModuleNotFoundError:
        fail(f"argument --network: copy the repository's 01_allreduce/slow_network to {folder}")
    return slow_network


@contextmanager
def on_the_network():
    """Within it collectives take as long as on --network's network; without the flag as ever."""
    if "slow_network" not in dist.Backend.backend_list:
        yield
        return
    slow_network().wire.is_slow = True
    try:
        yield
    finally:
        slow_network().wire.is_slow = False


@contextmanager
def without_gloo_greeting():
    """Until torch 2.11 gloo prints from C++ how many ranks it has found, and no setting stops it.

    So standard output leads nowhere while a process group is made.
    """
    output = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


# Groups that were left. If a DDP model frees the group it may wait for ever: it keeps Python's lock
# while it waits for gloo's threads, and these want it. At Python's end no model is there any more.
LEFT = []
atexit.register(LEFT.clear)


@contextmanager
def process_group(args: argparse.Namespace):
    """Join the group that torchrun describes, yield this rank's torch.device, and always leave."""
    if "RANK" not in os.environ:
        fail(f"start this script with torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    device = choose_device(args)
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    timeout = timedelta(seconds=min(args.timeout, 1e6))
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            socket.create_connection(address, 10).close()  # fails at once if torchrun has ended
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        with without_gloo_greeting():
            dist.init_process_group(
                "slow_network" if args.network else args.backend,
                timeout=timeout,
                store=store,
                rank=rank,
                world_size=world_size,
                device_id=device if args.backend == "nccl" else None,
            )
    except (RuntimeError, ValueError, OSError) as error:
        fail(
            f"cannot join the process group at {':'.join(address)}: have all "
            f"{os.environ['WORLD_SIZE']} ranks started, and is it reachable? "
            f"({str(error).splitlines()[0]})"
        )
    try:
        yield device
    except KeyboardInterrupt:  # Ctrl-C reaches all ranks
        sys.exit("interrupted" if rank == 0 else 1)
    except torch.OutOfMemoryError as error:
        fail(f"not enough memory on the GPU: use a smaller run ({error})")
    except RuntimeError as error:  # gloo has no other class, and two ways to say timeout
        if "imed out" in str(error) or "timeout" in str(error):
            name_the_missing(store, rank, world_size, args.timeout)
        raise
    finally:
        LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()


def name_the_missing(store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
    """After a timeout every rank that noticed signs in; end with the numbers of the others."""
    store.set(f"timed out/{rank}", "")
    time.sleep(5)
    missing = [str(r) for r in range(world_size) if not store.check([f"timed out/{r}"])]
    silent = ", ".join(missing) or "unknown: all have timed out"
    sys.exit(
        f"error: rank {rank} waited more than --timeout {timeout:g} s; no answer from rank {silent}"
    )


def load_images(data: str | None, download: bool) -> list[torch.Tensor]:
    """Training images, their labels, test images, their labels: float64 [n, pixels], int64 [n].

    MNIST from the folder `data`, or else our 1,797 digits: 297 held out, the others ten times.
    """
    if data is None:
        digits = numpy.load(Path(__file__).with_name("digits.npz"))
        order = numpy.random.default_rng(0).permutation(len(digits["labels"]))
        images = torch.tensor(digits["images"][order]).double().flatten(1) - 8
        labels = torch.tensor(digits["labels"][order]).long()
        return [images[297:].repeat(10, 1), labels[297:].repeat(10), images[:297], labels[:297]]
    try:
        from torchvision.datasets import MNIST

        if download and dist.get_rank() == 0:
            MNIST(data, download=True)
        dist.barrier()
        tensors = []
        for split in (MNIST(data, train=True), MNIST(data, train=False)):
            pixels = split.data.double().flatten(1) / 255
            tensors += [(pixels - 0.1307) / 0.3081, split.targets]  # MNIST's mean and deviation
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not MNIST
        fail(f"argument --data: {data!r} holds no readable MNIST ({error!r}); use --download")
    return tensors


def load_equal_shares(args: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """load_images for what verifies; of the training images as many as the ranks can share."""
    tensors = load_images(args.data, args.download)
    images, labels, *held_out = [tensor.to(device) for tensor in tensors]
    world_size = dist.get_world_size()
    used = len(images) // world_size * world_size  # equal shares, in the last batch too
    return [images[:used], labels[:used], *held_out]


def classifier(seed: int, images: torch.Tensor) -> nn.Module:
    """The model that verify trains, for images of this size, dtype and device."""
    torch.manual_seed(seed)
    first, second, last = nn.Linear(images.shape[1], 50), nn.Linear(50, 50), nn.Linear(50, 10)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last).to(images)
