"""Command line, output, device, process group and data: what every script begins with."""

import argparse
import atexit
import importlib
import importlib.util
import inspect
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist

# Before a group is there: imported later (by torch's optimizers) it keeps the group as a default
# argument, so that gloo's threads outlive the group, and Python is sometimes aborted at its end.
import torch.distributed.nn  # noqa: F401
import torch.multiprocessing as mp
from torch import nn

from common.network import read_network, wire

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps torch.profiler's own log off the screen

ROOT = Path(__file__).resolve().parent.parent  # of this repository


class Size(NamedTuple):
    """A language model, and its batch: sequences per rank and step, and tokens in each."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    vocabulary: int
    batch_size: int
    context_length: int


SIZES = {
    "nano": Size(64, 256, 2, 2, 1_000, 4, 64),
    "mini": Size(192, 768, 16, 6, 1_000, 10, 64),
    "small": Size(768, 3072, 12, 12, 10_000, 4, 128),
    "medium": Size(1024, 4096, 24, 16, 10_000, 4, 128),
    "large": Size(1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": Size(1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": Size(2560, 10_240, 32, 32, 10_000, 4, 128),
    "xl-2026": Size(2560, 10_240, 32, 32, 10_000, 4, 512),
    "10b": Size(4608, 12_288, 50, 36, 10_000, 4, 512),
    "0.5b": Size(1024, 4096, 24, 16, 50_000, 2, 512),
}


def say(text: str = "") -> None:
    """Print on rank 0."""
    progress()
    if is_rank_0():
        print(text, flush=True)


def is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def progress(text: str = "") -> None:
    """Show what runs on a terminal's standard error, over what stood there; nothing in a pipe."""
    if is_rank_0() and sys.stderr.isatty():
        print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)


def fail(message: str):
    """Say in one line what is wrong and exit with status 2; only rank 0 prints it."""
    if not is_rank_0():
        time.sleep(10)  # a rank that ends makes torchrun end rank 0, which may not have said it yet
    progress()
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """argparse's, but an error is one line, and --help shows every default."""

    def __init__(self, description: str):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)

    def add_argument(self, *names, help="", **options):
        if options.get("default") not in (None, argparse.SUPPRESS):
            help += " (default: %(default)s)"
        return super().add_argument(*names, help=help.lstrip(), **options)

    def error(self, message):
        fail(message)


