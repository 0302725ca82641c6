"""torchrun with a short end: what the failed rank has said, or one line, instead of forty.

python -m tools.torchrun --standalone --nproc-per-node 2 05_bucketed/bucketed.py
"""

import logging
import os
import signal
import sys

# With these, importing torch would pin this process, and so all ranks, to a core.
for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
    os.environ.pop(name, None)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from the seconds that imports take

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import api, errors

from common.setup import OF_TORCHRUN, progress, threads_per_rank


class Ended(api.SignalException):
    """A signal that torchrun hands on, always as SIGTERM: Python answers SIGINT by a traceback."""

    def __init__(self, message: str, sigval: signal.Signals):
        super().__init__(message, signal.SIGTERM)
        self.heard = sigval


def main() -> None:
    for name in list(os.environ):  # left by a pod or another job, torchrun takes them for its flags
        if name in OF_TORCHRUN or name.startswith("PET_"):
            del os.environ[name]
    arguments = ["--log-dir", os.devnull, *sys.argv[1:]]
    if "--standalone" in arguments:
        arguments = ["--local-addr", "127.0.0.1", *arguments]  # the host's name may not resolve
    ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(ranks)))
    logging.disable()
    api.SignalException = Ended
    try:
        run.main(arguments)
    except Ended as end:
        progress()
        if end.heard == signal.SIGINT:
            print("interrupted", file=sys.stderr)
        sys.exit(128 + end.heard)
    except errors.ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # else the rank has said why
            name = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was ended by {name}, then all others", file=sys.stderr)
        sys.exit(abs(failure.exitcode))


if __name__ == "__main__":
    main()
