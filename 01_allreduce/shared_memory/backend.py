"""01: a backend of our own for torch.distributed, `shared`: through memory, and not sockets.

A backend is the object that torch.distributed hands every collective to. gloo, nccl and MPI have
theirs in C++; this one is a page of Python around the three collectives of shared_memory.py. What
it cannot do itself it hands on to a gloo group inside. torch's own DDP runs over it, too.

    import backend                                      # registers it
    dist.init_process_group("shared")                   # or dist.new_group(backend="shared")

    make 05_bucketed BACKEND=shared                     # a script that knows nothing of it

Source: torch.distributed, Backend.register_backend.
"""

import queue
import sys
import threading
import weakref
from concurrent.futures import Future
from datetime import timedelta
from functools import partialmethod
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from shared_memory import SharedMemory  # noqa: E402

SUM = dist.ReduceOp.SUM
MEAN = dist.ReduceOp.AVG
SECONDS_TO_FINISH = 1.0  # for calls that are under way when a group is destroyed
# Beside backward each meeting of the ranks costs a turn on a core: larger pieces than alone.
PIECE_BYTES = 4 * 2**20
YIELDS = 3  # and a thread that waits sleeps soon


class SharedWork(dist.Work):
    """A collective on its way. Its caller goes on computing, and waits when it needs the result."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self.tensors = tensors  # they must outlive the call
        self.outcome = Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until it is done; raises what went wrong. Ctrl-C is heard meanwhile."""
        self.outcome.result(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self.outcome.done()

    def get_future(self) -> torch.futures.Future:
        """For DDP and its hooks. It is completed by a thread of its own.

        What a hook does then may be a collective that it waits for: the thread that makes the calls
        would wait for itself.
        """
        future = torch.futures.Future()

        def complete():
            if error := self.outcome.exception():
                future.set_exception(error)
            else:
                future.set_result(self.tensors)

        def begin(_):
            threading.Thread(target=complete, daemon=True).start()

        self.outcome.add_done_callback(begin)
        return future


class SharedProcessGroup(dist.ProcessGroup):
    """All-reduce, all-gather and reduce-scatter through memory, for ranks of one host.

    A thread makes the calls, in their order, while the caller computes: torch's kernels let go of
    Python's lock, and so does backward. A call that fails on some rank fails on all, and makes the
    group useless.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        super().__init__(rank, world_size)
        self.gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)  # for what torch's C++ does without asking this class
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), kind, self.gloo)
        self.collectives = 0  # so many have begun; torch sees none of them
        self.memory = None
        self.calls = queue.SimpleQueue()
        self.last = None  # the outcome of the call that was made last
        try:
            seconds = timeout.total_seconds()
            self.memory = SharedMemory(store, rank, world_size, PIECE_BYTES, seconds)
        except RuntimeError:  # on all ranks: they are not on one host
            return
        self.memory.yields = YIELDS
        worker = threading.Thread(target=make_calls, args=(self.calls,), daemon=True)
        worker.start()
        weakref.finalize(self, end, self.calls, self.memory, worker)  # at the latest at exit

    def launch(self, tensors: list[torch.Tensor], call, *arguments) -> SharedWork:
        self.collectives += 1
        work = SharedWork(tensors)
        self.last = work.outcome
        self.calls.put((work, call, arguments))
        return work

    @torch._disable_dynamo  # torch.compile must not look into a group that torch calls meanwhile
    def by_gloo(self, name: str, *arguments, **options) -> dist.Work:
        """What is called later happens later; only send and receive may come between."""
        self.collectives += 1
        if self.last and not name.startswith(("send", "recv")):
            self.last.exception()  # waits, and raises nothing
        return getattr(self.gloo, name)(*arguments, **options)

    def can_do(self, output: torch.Tensor, tensor: torch.Tensor, operation) -> bool:
        """Or it is gloo's: CUDA, several hosts, other operations, whatever is wrong."""
        dtype = tensor.dtype
        if self.memory is None or dtype != output.dtype or dtype == torch.bool:
            return False
        for each in (output, tensor):
            in_one_row = each.layout == torch.strided and each.is_contiguous()
            if each.device.type != "cpu" or not in_one_row:
                return False
        return operation == SUM or (operation == MEAN and dtype.is_floating_point)

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        tensor = tensors[0]
        if len(tensors) > 1 or not self.can_do(tensor, tensor, opts.reduceOp):
            return self.by_gloo("allreduce", tensors, opts)
        return self.launch(tensors, self.memory.all_reduce, tensor, opts.reduceOp == MEAN)

    def all_gather_single(self, output, tensor, opts=None):
        if not self.can_do(output, tensor, SUM):
            return self.by_gloo("_allgather_base", output, tensor, opts or dist.AllgatherOptions())
        return self.launch([output], self.memory.all_gather, output, tensor)

    def reduce_scatter_single(self, output, tensor, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        if not self.can_do(output, tensor, opts.reduceOp):
            return self.by_gloo("_reduce_scatter_base", output, tensor, opts)
        is_mean = opts.reduceOp == MEAN
        return self.launch([output], self.memory.reduce_scatter, output, tensor, is_mean)

    _allgather_base = all_gather_single  # their names before torch 2.13
    _reduce_scatter_base = reduce_scatter_single


# All others are gloo's, whatever this version of torch calls them. (The methods of ProcessGroup
# would find gloo, too, but keep Python's lock while they wait for its threads: a deadlock.)
KINDS = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")
for method in set(dir(dist.ProcessGroup)) & set(dir(dist.ProcessGroupGloo)):
    if method.startswith(KINDS) and method not in vars(SharedProcessGroup):
        setattr(SharedProcessGroup, method, partialmethod(SharedProcessGroup.by_gloo, method))


def make_calls(calls: queue.SimpleQueue) -> None:
    """The thread of a group: one call after another, until there is None."""
    while (waiting := calls.get()) is not None:
        work, call, arguments = waiting
        try:
            with torch.inference_mode():  # or it could not write into tensors made in that mode
                call(*arguments)
            work.outcome.set_result(None)
        except BaseException as error:
            work.outcome.set_exception(error)
        del waiting, work, call, arguments  # or its tensors would stay until the next call


def end(calls: queue.SimpleQueue, memory: SharedMemory, worker: threading.Thread) -> None:
    """A call that still waits for another rank ends with an error, on both."""
    calls.put(None)
    if worker is not threading.current_thread():
        worker.join(SECONDS_TO_FINISH)
        if worker.is_alive():
            memory.fail()
        worker.join()


dist.Backend.register_backend("shared", SharedProcessGroup, devices=["cpu", "cuda"])
