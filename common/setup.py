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

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keeps torch.profiler's own log off the screen


def fail(message: str):
    """Say in one line what is wrong and exit with status 2; of several ranks only rank 0 does."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)  # rank 0 finds the same mistake, and the launcher ends us; else we say it
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """argparse's parser, but it says a mistake in a single line, once, and without the usage."""

    def __init__(self, description: str):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str):
        fail(message)

    def print_help(self, file=None):
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def whole_number(minimum: int, maximum: int = 2**31 - 1):
    """A type for argparse: a whole number from minimum to maximum."""

    def convert(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not minimum <= int(text) <= maximum:
            allowed = f"a whole number from {minimum} to {maximum}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
        return int(text)

    return convert


def positive_number(text: str) -> float:
    """A type for argparse: a number above 0; `inf` is one."""
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def output_file(text: str) -> Path:
    """A type for argparse: a file that can be written. Checked before anything is measured."""
    path = Path(text)
    target = path if path.exists() else path.parent
    if not text or path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        message = "is not the name of a file that can be written, in a folder that exists"
        raise argparse.ArgumentTypeError(f"{text!r} {message}")
    return path


def add_training_arguments(parser: Parser, sizes: dict, steps: int) -> None:
    """The flags that all scripts with a language model share; `steps` is the default of --steps."""
    add = parser.add_argument
    add("--size", choices=sizes, default="tiny", help="of the language model (default: tiny)")
    add(
        "--batch-size",
        type=whole_number(1),
        help="sequences per rank and step (default: the size's)",
    )
    add("--context-length", type=whole_number(1), help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--steps", type=whole_number(1), default=steps, help=f"measured (default: {steps})")
    add("--warmup", type=whole_number(0), default=5, help="steps not measured (default: 5)")
    add("--seed", type=whole_number(0), default=0)
    add("--no-verify", action="store_true", help="only measure")
    add("--no-baseline", action="store_true", help="measure this stage alone, to save memory")
    add("--data", metavar="DIR", help="verify on MNIST from this folder instead of the digits")
    add("--download", action="store_true", help="fetch MNIST into --data first")
    add("--json", type=output_file, metavar="FILE", help="everything measured, raw")
    add_process_group_arguments(parser)


def add_ladder_arguments(parser: Parser) -> None:
    """The flags that stages 02 to 05 have besides."""
    add = parser.add_argument
    file = {"type": output_file, "metavar": "FILE"}
    add("--gradient-as-bucket-view", action="store_true", help="torch DDP's option of that name")
    add("--save", **file, help="the verified classifier's state_dict")
    add("--trace", **file, help="Chrome trace of three steps of rank 0")


def add_process_group_arguments(parser: Parser) -> None:
    """The flags that `process_group` reads."""
    add = parser.add_argument
    devices, backends = ["auto", "cpu", "cuda"], ["auto", "gloo", "nccl"]
    add("--device", choices=devices, default="auto", help="auto: CUDA if there is one")
    add("--backend", choices=backends, default="auto", help="auto: nccl if a GPU per rank")
    waiting = "seconds to wait for the others (default: 300)"
    add("--timeout", type=positive_number, default=300.0, help=waiting)


def choose_device(args: argparse.Namespace) -> torch.device:
    """This rank's device. Replaces "auto" in args.device and args.backend, and sets the threads."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if args.device == "auto":
        args.device = "cuda" if gpus > 0 else "cpu"
    if args.device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none; use cpu")
    gpu_per_rank = args.device == "cuda" and gpus >= local_size
    if args.backend == "auto":
        args.backend = "nccl" if gpu_per_rank else "gloo"
    if args.backend == "nccl" and not gpu_per_rank:
        here = f"this host has {gpus} GPUs for {local_size} ranks; use gloo or fewer ranks"
        fail(f"argument --backend: 'nccl' needs --device cuda and a GPU per rank; {here}")
    torch.set_num_threads(threads_per_rank(local_size))
    if args.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(args: argparse.Namespace):
    """Join the process group that torchrun describes, yield this rank's torch.device, and leave.

    Leaves it after an error, too. Reads and completes args.device, args.backend and args.timeout.
    """
    if "RANK" not in os.environ:
        command = f"torchrun --standalone --nproc-per-node 2 {sys.argv[0]}"
        fail(f"start this script with torchrun: {command}")
    device = choose_device(args)
    master = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    timeout = timedelta(seconds=min(args.timeout, 1e6))
    options = {"timeout": timeout, "device_id": device if args.backend == "nccl" else None}
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            socket.create_connection(master, 10).close()  # fails at once if torchrun has ended
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(args.backend, store=store, rank=rank, world_size=size, **options)
    except (RuntimeError, ValueError, OSError) as error:
        question = (
            f"is the first host reachable, and are all {os.environ['WORLD_SIZE']} ranks started?"
        )
        reason = str(error).splitlines()[0]
        fail(f"cannot join the process group at {':'.join(master)}: {question} ({reason})")
    try:
        yield device
    except RuntimeError as error:
        message = str(error)
        if "imed out" in message or "Application timeout" in message:  # gloo has two ways to say it
            name_the_missing(store, rank, size, error, args.timeout)
        if "out of memory" in message or "can't allocate memory" in message:
            fail(f"not enough memory; choose a smaller run ({message.splitlines()[0]})")
        raise
    finally:
        dist.destroy_process_group()


def name_the_missing(store, rank: int, world_size: int, error: Exception, timeout: float):
    """After a timeout every rank that noticed signs in; say which did not, and where we waited."""
    store.set(f"timed out/{rank}", "")
    with suppress(RuntimeError):
        store.wait([f"timed out/{other}" for other in range(world_size)], timedelta(seconds=5))
    missing = [str(other) for other in range(world_size) if not store.check([f"timed out/{other}"])]
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.name for frame in frames if "/torch/" not in frame.filename]
    waited = f"waited more than --timeout {timeout:g} s in {' > '.join(names[1:])}"
    who = ", ".join(missing) or "unknown: all have timed out"
    sys.exit(f"error: rank {rank} {waited}; no answer from rank {who}")


def threads_per_rank(local_world_size: int) -> int:
    """Cores that this process may use, divided by the ranks of this machine; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)) // local_world_size)
    return max(1, (os.cpu_count() or 1) // local_world_size)
