"""Reads the options of ddp_rpc.py, then starts, watches and ends its processes, on this host.

The ranks are the trainers, then the parameter servers, then the master. All join one RPC world, the
trainers a process group besides, and the master alone acts by itself: the others do what they are
called for. The launcher has no rank. It holds the store by which all find each other, on a free
port. When a process dies, or on Ctrl-C or SIGTERM, it ends all and says why.

A process that is there but does not answer is named, too. An RPC or an all-reduce that waits for it
fails after --timeout seconds, and the master then asks all for a sign of life. Nobody waits for the
master while the trainers train, so it counts heartbeats in the store, which the launcher watches.
"""

import argparse
import ipaddress
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from multiprocessing import resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import rpc

from common import setup
from common.report import processor_name
from common.setup import fail, progress, say, threads_per_rank, whole_number, without_gloo_greeting


def role(rank: int, trainers: int, servers: int) -> str:
    """The RPC name of a rank: the trainers first, then the parameter servers, then the master."""
    if rank < trainers:
        return f"trainer{rank}"
    if rank < trainers + servers:
        return f"ps{rank - trainers}"
    return "master"


# The options. "Upstream" is torch/distributed/benchmarks/benchmark_ddp_rpc.py.


def read_arguments(description: str, dense_input: int, epoch: int) -> argparse.Namespace:
    """The command line, checked. dense_input: columns of the dense net's input; epoch: steps."""
    parser = setup.Parser(description)
    add = parser.add_argument
    add("--trainers", type=whole_number(1, 64), default=8, old_names=["--number-trainers"])
    add("--servers", type=whole_number(1, 64), default=8, old_names=["--number-ps"])
    rows = {"old_names": ["--number-embeddings"], "help": "rows of each server's table"}
    add("--embeddings", type=whole_number(1), default=300, **rows)
    columns = f"its columns; servers × columns must be a multiple of {dense_input}"
    smallest = "(default: the smallest that is: 64 with 8 servers, 256 with 2)"
    add("--embedding-dim", type=whole_number(1), help=f"{columns} {smallest}")
    steps = f"measured; a multiple of {epoch}"
    add("--steps", type=whole_epochs(epoch, epoch), default=1000, help=steps)
    warmup = f"steps before them, not measured; a multiple of {epoch}"
    add("--warmup", type=whole_epochs(0, epoch), default=50, help=warmup)
    # An older name and upstream's, which count epochs.
    hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    add("--epochs", dest="steps", type=lambda text: epoch * whole_number(1, MOST)(text), **hidden)
    cycles = {"dest": "warmup", "type": lambda text: epoch * whole_number(0, MOST)(text)}
    add("--warmup-cycles", **cycles, **hidden)
    kinds = ["parallel", "sequential", "both"]
    in_turn = "ask all servers at once, or one after another; both: epoch by epoch in turn"
    add("--lookup", choices=kinds, default="parallel", help=in_turn)
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the dense net")
    add("--master-addr", default="127.0.0.1", help="the address to listen on")
    add("--master-port", type=whole_number(0, 65535), default=0, help="0: one that is free")
    waiting = "seconds to wait for the others"
    add("--timeout", type=setup.positive_number, default=300.0, help=waiting)
    add("--seed", type=whole_number(0), default=0)
    add("--no-verify", action="store_true", help="only measure")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    args = parser.parse_args()
    check_sizes(args, dense_input)
    return args


MOST = 10**8  # epochs


def whole_epochs(minimum: int, epoch: int):
    """A type for argparse: a number of steps that makes whole epochs."""

    def check(text: str) -> int:
        steps = whole_number(minimum, epoch * MOST)(text)
        if steps % epoch:
            near = steps // epoch * epoch
            nearest = f"the nearest that work are {near} and {near + epoch}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a multiple of {epoch}; {nearest}")
        return steps

    return check


