"""01: an all-reduce for the ranks of one host, through memory that all of them see.

gloo carries every byte through a socket, even to a neighbour on the same host: into the kernel and
out again. Ranks of one host can do without, because the system lets processes share memory. That
is what MPI does within a host, and nccl between the GPUs of one. A tensor goes through in pieces,
and a piece has a part for every rank.

    reduce-scatter  every rank copies what it adds to the others' parts into its slot of the shared
                    memory, says so, waits for the others, and sums up its own part, the r-th of n
    all-gather      every rank copies its own part into its slot, says so, waits for the others,
                    and copies theirs

A piece is so small that all of this happens in the processor's cache: main memory is read once and
written once. So this is nearly the limit of the machine, and shows how far gloo is from it.

    all_reduce = SharedMemoryAllReduce()      # on every rank, after init_process_group
    all_reduce(tensor)                        # the sum over all ranks, in place

    make 01_allreduce/shared_memory                                   (about four minutes)
    python 01_allreduce/shared_memory/shared_memory.py --sizes-mb 1,10 --nproc 2       (seconds)

Source: the shared-memory collectives of MPI libraries; Graham and Shipman, "MPI support for
multi-core architectures: optimized shared memory collectives", EuroPVM/MPI 2008.
"""

import fcntl
import mmap
import os
import platform
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

