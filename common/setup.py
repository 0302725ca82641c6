"""Command line, output, device, process group and data: what every script begins with."""

import argparse
import atexit
import gc
import os
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

# Before a group is there: imported later (by torch's optimizers) it keeps the group as a default
# argument, so that gloo's threads outlive the group, and Python is sometimes aborted at its end.
import torch.distributed.nn

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps torch.profiler's own log off the screen

ROOT = Path(__file__).resolve().parent.parent  # of this repository


def stage() -> str:
    """Return the folder of the script that runs, as the repository has it."""
    folder = Path(sys.argv[0]).resolve().parent
    return str(folder.relative_to(ROOT)) if ROOT in folder.parents else folder.name


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
    """Say in one line what is wrong and exit with status 2; one of the ranks that see it says it.

    When a rank ends, torchrun ends the others. So rank 0 speaks at once, and a rank that is still
    there after some seconds speaks for itself.
    """
    progress()
    speaker = ""
    if not is_rank_0():
        time.sleep(10 + 2 * int(os.environ.get("LOCAL_RANK", 0)))
        speaker = f"rank {os.environ['RANK']}: "
    print(f"{Path(sys.argv[0]).name}: error: {speaker}{message}", file=sys.stderr, flush=True)
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


def add_process_group_arguments(parser: Parser) -> None:
    """Add the flags that `process_group` reads."""
    add = parser.add_argument
    devices = ["auto", "cpu", "cuda"]
    backends = ["auto", "gloo", "nccl"]
    add("--device", choices=devices, default="auto", help="auto: CUDA if there is one")
    add("--backend", choices=backends, default="auto", help="auto: nccl with a GPU per rank")
    add("--timeout", type=positive_number, default=300.0, help="seconds to wait for other ranks")


def add_plot_arguments(parser: Parser, name: str) -> None:
    """Add --plot FILE, by default results/NAME of this repository, and --no-plot."""
    picture = str(ROOT / "results" / name)  # text: argparse converts it after --help
    parser.add_argument("--plot", type=output_file, metavar="FILE", default=picture, help="PNG")
    parser.add_argument("--no-plot", dest="plot", action="store_false", help="draw nothing")


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


def can_compute(gpu: int) -> bool:
    """Tell whether this torch has kernels for a GPU."""
    try:
        torch.zeros(1, device=f"cuda:{gpu}")
    except RuntimeError:
        return False
    return True


def choose_device(device: str, backend: str) -> tuple[torch.device, str]:
    """Return this rank's device and the backend, where either may be "auto"."""
    gpus = torch.cuda.device_count()
    if gpus and not can_compute(int(os.environ["LOCAL_RANK"]) % gpus):
        say("This torch has no kernels for the GPU of this host, so the CPU computes.")
        gpus = 0
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none: use cpu")
    gpu_per_rank = device == "cuda" and gpus >= int(os.environ["LOCAL_WORLD_SIZE"])
    if backend == "auto":
        backend = "nccl" if gpu_per_rank else "gloo"
    if backend == "nccl" and not gpu_per_rank:
        fail("argument --backend: 'nccl' needs --device cuda and a GPU for each rank: use gloo")
    if device == "cpu":
        return torch.device("cpu"), backend
    index = int(os.environ["LOCAL_RANK"]) % gpus
    torch.cuda.set_device(index)
    return torch.device("cuda", index), backend


@contextmanager
def without_gloo_greeting():
    """Discard what C++ prints meanwhile: until torch 2.11 gloo says how many ranks it has found."""
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


@atexit.register
def free_groups() -> None:
    """Free models first, also those that hold themselves, and then the groups."""
    gc.collect()
    LEFT.clear()


class AsItIs(nullcontext):
    """The network as it is: what an emulated one (01_allreduce/slow_network) can replace."""

    text = None  # 1gbit,1ms
    stretch = 1.0  # seconds here for each of the network's
    lowest_stretch = highest_stretch = 1.0  # while it was measured
    calls = 0  # which an emulated one counts
    work = dist.Work  # what a call returns that is not waited for


AS_IT_IS = AsItIs()


def network():
    """Return what carries the process group's calls; they are slow within `with network():`."""
    return getattr(dist.group.WORLD, "network", AS_IT_IS)


OF_TORCHRUN = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def require_torchrun() -> None:
    if missing := [name for name in OF_TORCHRUN if name not in os.environ]:
        command = f"torchrun --standalone --nproc-per-node 2 {sys.argv[0]}"
        fail(f"start this script with {command} ({missing[0]} is not set)")


@contextmanager
def process_group(device="auto", backend="auto", timeout=300.0):
    """Join the group that torchrun describes, yield this rank's torch.device, and always leave.

    Seconds of `timeout` for other ranks. Sets the threads: cores ÷ ranks.
    """
    require_torchrun()
    device, backend = choose_device(device, backend)
    torch.set_num_threads(threads_per_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    device_id = device if backend == "nccl" else None
    limit = timedelta(seconds=timeout)
    with without_gloo_greeting():
        dist.init_process_group(backend, timeout=limit, device_id=device_id)
    network().is_slow = False  # but where something is measured
    try:
        yield device
    except KeyboardInterrupt:  # Ctrl-C reaches all ranks
        sys.exit("interrupted" if is_rank_0() else 1)
    except RuntimeError as error:  # gloo has no other class, and two ways to say timeout
        text = str(error)
        if "/gloo/" in text and ("imed out" in text or "timeout" in text):
            rank = os.environ["RANK"]
            sys.exit(f"error: rank {rank} waited more than --timeout {timeout:g} s for other ranks")
        raise
    finally:
        LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the digits, shuffled: images uint8 [1797, 8, 8] of 0 to 16, labels int64 [1797]."""
    digits = numpy.load(Path(__file__).with_name("digits.npz"))
    order = numpy.random.default_rng(0).permutation(len(digits["labels"]))
    return torch.tensor(digits["images"][order]), torch.tensor(digits["labels"][order]).long()