def check_sizes(args, dense_input: int) -> None:
    """Complete args.embedding_dim; refuse what doesn't fit together, or into this host's memory."""
    multiple = dense_input // math.gcd(dense_input, args.servers)
    args.embedding_dim = args.embedding_dim or multiple
    if args.embedding_dim % multiple:
        below = args.embedding_dim // multiple * multiple
        nearest = f"{below + multiple}"
        if below:
            nearest = f"{below} or {nearest}"
        fail(
            f"argument --embedding-dim: '{args.embedding_dim}' × {args.servers} servers is not a "
            f"multiple of {dense_input}; with {args.servers} servers the nearest that works is "
            f"{nearest}"
        )
    gigabytes = 4e-9 * args.embeddings * args.embedding_dim * args.servers * (1 + args.trainers)
    if gigabytes > 1e-9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        fail(
            f"argument --embeddings: '{args.embeddings}' × {args.embedding_dim} on {args.servers} "
            f"servers, with a gradient per trainer, takes {gigabytes:.0f} GB, more than this host "
            "has; use fewer"
        )


# The launcher's side.


def run(master, args, dense_parameters: int) -> None:
    """Start all processes, and return when the master is done and all have left.

    master: a function of a module, which the last rank calls with args and the head of the JSON.
    dense_parameters: their number is printed with the layout. Ends this process with a message if
    one of the others fails.
    """
    backend = choose_device(args)
    store = listen(args)
    # torch would name every process that it ends.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # Signals are only noted: an exception while a process is half started would leave it behind.
    received = []

    def note(number, frame):
        received.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    context = None
    try:
        resource_tracker.ensure_running()  # multiprocessing's; its start would undo the mask
        # Ctrl-C reaches every process of the terminal: the children inherit this mask, and leave
        # it to the launcher.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        head = begin(args, backend)
        print_layout(args, backend, dense_parameters)
        processes = head["world_size"]
        progress(f"0 of {processes} processes have started")
        context = start(run_process, (args, head, master), processes)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        watch(context, store, received, args)
    except mp.ProcessExitedException as error:
        cause = f"ended with status {error.exit_code}"
        if error.signal_name:
            cause = f"was ended by {error.signal_name}"
        exit_naming(error.error_index, cause, args)
    except mp.ProcessRaisedException as error:
        progress()
        print(error, file=sys.stderr)
        exit_naming(error.error_index, "failed", args)
    finally:
        left = mp.active_children()
        for process in left:  # all, before any of them complains about another
            process.kill()
        for process in left:
            process.join()
        progress()
        if context:
            for file in context.error_files:  # torch's, in which ranks leave their tracebacks
                Path(file).unlink(missing_ok=True)
        del store


def start(function, arguments: tuple, processes: int) -> mp.ProcessContext:
    """Start the processes. On Linux they are forked from one that has imported torch.

    With two cores that is seconds for 17 processes, and not half a minute. macOS has libraries that
    do not bear it.
    """
    method = "spawn"
    if sys.platform == "linux":
        method = "forkserver"
        mp.get_context(method).set_forkserver_preload(["torch", "torch.distributed.optim", "numpy"])
    return mp.start_processes(function, arguments, processes, join=False, start_method=method)


def choose_device(args) -> str:
    """Replace "auto" in args.device; returns the backend of the trainers' process group."""
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none; use cpu")
    if args.device == "auto":
        args.device = "cuda" if gpus > 0 else "cpu"
    gpu_per_trainer = args.device == "cuda" and gpus >= args.trainers
    return "nccl" if gpu_per_trainer else "gloo"


