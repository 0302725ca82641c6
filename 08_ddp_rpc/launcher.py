"""Starts, watches and ends the processes of ddp_rpc.py, on this host.

The ranks are the trainers, then the parameter servers, then the master. All join one RPC world, the
trainers a process group besides, and the master alone acts by itself: the others do what they are
called for. The launcher has no rank. It holds the store by which all find each other, on a free
port. When a process dies, or on Ctrl-C or SIGTERM, it ends all and says why.
"""

import logging
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import rpc

from common.setup import progress, threads_per_rank, without_gloo_greeting

HOST = "127.0.0.1"


def run(args, master) -> None:
    """Start all processes, and return when the master is done and all have left.

    master(args, names) is called on the last rank, when all have joined, with the RPC names of all.
    It is a function of a module, so that a spawned process finds it. Ends this process with a
    message if one of the others fails.
    """
    names = [f"trainer{i}" for i in range(args.trainers)]
    names += [f"ps{i}" for i in range(args.servers)]
    names.append("master")
    signals = []

    def note(number, frame):  # an exception would leave a process behind that is half started
        signals.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    listener = listen()
    progress(f"starting {len(names)} processes")
    error_files = []
    failure = None
    try:
        ranks = start(run_rank, (names, args, master), len(names), args.device)
        error_files = ranks.error_files  # torch's, in which ranks leave their tracebacks
        store = hold_store(listener)
        # When one has failed join() ends the others.
        while not signals and not ranks.join(timeout=0.5, grace_period=0):
            pass
        del store
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        rank = error.error_index
        failed = f"error: {names[rank]} (rank {rank}) failed; all other processes were ended"
        failure = f"{str(error).strip()}\n{failed}"
    finally:
        left = mp.active_children()
        for process in left:  # all, before any of them complains about another
            process.kill()
        for process in left:
            process.join()
        progress()
        for file in error_files:
            Path(file).unlink(missing_ok=True)
    if signals:
        sys.exit("interrupted" if signal.SIGINT in signals else 128 + signal.SIGTERM)
    if failure:
        sys.exit(failure)


def listen() -> socket.socket:
    """Listen for the ranks, which inherit where. Torch's own socket would take every interface."""
    listener = socket.create_server((HOST, 0))
    os.environ["MASTER_ADDR"] = HOST
    os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
    # As under torchrun: all ranks are clients of a store that is there.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # RPC, gloo and nccl listen on loopback, too.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for library in ("TP", "GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = loopback
    return listener


def start(function, arguments: tuple, processes: int, device: str) -> mp.ProcessContext:
    """Start the processes. On Linux they are forked from this one, which has imported torch.

    With two cores that is a second for 17 processes, and not half a minute. Neither CUDA nor some
    libraries of macOS bear it.
    """
    method = "fork" if sys.platform == "linux" and device == "cpu" else "spawn"
    # torch would name every process that it ends.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # Ctrl-C reaches every process of the terminal: the new ones inherit this mask until they bear
    # it. The tracker that comes with spawn would undo it when it starts, so it is first.
    if method == "spawn":
        resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    ranks = mp.start_processes(function, arguments, processes, join=False, start_method=method)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return ranks


def hold_store(listener: socket.socket) -> dist.TCPStore:
    """The store, for which ranks already wait: it has threads, with which one should not fork."""
    options = {"is_master": True, "wait_for_workers": False}
    port = listener.getsockname()[1]
    return dist.TCPStore(HOST, port, master_listen_fd=listener.detach(), **options)


# From here on: what runs in the started processes.


def run_rank(rank: int, names: list[str], args, master) -> None:
    """Join in this rank's role, serve until the master is done, leave."""
    # A signal ends a rank without a word: Ctrl-C, too, which Linux sends when the launcher is gone.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=end_with_launcher, daemon=True).start()
    # Off the screen: torch deprecates what its own RPC and DistributedOptimizer are made of.
    logging.captureWarnings(True)
    torch.set_num_threads(threads_per_rank(len(names) - 1))  # the master only waits
    is_trainer = rank < args.trainers
    with without_gloo_greeting():  # RPC has a group of gloo's, too
        if is_trainer:
            limit = timedelta(seconds=args.timeout)
            dist.init_process_group(
                args.backend, rank=rank, world_size=args.trainers, timeout=limit
            )
        join_rpc(rank, names, args.timeout)
    if names[rank] == "master":
        try:
            master(args, names)
        except RuntimeError as error:
            if "imed out" in str(error) or "timeout" in str(error):
                name_the_missing(names, args.timeout)
            raise
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


def end_with_launcher() -> None:
    """A process never outlives the launcher, even if that was killed."""
    mp.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


def join_rpc(rank: int, names: list[str], timeout: float) -> None:
    """Join the RPC world of all ranks."""
    # A trainer has one thread that trains and others that take the answers. A server has one in
    # all, so that updates of one table by several trainers follow one another: the optimizer takes
    # no lock.
    is_server = names[rank].startswith("ps")
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=1 if is_server else 4,
        rpc_timeout=timeout,
        # Plain TCP. What torch adds to it on one host (shared memory, 16 more connections per pair)
        # took more CPU time with messages as small as these.
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)


def name_the_missing(names: list[str], timeout: float) -> None:
    """End the master, after somebody has waited too long, with the names of all who are silent."""
    signs = {name: rpc.rpc_async(name, os.getpid, timeout=5) for name in names[:-1]}
    missing = []
    for name, sign in signs.items():
        try:
            sign.wait()
        except RuntimeError:
            missing.append(name)
    silent = ", ".join(missing) or "nobody: all answer again"
    sys.exit(f"error: --timeout {timeout:g} s are over; no sign of life from {silent}")
