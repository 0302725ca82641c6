"""Command line, device, backend and process group."""

import argparse
import os
import socket
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # torch.profiler's library else writes its own log to the screen


def fail(message: str):
    """Say in one line what is wrong and exit with status 2. Of several ranks only rank 0 says it."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(
            10
        )  # rank 0 finds the same mistake, says it, and the launcher ends this rank; else we say it
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
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {minimum} to {maximum}"
            )
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
    if (
        not text
        or path.is_dir()
        or not path.parent.is_dir()
        or not os.access(path if path.exists() else path.parent, os.W_OK)
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a file that can be written, in a folder that exists"
        )
    return path


def add_process_group_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `process_group` reads."""
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: CUDA if there is one",
    )
    parser.add_argument(
        "--backend",
        choices=["auto", "gloo", "nccl"],
        default="auto",
        help="auto: nccl if a GPU per rank",
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=300.0,
        help="seconds to wait for the others (default: 300)",
    )


@contextmanager
def process_group(args: argparse.Namespace):
    """Join the process group that torchrun describes, yield this rank's torch.device, and leave the group, also after an
    error. Reads args.device, args.backend and args.timeout; replaces "auto"."""
    if "RANK" not in os.environ:
        fail(
            f"start this script with torchrun: torchrun --standalone --nproc-per-node 2 {sys.argv[0]}"
        )
    local_rank, local_world_size = (
        int(os.environ["LOCAL_RANK"]),
        int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    gpus = torch.cuda.device_count()
    args.device = ("cuda" if gpus > 0 else "cpu") if args.device == "auto" else args.device
    if args.device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none; use cpu")
    gpu_per_rank = args.device == "cuda" and gpus >= local_world_size
    if args.backend == "nccl" and not gpu_per_rank:
        fail(
            f"argument --backend: 'nccl' needs --device cuda and a GPU per rank; this host has {gpus} GPUs for "
            f"{local_world_size} ranks; use gloo or fewer ranks"
        )
    args.backend = ("nccl" if gpu_per_rank else "gloo") if args.backend == "auto" else args.backend
    torch.set_num_threads(threads_per_rank(local_world_size))
    device = torch.device(args.device, local_rank % gpus if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=min(args.timeout, 1e6))
    try:
        if (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        ):  # torchrun has a store for us, or has ended meanwhile
            socket.create_connection(
                (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), 10
            ).close()
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            args.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if args.backend == "nccl" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        fail(
            "cannot join the process group at {MASTER_ADDR}:{MASTER_PORT}: is the first host reachable, and are all "
            "{WORLD_SIZE} ranks started? ".format_map(os.environ)
            + f"({str(error).splitlines()[0]})"
        )
    try:
        yield device
    except RuntimeError as error:
        if "imed out" in str(error) or "Application timeout" in str(
            error
        ):  # gloo has two ways to say it
            name_the_missing(store, rank, world_size, error, args.timeout)
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            fail(
                f"not enough memory for this run; choose a smaller one ({str(error).splitlines()[0]})"
            )
        raise
    finally:
        dist.destroy_process_group()


def name_the_missing(
    store: dist.Store, rank: int, world_size: int, error: Exception, timeout: float
):
    """A collective has timed out: every rank that notices signs in; say which ones do not, and where this one waited."""
    store.set(f"timed out/{rank}", "")
    with suppress(RuntimeError):
        store.wait([f"timed out/{other}" for other in range(world_size)], timedelta(seconds=5))
    missing = [str(other) for other in range(world_size) if not store.check([f"timed out/{other}"])]
    names = [
        frame.name
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename
    ]
    sys.exit(
        f"error: rank {rank} waited more than --timeout {timeout:g} s in {' > '.join(names[1:])}; no answer from rank "
        f"{', '.join(missing) or 'unknown: all have timed out'}"
    )


def threads_per_rank(local_world_size: int) -> int:
    """Cores of this machine (those this process may use) divided by its ranks, at least 1."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // local_world_size)