def listen(args) -> dist.TCPStore:
    """The store, on a socket of our own: torch's would listen on every interface.

    Completes args.master_addr and args.master_port.
    """
    try:
        found = socket.getaddrinfo(args.master_addr, args.master_port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        flag = "--master-addr"
        if args.master_port:
            flag = "--master-port"
        reason = getattr(error, "strerror", None) or error
        place = f"'{args.master_addr}' port {args.master_port}"
        fail(f"argument {flag}: cannot listen on {place}: {reason}")
    args.master_addr, args.master_port = listener.getsockname()[:2]
    if ipaddress.ip_address(args.master_addr).is_loopback:
        # RPC, gloo and nccl too; otherwise the host name's interface, or what is set there.
        interfaces = [name for _, name in socket.if_nameindex()]
        loopback = next(name for name in interfaces if name.startswith("lo"))
        for library in ("TP", "GLOO", "NCCL"):
            os.environ[f"{library}_SOCKET_IFNAME"] = loopback
    return dist.TCPStore(
        args.master_addr,
        args.master_port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def begin(args, backend: str) -> dict:
    """The head of the JSON, with the keys of report.begin; and its line on the screen.

    world_size counts everybody: trainers, servers and the master.
    """
    name = torch.cuda.get_device_name() if args.device == "cuda" else processor_name()
    world_size = args.trainers + args.servers + 1
    head = {"stage": "08_ddp_rpc", "torch": torch.__version__, "backend": backend}
    head |= {"device": args.device, "device_name": name, "world_size": world_size}
    head |= {"threads_per_rank": threads_per_rank(world_size - 1)}  # the master only waits
    line = "{stage}: torch {torch}, {backend} on {device}, {world_size} ranks, "
    say((line + "{threads_per_rank} threads per rank").format(**head))
    head["cuda"] = torch.version.cuda
    say(f"CUDA {head['cuda'] or 'none'}, {torch.cuda.device_count()} GPUs; {topology()}")
    return head | {"options": dict(vars(args)), "started": datetime.now(timezone.utc)}


def topology() -> str:
    """How this host is built: `nvidia-smi topo -m`, and without it the cores and NUMA nodes."""
    if shutil.which("nvidia-smi"):
        answer = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
        if answer.returncode == 0:
            return "\n" + answer.stdout.strip("\n")
    nodes = []
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        nodes.append(f"{path.parent.name} has cores {path.read_text().strip()}")
    numa = ", ".join(nodes) or "nodes unknown"
    return f"{os.cpu_count()} cores, {processor_name()}; NUMA {numa}"


def print_layout(args, backend: str, dense_parameters: int) -> None:
    """Say which rank is what, where all meet, and how long they train."""
    last = args.trainers + args.servers
    say(
        f"rank 0 to {args.trainers - 1}: trainers, {dense_parameters} dense parameters "
        f"on {args.device}, DDP over {backend}\n"
        f"rank {args.trainers} to {last - 1}: parameter servers, "
        f"a table of {args.embeddings} × {args.embedding_dim} each\n"
        f"rank {last}: master; RPC over TensorPipe (TCP); "
        f"all meet at {args.master_addr} port {args.master_port}\n"
        f"{args.steps} steps are measured, after {args.warmup} to warm up; an epoch is 10 steps"
    )


def watch(context: mp.ProcessContext, store: dist.TCPStore, received: list, args) -> None:
    """Return when all processes have ended well.

    Ends this process after a signal, or when the master's heart no longer beats; raises torch's
    exception when a process has failed.
    """
    beats = 0
    since = time.monotonic()
    # When one has failed join() ends the others, and kills what does not respond for a second.
    while not context.join(timeout=1, grace_period=1):
        if received:
            if received[0] == signal.SIGINT:
                sys.exit("interrupted")
            sys.exit(128 + signal.SIGTERM)
        count = store.add("heartbeat", 0)
        if count != beats:
            beats = count
            since = time.monotonic()
        elif beats and time.monotonic() - since > args.timeout:
            missing = f"no sign of life from master (rank {args.trainers + args.servers})"
            sys.exit(f"error: --timeout {args.timeout:g} s are over: {missing}")
        if not beats:  # the master shows what comes later
            everybody = args.trainers + args.servers + 1
            there, waited = store.add("started", 0), time.monotonic() - since
            progress(f"{there} of {everybody} processes have started, after {waited:.0f} s")


def exit_naming(rank: int, cause: str, args) -> None:
    """End this process; the message says which of the others failed, and how."""
    name = role(rank, args.trainers, args.servers)
    sys.exit(f"error: {name} (rank {rank}) {cause}; all other processes were ended")


# The side of the spawned processes.


def run_process(rank: int, args, head: dict, master) -> None:
    """A spawned process: join in this rank's role, serve until the master is done, leave."""
    sys.stdout.reconfigure(errors="replace")  # ? where the output's encoding lacks a character
    threading.Thread(target=end_with_launcher, daemon=True).start()
    # Off the screen: torch deprecates what its own RPC and DistributedOptimizer are made of.
    logging.captureWarnings(True)
    torch.set_num_threads(head["threads_per_rank"])
    name = role(rank, args.trainers, args.servers)
    connect(args).add("started", 1)
    join(rank, name, args, head["backend"])
    if name == "master":
        threading.Thread(target=beat, args=(connect(args),), daemon=True).start()
        try:
            master(args, head)
        except RuntimeError as error:
            if "imed out" in str(error) or "timeout" in str(error):
                name_the_missing(args, error)
            raise
        finally:
            progress()
    rpc.shutdown()
    if rank < args.trainers:
        dist.destroy_process_group()
    # All is said and left. To clear the interpreter away would take a second of CPU time, times 17
    # on two cores.
    os._exit(0)


def end_with_launcher() -> None:
    """A process never outlives the launcher, even if that was killed."""
    mp.parent_process().join()
    os._exit(1)


def connect(args) -> dist.TCPStore:
    """A connection to the launcher's store."""
    timeout = timedelta(seconds=min(args.timeout, 1e6))
    return dist.TCPStore(args.master_addr, args.master_port, is_master=False, timeout=timeout)


def join(rank: int, name: str, args, backend: str) -> None:
    """Join the trainers' process group, if this is one of them, and the RPC world."""
    world_size = args.trainers + args.servers + 1
    timeout = timedelta(seconds=min(args.timeout, 1e6))
    if rank < args.trainers:
        with without_gloo_greeting():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("trainers", connect(args)),
                rank=rank,
                world_size=args.trainers,
                timeout=timeout,
            )

    def launchers_store(url, **_):
        yield connect(args), rank, world_size

    dist.register_rendezvous_handler("launcher", launchers_store)
    # A trainer has one thread that trains and others that take the answers. A server has one in
    # all, so that updates of one table by several trainers follow one another: the optimizer takes
    # no lock.
    threads = 4
    if name.startswith("ps"):
        threads = 1
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="launcher://",
        num_worker_threads=threads,
        rpc_timeout=timeout.total_seconds(),
        # Plain TCP. What torch adds to it on one host (shared memory, 16 more connections per pair)
        # took more CPU time with messages as small as these.
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def beat(store: dist.TCPStore) -> None:
    """The master's sign of life, counted in the launcher's store."""
    with suppress(RuntimeError):  # when the launcher is gone, and in a moment this process, too
        while True:
            store.add("heartbeat", 1)
            time.sleep(1)


def name_the_missing(args, error: RuntimeError) -> None:
    """Runs on the master when somebody has waited too long: ask all for a sign of life.

    Ends the master; its message says who gave none.
    """
    signs = {}
    for rank in range(args.trainers + args.servers):
        name = role(rank, args.trainers, args.servers)
        signs[name] = rpc.rpc_async(name, os.getpid, timeout=5)
    missing = []
    for name, sign in signs.items():
        try:
            sign.wait()
        except RuntimeError:
            missing.append(name)
    place = "an all-reduce of the trainers"
    if "RPC ran for" in str(error):
        place = "an answer by RPC"
    silent = ", ".join(missing) or "nobody: all answer again"
    sys.exit(
        f"error: --timeout {args.timeout:g} s are over: somebody has waited for {place} in vain; "
        f"no sign of life from {silent}"
    )