PART_BYTES = 2**19  # of a piece, per rank; smaller: waiting costs more; larger: it leaves the cache
LINE = 128  # bytes from flag to flag: each has a cache line of its own, on Apple's processors too
FAILED = 0  # the place of a byte that is set when a call has failed
YIELDING = 1e-4  # seconds for which a rank offers its core to others before it sleeps
STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class SharedMemoryAllReduce:
    """Sum contiguous CPU tensors over the ranks of a group that share a host, in place.

    Every rank constructs it, with the same piece_bytes (0: half a megabyte per rank, 4 MB at most),
    and calls it with a tensor of the same length and dtype; all get the same bits. If a rank
    does not come within `timeout` seconds or comes with another tensor, all who wait for it get a
    RuntimeError, and all ranks from every later call.

    **How a rank says something.** By a count of its own in the shared memory: a single byte, which
    cannot be read half-written, modulo 256. No rank is ever more than one step ahead of another.
    Nobody may see the count before what it announces. x86 keeps the order of stores, and of loads.
    ARM does not, so there `_fence` takes and gives back a file lock that all ranks share, before
    the count is written and after it is read. Two ranks that take the same lock are in an order: if
    the reader were first, it could not have seen the count.
    """

    def __init__(self, process_group=None, piece_bytes: int = 0, timeout: float = 300.0):
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.others = [other for other in range(self.world_size) if other != self.rank]
        self.timeout = timeout
        piece_bytes = piece_bytes or PART_BYTES * min(self.world_size, 8)
        self.part_bytes = max(64, piece_bytes // self.world_size // 64 * 64)
        self.lines = [LINE * (1 + rank) for rank in range(self.world_size)]  # 0 is for all ranks
        beginning = LINE * (1 + self.world_size)
        size = beginning + self.world_size**2 * self.part_bytes
        self.file = open_shared_file(size, process_group)
        self.memory = mmap.mmap(self.file.fileno(), size)
        slots = torch.frombuffer(self.memory, dtype=torch.uint8, offset=beginning)
        self.slots = slots.view(self.world_size, self.world_size, self.part_bytes)
        self.calls = 0
        self.meetings = 0  # so often this rank has said that its slot is filled

    def __call__(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise RuntimeError(
                "shared memory needs a contiguous CPU tensor; .contiguous() makes one"
            )
        flat = tensor.detach().view(-1)
        self._check_whole()
        try:
            self._compare(flat)
            part_length = self.part_bytes // flat.element_size()
            for piece in flat.split(self.world_size * part_length):
                self._reduce_piece(piece.tensor_split(self.world_size))
        except BaseException:  # an interrupt, too: nobody knows any more who has read what
            self.memory[FAILED] = 1
            raise

    def _compare(self, flat: torch.Tensor) -> None:
        """Tell the others what this rank calls with; RuntimeError if they call with something else.

        Nobody writes the next call's word before all have compared: there are meetings between.
        """
        self.calls += 1
        description = f"{self.calls} {len(flat)} {flat.dtype}".encode()
        words = [slice(line + 8, line + 12) for line in self.lines]
        self.memory[words[self.rank]] = zlib.crc32(description).to_bytes(4, "big")
        self._meet()
        if len({self.memory[word] for word in words}) > 1:
            raise RuntimeError("shared memory: the ranks' tensors differ, or one left out a call")

    def _reduce_piece(self, parts) -> None:
        for rank in self.others:  # reduce-scatter
            self._slot(self.rank, rank, parts[rank]).copy_(parts[rank])
        mine = parts[self.rank]
        brought = [self._slot(rank, self.rank, mine) for rank in self.others]
        self._meet()
        for part in brought:
            mine.add_(part)
        self._slot(self.rank, self.rank, mine).copy_(mine)  # all-gather
        finished = [self._slot(rank, rank, parts[rank]) for rank in self.others]
        self._meet()
        for rank, part in zip(self.others, finished, strict=True):
            parts[rank].copy_(part)

    def _slot(self, rank: int, owner: int, part: torch.Tensor) -> torch.Tensor:
        """Where a rank's slot has room for the owner's part.

        It is free: the others' parts were read before the last meeting, the own one before the one
        that has just been.
        """
        return self.slots[rank, owner, : part.nbytes].view(part.dtype)

    def _check_whole(self) -> None:
        if self.memory[FAILED]:
            raise RuntimeError("shared memory: a call has failed on some rank: make a new one")

    def _meet(self) -> None:
        """Say that this rank's slot is filled, and wait until all others have said so."""
        self._fence()
        self.meetings += 1
        self.memory[self.lines[self.rank]] = self.meetings % 256
        for rank in self.others:
            self._wait_for(rank)
        self._fence()

    def _wait_for(self, rank: int) -> None:
        """It offers its core to the others, and soon sleeps for a tenth of what it has waited."""
        began = time.monotonic()
        before = (self.meetings - 1) % 256
        while self.memory[self.lines[rank]] == before:
            self._check_whole()
            waited = time.monotonic() - began
            if waited > self.timeout:
                raise RuntimeError(f"shared memory: rank {self.rank} timed out waiting for {rank}")
            if waited < YIELDING:
                os.sched_yield()
            else:
                time.sleep(min(waited / 10, 1e-3))

    def _fence(self) -> None:
        """No load or store passes this line, as far as ranks are concerned that call it too."""
        if not STORES_IN_ORDER:
            fcntl.lockf(self.file, fcntl.LOCK_SH)
            fcntl.lockf(self.file, fcntl.LOCK_UN)


def open_shared_file(size: int, process_group):
    """A file of so many bytes, all 0, opened by every rank; OSError where that cannot be.

    Rank 0 makes it, in /dev/shm where there is one, which is memory. As soon as all have opened it,
    it loses its name, and lives as long as somebody has it open.
    """
    is_first = dist.get_rank(process_group) == 0
    path = [None]
    if is_first:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        temporary = tempfile.NamedTemporaryFile(prefix="all-reduce-", dir=folder)
        temporary.write(bytes(size))  # have the memory now: a call that finds none would be killed
        temporary.flush()
        path = [temporary.name]
    dist.broadcast_object_list(path, group=process_group, group_src=0)
    file = open(path[0], "r+b")
    dist.barrier(process_group)
    if is_first:
        temporary.close()
    return file


# ==================================================================================================
# Below this line: the measurement beside gloo and the ring, main.


def show(device: torch.device) -> None:
    """A sum of small tensors of each rank, which is checked, too."""
    from allreduce import demonstrate

    demonstrate(device, SharedMemoryAllReduce())


def measure_shared(device: torch.device, *options) -> None:
    """The stage's benchmark with one algorithm more, where tensors are on the CPU."""
    from allreduce import benchmark, ring_all_reduce

    others = {}
    if device.type == "cpu":
        others = {"ring": ring_all_reduce, "shared": SharedMemoryAllReduce()}
    benchmark(device, *options, others)


def main():
    folder = Path(__file__).resolve().parent
    stage = folder.parent
    sys.path[:0] = [str(folder), str(stage), str(stage.parent)]
    try:
        from allreduce import read_arguments, run

        from common.setup import forget_launcher
    except ModuleNotFoundError as error:
        files = "the repository's folder common/, and the scripts of 01_allreduce"
        sys.exit(f"error: {error}: copy {files} beside this script")

    forget_launcher()
    args = read_arguments(__doc__, "shared_memory.png")
    run(args, f"{stage.name}/{folder.name}", show, measure_shared)


if __name__ == "__main__":
    main()
