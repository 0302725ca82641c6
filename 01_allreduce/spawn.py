"""Start ranks on this host from plain Python, without torchrun, and leave none behind.

allreduce.py needs a different number of ranks for every part of its grid, so it starts them itself.
Two traps of spawning are avoided: a spawned rank sees its arguments and nothing else (an option in
a global variable never gets there), and a fixed port lets two runs on one machine collide.
"""

import os
import signal
import socket
from multiprocessing import resource_tracker
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size: int, function, backend: str, *arguments) -> None:
    """Run function(device, *arguments) on world_size ranks of this host.

    The function must be at the top level of a module, because a spawned process imports it by its
    name. No rank is left when this returns or raises: KeyboardInterrupt for SIGINT and SIGTERM,
    RuntimeError when a rank has failed.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    received = []

    def note(number, frame):
        received.append(number)

    # Only noted at first: an exception while a rank is half started would leave that rank behind.
    for number in signals:
        signal.signal(number, note)
    # The ranks meet at a store, on a port that the system has chosen. They start before it, because
    # it has threads, and where processes are forked no thread should be there.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # Blocking is inherited, so that no rank that starts greets Ctrl-C with a traceback. With the
    # first rank Python would start this helper, too, and unblock the signals after it.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    of_start_rank = (world_size, port, function, backend, *arguments)
    ranks = mp.spawn(start_rank, of_start_rank, nprocs=world_size, join=False)
    try:
        options = {"is_master": True, "wait_for_workers": False}
        store = dist.TCPStore("127.0.0.1", port, master_listen_fd=listener.detach(), **options)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for number in signals:
            signal.signal(number, signal.default_int_handler)  # KeyboardInterrupt, for both
        if received:
            raise KeyboardInterrupt
        while not ranks.join():
            pass
        del store
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(f"a rank ended: {reason}") from None
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
        for file in ranks.error_files:  # torch's own, in which a rank leaves its traceback
            Path(file).unlink(missing_ok=True)


def start_rank(rank: int, world_size: int, port: int, function, backend: str, *arguments) -> None:
    """In the spawned process: join the process group, call the function, leave."""
    from common.setup import threads_per_rank, without_gloo_greeting

    os.environ["RANK"] = str(rank)  # common's say() and progress() go by it, as under torchrun
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    torch.set_num_threads(threads_per_rank(world_size))
    device = torch.device("cpu")
    options = {"store": dist.TCPStore("127.0.0.1", port), "rank": rank, "world_size": world_size}
    if backend == "nccl":
        device = options["device_id"] = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    with without_gloo_greeting():
        dist.init_process_group(backend, **options)
    try:
        function(device, *arguments)
    finally:
        dist.destroy_process_group()
