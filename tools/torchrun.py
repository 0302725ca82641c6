"""torchrun, with a short end: what the rank that failed has said, and one line instead of forty.

    python -m tools.torchrun --standalone --nproc-per-node 2 05_bucketed/bucketed.py

All arguments are torchrun's; --nproc-per-node must be one of them. The Makefile starts the stages
with it; any other torchrun does, too, but follows the error of a rank with a traceback of itself,
and leaves a folder for logs in the temporary one.
"""

import logging
import os
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from here on, nor while hosts meet

from torch import cuda  # noqa: E402
from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.multiprocessing import api  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402

from common.setup import TORCH_BYTES, available_memory, fail, progress, threads_per_rank  # noqa: E402


class Ended(api.SignalException):
    """What torchrun raises at a signal, to send it to the ranks, too.

    They get SIGTERM instead of Ctrl-C's SIGINT, which Python answers with a traceback, above all
    from within the seconds that importing torch takes.
    """

    def __init__(self, message: str, sigval: signal.Signals):
        super().__init__(message, signal.SIGTERM)
        self.heard = sigval


def share_cores(ranks: int) -> None:
    """Give each rank cores ÷ ranks threads; warn where ranks have to take turns on a core."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    cores = threads_per_rank(1)
    if ranks > cores and not cuda.is_available():
        print(f"warning: {ranks} ranks on {cores} cores: their times say little", file=sys.stderr)


def main() -> None:
    ranks = sys.argv[sys.argv.index("--nproc-per-node") + 1]
    if ranks.isdecimal():  # and not auto, cpu or gpu
        if int(ranks) * TORCH_BYTES > available_memory():
            fail(f"argument --nproc-per-node: '{ranks}' ranks need more memory than is left")
        share_cores(int(ranks))
    # Else it says first that it ends the other ranks, and which rank failed how.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    api.SignalException = Ended
    try:
        run.main(["--log-dir", os.devnull, *sys.argv[1:]])
    except Ended as end:
        progress()
        if end.heard == signal.SIGINT:
            print("interrupted", file=sys.stderr)
        sys.exit(128 + end.heard)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:  # the rank has said why
            sys.exit(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        sys.exit(f"error: rank {rank} was ended by {name}; all other ranks were ended")


if __name__ == "__main__":
    main()
