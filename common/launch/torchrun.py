"""torchrun, with a short end: what the rank that failed has said, and one line instead of forty.

    python -m common.launch.torchrun --standalone --nproc-per-node 2 05_bucketed/bucketed.py

All arguments are torchrun's; --nproc-per-node must be one of them. The Makefile starts the stages
with it; any other torchrun does, too, but follows the error of a rank with a traceback of itself.
"""

import logging
import os
import signal
import sys

import torch

from common.setup import check_memory, threads_per_rank


def share_cores(ranks: int) -> None:
    """Give each rank cores ÷ ranks threads; warn where ranks have to take turns on a core."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    cores = threads_per_rank(1)
    if ranks > cores and not torch.cuda.is_available():
        print(f"warning: {ranks} ranks on {cores} cores: their times say little", file=sys.stderr)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C is not heard while hosts are awaited
    ranks = sys.argv[sys.argv.index("--nproc-per-node") + 1]
    if ranks.isdecimal():  # and not auto, cpu or gpu
        check_memory(int(ranks))  # in a second, before a rank is started
        share_cores(int(ranks))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Else it says first that it ends the other ranks, and which rank failed how.
    for name in (
        "torch.distributed.elastic.multiprocessing.api",
        "torch.distributed.elastic.agent.server.api",
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run.main()
    except SignalException as interruption:
        sys.exit(128 + interruption.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:  # the rank has said why
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        sys.exit(f"error: rank {rank} was ended by {name}; all other ranks were ended")


if __name__ == "__main__":
    main()
