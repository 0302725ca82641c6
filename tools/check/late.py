"""The network that is late: what a call returns is NaN until the program waits for it.

So a CPU shows what otherwise only a GPU does: reading too early, writing too early, handles that
nobody waits for. `make check` runs on it. It is a backend of torch.distributed, over gloo.
"""

import random
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from slow_network import DelayedWork, ProcessGroupOverGloo, gloo_carried_by, tensors_in
from torch.utils._pytree import tree_map

LONGEST_DELAY = 0.002  # seconds; each rank and call has its own, from 0 on
IN_TIME = ("barrier", "recv_anysource")  # these stay gloo's own


class LateWork(DelayedWork):
    """Makes a call on private copies of its tensors, which wait() or a future delivers.

    Until then the outputs hold NaN. wait() raises RuntimeError if a tensor of the call was written
    to meanwhile.
    """

    def __init__(self, group, name: str, arguments, options):
        super().__init__()
        outputs, inputs = (tensors_in(argument) for argument in arguments[:2])
        is_root = getattr(arguments[-1], "rootRank", None) == group.rank()
        if name == "send" or (name == "broadcast" and is_root):
            outputs, inputs = [], outputs  # it is only read
        copies = {id(tensor): tensor.detach().clone() for tensor in outputs + inputs}
        of_copies = tree_map(lambda leaf: copies.get(id(leaf), leaf), arguments)
        self.gloos_work = getattr(group.gloo, name)(*of_copies, **options)
        self.tensors = tensors_in(arguments[0])
        self.results = [(tensor, copies[id(tensor)]) for tensor in outputs]
        for tensor in outputs:
            if tensor.is_floating_point():
                tensor.data.fill_(torch.nan)  # .data: autograd's version stays
        # The version of a part of a buffer counts what is written to any part.
        whole = [t for t in outputs + inputs if t.nbytes == t.untyped_storage().nbytes()]
        self.versions = [(tensor, tensor._version) for tensor in whole]
        self.delivered_at = time.monotonic() + LONGEST_DELAY * group.delays.random()
        self.delivery = threading.Lock()  # a future may deliver while somebody waits

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.gloos_work.wait(timeout)
        time.sleep(max(0.0, self.delivered_at - time.monotonic()))
        with self.delivery:
            written = [tensor for tensor, version in self.versions if tensor._version != version]
            for tensor, result in self.results:
                tensor.data.copy_(result)
            self.versions, self.results = [], []
        if written:
            shape = tuple(written[0].shape)
            raise RuntimeError(f"a tensor {shape} was written to while its call was under way")
        return True

    def is_completed(self) -> bool:
        """Wait, and return True: who asks until it is True asks once."""
        return self.wait()


class LateProcessGroup(ProcessGroupOverGloo):
    """Makes gloo's calls, each a LateWork."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        super().__init__(store, rank, world_size, timeout)
        self.delays = random.Random(rank)

    def launch(self, name: str, *arguments, **options) -> dist.Work:
        if name in IN_TIME:
            return getattr(self.gloo, name)(*arguments, **options)
        return LateWork(self, name, arguments, options)


def late_network():
    """Return a context in which every group over gloo is late."""
    return gloo_carried_by("late", LateProcessGroup)
