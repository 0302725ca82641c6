"""Starts, watches and ends the processes of ddp_rpc.py, on this host.

The ranks are the trainers, then the parameter servers, then the master. All join one RPC world, the
trainers a process group besides, and the master alone acts by itself: the others do what they are
called for. The launcher has no rank. It holds the store by which all find each other, on a free
port. When a process dies, or on Ctrl-C or SIGTERM, it ends all and says why.

A process that is there but does not answer is named, too. An RPC or an all-reduce that waits for it
fails after --timeout seconds, and the master then asks all for a sign of life. Nobody waits for the
master while the trainers train, so it counts heartbeats in the store, which the launcher watches.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import rpc

from common.setup import progress, without_gloo_greeting

HOST = "127.0.0.1"


def names_of_ranks(trainers: int, servers: int) -> list[str]:
    """The RPC name of each rank: the trainers, then the parameter servers, then the master."""
    names = [f"trainer{i}" for i in range(trainers)]
    names += [f"ps{i}" for i in range(servers)]
    return [*names, "master"]


def run(args, begin, master) -> None:
    """Start all processes, and return when the master is done and all have left.

    begin(args) is called before they start: it says what runs, and returns a result.
    master(args, names, result) is called on the last rank; it is a function of a module, so that a
    new process finds it. Ends this process with a message if one of the others fails.
    """
    store = listen(args)
    names = names_of_ranks(args.trainers, args.servers)
    signals = note_signals()
    result = begin(args)
    progress(f"starting {len(names)} processes")
    context = None
    try:
        context = start(run_process, (names, args, result, master), len(names))
        watch(context, store, signals, args)
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        rank = error.error_index
        failed = f"error: {names[rank]} (rank {rank}) failed; all other processes were ended"
        sys.exit(f"{str(error).strip()}\n{failed}")
    finally:
        left = mp.active_children()
        for process in left:  # all, before any of them complains about another
            process.kill()
        for process in left:
            process.join()
        end_forkserver()
        progress()
        if context:
            for file in context.error_files:  # torch's, in which ranks leave their tracebacks
                Path(file).unlink(missing_ok=True)


def listen(args) -> dist.TCPStore:
    """The store, on a socket of our own: torch's would listen on every interface.

    Sets args.port.
    """
    listener = socket.create_server((HOST, 0))
    args.port = listener.getsockname()[1]
    # RPC, gloo and nccl listen there, too.
    interfaces = [name for _, name in socket.if_nameindex()]
    loopback = next(name for name in interfaces if name.startswith("lo"))
    for library in ("TP", "GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = loopback
    return dist.TCPStore(
        HOST, args.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def note_signals() -> list[int]:
    """From now on Ctrl-C and SIGTERM only put their number into the list that is returned.

    An exception while a process is half started would leave that process behind.
    """
    signals = []

    def note(number, frame):
        signals.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return signals


def start(function, arguments: tuple, processes: int) -> mp.ProcessContext:
    """Start the processes. On Linux they are forked from one that has imported torch.

    With two cores that is seconds for 17 processes, and not half a minute. macOS has libraries that
    do not bear it.
    """
    method = "spawn"
    if sys.platform == "linux":
        method = "forkserver"
        mp.get_context(method).set_forkserver_preload(["torch", "torch.distributed.optim", "numpy"])
    # torch would name every process that it ends.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # Ctrl-C reaches every process of the terminal: the new ones inherit this mask, and leave it to
    # the launcher. multiprocessing's own tracker would undo it when it starts, so it starts before.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    context = mp.start_processes(function, arguments, processes, join=False, start_method=method)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def end_forkserver() -> None:
    """End the process that the others were forked from.

    It would end by itself, but clearing torch away takes it a second, and on a busy machine many.
    Python has no public name for this; its own tests use these.
    """
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def watch(context: mp.ProcessContext, store: dist.TCPStore, signals: list, args) -> None:
    """Return when all processes have ended well.

    Ends this process after a signal, or when the master's heart no longer beats; raises torch's
    exception when a process has failed.
    """
    beats = 0
    last_beat = time.monotonic()
    # When one has failed join() ends the others, and kills what does not respond for a second.
    while not context.join(timeout=1, grace_period=1):
        if signal.SIGINT in signals:
            sys.exit("interrupted")
        if signals:
            sys.exit(128 + signal.SIGTERM)
        count = store.add("heartbeat", 0)
        if count != beats:
            beats = count
            last_beat = time.monotonic()
        elif beats and time.monotonic() - last_beat > args.timeout:
            missing = f"no sign of life from master (rank {args.trainers + args.servers})"
            sys.exit(f"error: --timeout {args.timeout:g} s are over: {missing}")


# From here on: what runs in the started processes.


def run_process(rank: int, names: list[str], args, result: dict, master) -> None:
    """Join in this rank's role, serve until the master is done, leave."""
    threading.Thread(target=end_with_launcher, daemon=True).start()
    # Off the screen: torch deprecates what its own RPC and DistributedOptimizer are made of.
    logging.captureWarnings(True)
    torch.set_num_threads(result["threads_per_rank"])
    with without_gloo_greeting():  # RPC has a group of gloo's, too
        if rank < args.trainers:
            join_trainers(rank, args)
        join_rpc(rank, names, args)
    if names[rank] == "master":
        threading.Thread(target=beat, args=(connect(args),), daemon=True).start()
        try:
            master(args, names, result)
        except RuntimeError as error:
            if "imed out" in str(error) or "timeout" in str(error):
                name_the_missing(names, args, error)
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
    timeout = timedelta(seconds=args.timeout)
    return dist.TCPStore(HOST, args.port, is_master=False, timeout=timeout)


def join_trainers(rank: int, args) -> None:
    """Join the process group in which DDP averages."""
    dist.init_process_group(
        args.backend,
        store=dist.PrefixStore("trainers", connect(args)),
        rank=rank,
        world_size=args.trainers,
        timeout=timedelta(seconds=args.timeout),
    )


def join_rpc(rank: int, names: list[str], args) -> None:
    """Join the RPC world, which meets at the launcher's store."""

    def launchers_store(url, **_):
        yield connect(args), rank, len(names)

    dist.register_rendezvous_handler("launcher", launchers_store)
    # A trainer has one thread that trains and others that take the answers. A server has one in
    # all, so that updates of one table by several trainers follow one another: the optimizer takes
    # no lock.
    is_server = names[rank].startswith("ps")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="launcher://",
        num_worker_threads=1 if is_server else 4,
        rpc_timeout=args.timeout,
        # Plain TCP. What torch adds to it on one host (shared memory, 16 more connections per pair)
        # took more CPU time with messages as small as these.
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)


def beat(store: dist.TCPStore) -> None:
    """The master's sign of life, counted in the launcher's store."""
    with suppress(RuntimeError):  # when the launcher is gone, and in a moment this process, too
        while True:
            store.add("heartbeat", 1)
            time.sleep(1)


def name_the_missing(names: list[str], args, error: RuntimeError) -> None:
    """Runs on the master when somebody has waited too long: ask all for a sign of life.

    Ends the master; its message says who gave none.
    """
    signs = {name: rpc.rpc_async(name, os.getpid, timeout=5) for name in names[:-1]}
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
