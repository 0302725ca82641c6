"""Command line, device, backend and process group."""

import argparse
import os
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's library else writes its own log to the screen


def fail(message: str):
    """Say in one line what is wrong and exit with status 2. Of several ranks only rank 0 says it."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)  # rank 0 finds the same mistake, says it, and the launcher ends this rank; else we say it
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """argparse's parser, but a mistake is said in a single line, once, and without the usage."""

    def error(self, message: str):
        fail(message)

    def print_help(self, file=None):
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def whole_number(minimum: int, maximum: int = 2**31 - 1):
    """A type for argparse: a whole number from minimum to maximum."""

    def convert(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} to {maximum}")
        return int(text)

    return convert


def positive_number(text: str) -> float:
    """A type for argparse: a number above 0; `inf` is one."""
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def output_file(text: str) -> Path:
    """A type for argparse: a file that can be written. Checked at the start, not after minutes of measuring."""
    path = Path(text)
    if not text or path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file in a folder that exists")
    if not os.access(path.parent, os.W_OK) or path.exists() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not writable")
    return path


def add_process_group_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `process_group` reads."""
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA if there is one")
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto",
                        help="auto: nccl if every rank of this host has a GPU of its own, else gloo")
    parser.add_argument("--timeout", type=positive_number, default=300.0, metavar="SECONDS",
                        help="how long a rank waits for the others before it gives up (default: 300)")


@contextmanager
def process_group(args: argparse.Namespace):
    """Join the process group that torchrun describes in the environment, and leave it again, also after an error.

    Reads args.device, args.backend and args.timeout; replaces "auto". Yields this rank's torch.device.
    """
    if "RANK" not in os.environ:
        fail(f"start this script with torchrun: torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if args.device == "auto":
        args.device = "cuda" if gpus > 0 else "cpu"
    if args.device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none; use cpu")
    gpu_per_rank = args.device == "cuda" and gpus >= local_world_size
    if args.backend == "nccl" and not gpu_per_rank:
        fail(f"argument --backend: 'nccl' needs --device cuda and a GPU per rank; this host has {gpus} GPUs for "
             f"{local_world_size} ranks; use gloo or fewer ranks")
    if args.backend == "auto":
        args.backend = "nccl" if gpu_per_rank else "gloo"
    torch.set_num_threads(threads_per_rank(local_world_size))
    device = torch.device(args.device, local_rank % gpus if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(args.backend, timeout=timedelta(seconds=min(args.timeout, 1e6)),
                                device_id=device if args.backend == "nccl" else None)
    except (RuntimeError, ValueError, TimeoutError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        fail(f"cannot join the process group at {address}: is the first host reachable, and are all {os.environ['WORLD_SIZE']} "
             f"ranks started? ({str(error).splitlines()[0]})")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def threads_per_rank(local_world_size: int) -> int:
    """Cores of this machine (those this process may use) divided by its ranks, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)
