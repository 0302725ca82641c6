"""Start ranks on this host from plain Python, without torchrun, and leave none behind.

allreduce.py needs a different number of ranks for every part of its grid, so it starts them itself.
Two traps of spawning are avoided: a spawned rank sees its arguments and nothing else (an option in
a global variable never gets there), and a fixed port lets two runs on one machine collide.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size: int, function, backend: str, *arguments) -> None:
    """Run function(device, backend, *arguments) on world_size ranks of this host.

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
    handle, store = tempfile.mkstemp()  # the ranks meet in a file: no port to fight for
    os.close(handle)
    # Blocking is inherited, so that no rank that starts greets Ctrl-C with a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    of_start_rank = (world_size, store, function, backend, *arguments)
    ranks = mp.spawn(start_rank, of_start_rank, nprocs=world_size, join=False)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for number in signals:
            signal.signal(number, signal.default_int_handler)  # KeyboardInterrupt, for both
        if received:
            raise KeyboardInterrupt
        while not ranks.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise RuntimeError(f"a rank ended: {reason}") from None
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
        # error_files: torch's own, in which a rank leaves its traceback
        for file in [store, *ranks.error_files]:
            Path(file).unlink(missing_ok=True)


def start_rank(rank: int, world_size: int, store: str, function, backend: str, *arguments) -> None:
    """In the spawned process: join the process group, call the function, leave."""
    from common.setup import threads_per_rank, without_gloo_greeting

    os.environ["RANK"] = str(rank)  # common's say() and progress() go by it, as under torchrun
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    torch.set_num_threads(threads_per_rank(world_size))
    device = torch.device("cpu")
    device_id = None
    if backend != "gloo":  # nccl; or "gloo-cuda", gloo with CUDA tensors, where ranks share a GPU
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if backend == "nccl":
        device_id = device
    with without_gloo_greeting():
        dist.init_process_group(
            backend.removesuffix("-cuda"),
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            device_id=device_id,
        )
    try:
        function(device, backend, *arguments)
    finally:
        dist.destroy_process_group()