def checked(convert, is_allowed, allowed: str):
    """Return a type for argparse: what `convert` makes of the text, if `is_allowed` says so."""

    def check(text: str):
        with suppress(ValueError):
            if is_allowed(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")

    return check


def whole_number(low: int, high: int = 2**31 - 1):
    return checked(int, lambda n: low <= n <= high, f"a whole number from {low} to {high}")


def list_of(convert):
    """Return a type for argparse: comma-separated values."""
    return lambda text: [convert(word) for word in text.split(",")]


def can_be_written(file: Path) -> bool:
    """Tell whether its folder is there and can be written to; only results/ is made."""
    folder = file.absolute().parent
    if folder == ROOT / "results":
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
    is_new_or_file = file.is_file() or not file.exists()  # no /dev/null: it would be replaced
    return folder.is_dir() and os.access(folder, os.W_OK) and is_new_or_file


positive_number = checked(float, lambda n: 0 < n <= 1e6, "a number above 0, up to 1e6")
output_file = checked(Path, can_be_written, "a writable file in a folder that exists")
network_text = checked(str, read_network, "a rate and a delay: 1gbit,1ms or 1gbit,0,2")


def add_process_group_arguments(parser: Parser) -> None:
    """Add the flags that `process_group` reads."""
    add = parser.add_argument
    devices = ["auto", "cpu", "cuda"]
    backends = ["auto", "gloo", "nccl"]
    add("--device", choices=devices, default="auto", help="auto: CUDA if there is one")
    add("--backend", choices=backends, default="auto", help="auto: nccl with a GPU per rank")
    slow = "emulate a network: 1gbit,1ms; 1gbit,1ms,2: two calls at a time, as gloo's threads"
    add("--network", type=network_text, metavar="RATE,DELAY", help=slow)
    add("--timeout", type=positive_number, default=300.0, help="seconds to wait for other ranks")


def add_training_arguments(parser: Parser, steps: int) -> None:
    """Add the flags of scripts that train a language model; `steps` is --steps' default."""
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
    pace = "--network: a step without communication counts as so many seconds; 0: as it is"
    pace += " (default: 0.4 for mini with its own batch and dtype, else 0)"
    add("--pace", type=checked(float, lambda n: 0 <= n <= 1e6, "a number from 0 to 1e6"), help=pace)
    parser.set_defaults(bucket_size_mb=5.0)  # the flag of 05; torch's DDP has the same everywhere
    add_process_group_arguments(parser)


def add_mine(parser: Parser) -> None:
    mine = "measure your own class, too"
    parser.add_argument("--mine", metavar="FILE.py:NAME", help=mine)


def add_verify_arguments(parser: Parser) -> None:
    """Add the flags of what verifies before it measures."""
    add = parser.add_argument
    add("--no-verify", action="store_true", help="only measure")
    add("--no-baseline", action="store_true", help="measure this stage alone, to save memory")
    add("--data", metavar="DIR", help="verify on MNIST from this folder instead of the digits")
    add("--download", action="store_true", help="fetch MNIST into --data first")
    trace = "Chrome trace of three more steps of each row, on rank 0; in this machine's time"
    add("--trace", type=output_file, metavar="FILE", help=trace)


def add_plot_arguments(parser: Parser, name: str) -> None:
    """Add --plot FILE, by default results/NAME of this repository, and --no-plot."""
    picture = str(ROOT / "results" / name)  # text: argparse converts it after --help
    parser.add_argument("--plot", type=output_file, metavar="FILE", default=picture, help="PNG")
    parser.add_argument("--no-plot", dest="plot", action="store_false", help="draw nothing")


def stage_arguments(description: str, steps: int, **options) -> argparse.Namespace:
    """Read the command line of stages 02 to 06; `options` are more flags, numbers above 0."""
    parser = Parser(description)
    add_training_arguments(parser, steps)
    for name, default in options.items():
        parser.add_argument("--" + name.replace("_", "-"), type=positive_number, default=default)
    add_verify_arguments(parser)
    add_mine(parser)
    return parser.parse_args()


@cache
def import_file(file: str):
    """Import a user's file, as part of its package if it is in one, and return the module.

    While it is imported its folders come first in sys.path, for what it imports, and from then on
    last. So no file of the user's hides a module of ours or of Python's that is imported later.
    """
    path = Path(file).expanduser().resolve()
    name, package = path.stem, path.parent
    while (package / "__init__.py").exists():
        name, package = f"{package.name}.{name}", package.parent
    marks = ("pyproject.toml", ".git")
    roots = [folder for folder in path.parents if any((folder / each).exists() for each in marks)]
    folders = [str(folder) for folder in (path.parent, package, *roots[:1])]
    sys.path[:0] = folders
    try:
        if package != path.parent:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(f"mine_{name}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        for folder in folders:
            sys.path.remove(folder)
        sys.path += folders


def load(text: str):
    """Return the class or function that FILE.py:NAME names; raise whatever prevents it."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError("it is not FILE.py:NAME")
    return getattr(import_file(file), name)


FINISHES = """finish_gradient_synchronization finish_gradient_sync finish synchronize sync_gradients
average_gradients reduce_gradients all_reduce_gradients allreduce_gradients""".split()


def finish_of(model):
    """Return its method that ends the averaging, by one of the usual names; None without one."""
    for name in FINISHES:
        with suppress(AttributeError, TypeError, ValueError):  # not there, or it needs arguments
            method = getattr(model, name)
            inspect.signature(method).bind()
            return method


def bucket_options(wrapper, size_mb: float) -> dict[str, float]:
    """Return the arguments of a wrapper that say how large its buckets are, for buckets of MB."""
    options = {}
    for name, argument in inspect.signature(wrapper).parameters.items():
        if re.fullmatch("bucket(_size|_cap)?(_mb|_bytes)?", name):
            is_large = isinstance(argument.default, int | float) and argument.default > 10_000
            in_bytes = "bytes" in name or is_large
            options[name] = int(size_mb * 2**20) if in_bytes else size_mb
    return options


def users_class(args: argparse.Namespace) -> dict:
    """Return {name of its row: what --mine names, as the stages call it}; {} without it.

    A wrapper gets our size of buckets, and its finish the name by which the stages call it.
    """
    if not args.mine:
        return {}
    try:
        mine = load(args.mine)
        options = bucket_options(mine, args.bucket_size_mb)
    except Exception as error:  # whatever the file does
        fail(f"argument --mine: '{args.mine}' is no FILE.py:NAME that can be loaded ({error!r})")

    def make(*arguments, **others):
        made = mine(*arguments, **options, **others)
        finish = finish_of(made)
        if finish and not hasattr(made, FINISHES[0]):
            setattr(made, FINISHES[0], finish)
        return made

    return {f"{args.mine.rpartition(':')[2]} (mine)": make}


def cores() -> float:
    """Return the cores that this process may use, by its affinity and a container's quota."""
    found = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        found = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # "max" is no number: no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        found = min(found, int(quota) / int(period))
    return found


def threads_per_rank(ranks: int) -> int:
    """Return the cores divided by the ranks of this host; at least 1."""
    return max(1, int(cores() // ranks))


def choose_device(device: str, backend: str, network: str | None) -> tuple[torch.device, str]:
    """Return this rank's device and the backend, where either may be "auto"."""
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none: use cpu")
    gpu_per_rank = device == "cuda" and gpus >= local_size
    if backend == "auto":
        backend = "nccl" if gpu_per_rank else "gloo"
    if backend == "nccl" and not gpu_per_rank:
        fail("argument --backend: 'nccl' needs --device cuda and a GPU for each rank: use gloo")
    if network and (device == "cuda" or int(os.environ["WORLD_SIZE"]) > local_size):
        fail(f"argument --network: '{network}' is emulated on one host's CPU: use --device cpu")
    if device == "cpu":
        return torch.device("cpu"), backend
    index = int(os.environ["LOCAL_RANK"]) % gpus
    torch.cuda.set_device(index)
    return torch.device("cuda", index), backend


@contextmanager
def without_gloo_greeting():
    """Until torch 2.11 gloo prints from C++ how many ranks it has found, and no setting stops it.

    So standard output is discarded while a process group is made.
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


OF_TORCHRUN = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


@contextmanager
def process_group(device="auto", backend="auto", timeout=300.0, network: str | None = None):
    """Join the group that torchrun describes, yield this rank's torch.device, and always leave.

    Seconds of `timeout` for other ranks; with `network` the group's collectives are slow wherever
    `with wire:` says so. Sets the threads: cores ÷ ranks.
    """
    if missing := [name for name in OF_TORCHRUN if name not in os.environ]:
        command = f"torchrun --standalone --nproc-per-node 2 {sys.argv[0]}"
        fail(f"start this script with {command} ({missing[0]} is not set)")
    device, backend = choose_device(device, backend, network)
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    threads = threads_per_rank(ranks_here)
    torch.set_num_threads(threads)
    if network:
        backend = "slow_network"
        wire.connect(network, stretch=max(1.0, ranks_here * threads / cores()))
    limit = timedelta(seconds=timeout)
    device_id = device if backend == "nccl" else None
    with without_gloo_greeting():
        dist.init_process_group(backend, timeout=limit, device_id=device_id)
    try:
        yield device
    except KeyboardInterrupt:  # Ctrl-C reaches all ranks
        sys.exit("interrupted" if is_rank_0() else 1)
    except RuntimeError as error:  # gloo has no other class, and two ways to say timeout
        if "imed out" in str(error) or "timeout" in str(error):
            rank = os.environ["RANK"]
            sys.exit(f"error: rank {rank} waited more than --timeout {timeout:g} s for other ranks")
        raise
    finally:
        LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()


def spawn(world_size: int, function, *arguments) -> None:
    """Call function(rank, *arguments) in a process of this host for each rank, and wait for all.

    The function must be at the top level of a module. The environment tells process_group() and
    init_rpc() where to meet: on loopback, at a port that the system has chosen. Raises
    KeyboardInterrupt for Ctrl-C once all have started, and torch's ProcessRaisedException or
    ProcessExitedException when a rank fails; no process is left then.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks join the store that is there
    for library in ("GLOO", "NCCL", "TP"):
        environment[f"{library}_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ranks inherit it: we end them
    # On Linux one process imports torch, and the ranks are its copies.
    method = "forkserver" if sys.platform == "linux" else "spawn"
    multiprocessing.set_forkserver_preload(["torch.distributed.optim"])
    of_ranks = environment, function, arguments
    options = {"join": False, "daemon": True, "start_method": method}
    ranks = mp.start_processes(start_rank, of_ranks, world_size, **options)
    signal.signal(signal.SIGINT, before)
    try:
        while not ranks.join(grace_period=0):
            pass
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def start_rank(rank: int, environment: dict[str, str], function, arguments: tuple) -> None:
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    threading.Thread(target=end_with_parent, daemon=True).start()
    function(rank, *arguments)


def end_with_parent() -> None:
    """End this rank with the process that started it, even if that was killed."""
    mp.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the digits, shuffled: images uint8 [1797, 8, 8] of 0 to 16, labels int64 [1797]."""
    digits = numpy.load(Path(__file__).with_name("digits.npz"))
    order = numpy.random.default_rng(0).permutation(len(digits["labels"]))
    return torch.tensor(digits["images"][order]), torch.tensor(digits["labels"][order]).long()


def load_images(data: str | None, download: bool) -> list[torch.Tensor]:
    """Return images float64 [n, pixels] and labels int64 [n] to train on, and those to test on.

    MNIST from the folder `data`, or else our 1,797 digits: 297 held out, the others ten times.
    """
    if data is None:
        images, labels = load_digits()
        images = images.double().flatten(1) - 8
        return [images[297:].repeat(10, 1), labels[297:].repeat(10), images[:297], labels[:297]]
    try:
        from torchvision.datasets import MNIST

        if download and dist.get_rank() == 0:
            MNIST(data, download=True)
        dist.barrier()
        splits = MNIST(data, train=True), MNIST(data, train=False)
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not MNIST
        fail(f"argument --data: {data!r} holds no readable MNIST ({error!r}): see --download")
    tensors = []
    for split in splits:
        tensors += [split.data.double().flatten(1) / 255, split.targets]
    return tensors


def load_equal_shares(args: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """load_images on this device; with as many training images as all ranks can share."""
    tensors = load_images(args.data, args.download)
    images, labels, *held_out = [tensor.to(device) for tensor in tensors]
    used = len(images) - len(images) % dist.get_world_size()
    return [images[:used], labels[:used], *held_out]


def classifier(seed: int, images: torch.Tensor) -> nn.Module:
    """Return the model that verify trains, for images of this size, dtype and device."""
    torch.manual_seed(seed)
    first = nn.Linear(images.shape[1], 50)
    layers = first, nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)
    return nn.Sequential(*layers).to(images)
