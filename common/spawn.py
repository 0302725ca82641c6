"""Start the ranks of a script that does so itself, without torchrun, and leave none behind.

01 needs another number of ranks for every part of its grid, 08 processes of three kinds. Two traps
of spawning are avoided: a spawned process sees its arguments and nothing else (an option in a
global variable never gets there), and a fixed port lets two runs on one machine collide.
"""

import logging
import os
import signal
import socket
import threading
from multiprocessing import resource_tracker
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

HOST = "127.0.0.1"
SIGNALS = [signal.SIGINT, signal.SIGTERM]


def run_ranks(world_size: int, function, *arguments, start_method: str = "spawn") -> None:
    """Call function(rank, *arguments) in a process of this host for each rank; wait for all.

    The function is at the top level of a module, because a spawned process imports it by its name.
    The environment tells init_process_group and init_rpc where the ranks meet: on loopback, at a
    port that the system has chosen. No process is left when this returns or raises:
    KeyboardInterrupt, with the signal's number, for SIGINT and SIGTERM; mp.ProcessRaisedException
    or mp.ProcessExitedException when a rank has failed.
    """
    received = []

    def note(number, frame):  # an exception would leave a process behind that is half started
        received.append(number)

    handlers = [signal.signal(number, note) for number in SIGNALS]
    listener = socket.create_server((HOST, 0))
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["MASTER_ADDR"] = HOST
    os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # all join a store that is there
    for library in ("GLOO", "NCCL", "TP"):
        os.environ[f"{library}_SOCKET_IFNAME"] = loopback
    # Torch would name every process that it ends.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # Ctrl-C reaches every process of the terminal: the new ones inherit this mask until they bear
    # it. Python's tracker, which comes with spawn, would undo it when it starts, so it is first.
    if start_method == "spawn":
        resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    options = {"join": False, "daemon": True, "start_method": start_method}
    ranks = mp.start_processes(start_rank, (function, arguments), world_size, **options)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        # Only now: a store has threads, and where processes are forked no thread should be there.
        options = {"is_master": True, "wait_for_workers": False}
        port, descriptor = listener.getsockname()[1], listener.detach()
        store = dist.TCPStore(HOST, port, master_listen_fd=descriptor, **options)
        while not received and not ranks.join(timeout=0.5, grace_period=0):
            pass
        del store
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        if not received:  # else Ctrl-C has ended them, too
            raise
    finally:
        for process in ranks.processes:  # all, before any of them complains about another
            process.kill()
        for process in ranks.processes:
            process.join()
        for file in ranks.error_files:  # torch's own, in which a rank leaves its traceback
            Path(file).unlink(missing_ok=True)
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt(received[0])


def start_rank(rank: int, function, arguments: tuple) -> None:
    """In the started process, which a signal ends without a word."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=end_with_parent, daemon=True).start()
    function(rank, *arguments)


def end_with_parent() -> None:
    """A rank never outlives the process that started it, even if that was killed."""
    mp.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)
