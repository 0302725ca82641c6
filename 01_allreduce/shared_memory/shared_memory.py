"""01: an all-reduce for the ranks of one host, through memory that all of them see.

gloo carries every byte through a socket, even to a neighbour on the same host: into the kernel and
out again. Ranks of one host can do without, because the system lets processes share memory. That
is what MPI does within a host, and nccl between the GPUs of one. SharedMemoryAllReduce does it in
four moves. A tensor goes through in pieces; for each piece every rank

    1. copies it into its slot of the shared memory, without its own part, and says so;
    2. waits for the others and adds what they brought for its part, the r-th of n: reduce-scatter;
    3. copies the sum of its part into the slot of the sums, and says so;
    4. waits for the others and copies their parts out of that slot: all-gather.

A piece is so small that all of this happens in the processor's cache: main memory is read once and
written once. There are two sets of slots, so that a rank brings the next piece before it waits.

    all_reduce = SharedMemoryAllReduce()      # on every rank, after init_process_group
    all_reduce(tensor)                        # the sum over all ranks, in place

The script verifies it, and measures it as `shared` in the grid of allreduce.py, whose flags it has:

    make 01_allreduce/shared_memory                                   (about four minutes)
    python 01_allreduce/shared_memory/shared_memory.py --sizes-mb 1,10 --nproc 2       (seconds)

Source: the shared-memory collectives of MPI libraries; Graham and Shipman, "MPI support for
multi-core architectures: optimized shared memory collectives", EuroPVM/MPI 2008.
"""

import fcntl
import mmap
import os
import platform
import socket
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

PART_BYTES = 2**19  # of a piece, per rank; smaller: waiting costs more; larger: it leaves the cache
LINE = 128  # bytes from flag to flag: each has a cache line of its own, on Apple's processors too
BROKEN = 0  # the place of a byte that is set when a call has failed
NONCE = slice(16, 32)  # the place of random bytes that tell this memory from any other
YIELDS = 50  # so often a waiting rank offers its core to others before it begins to sleep
STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class SharedMemoryAllReduce:
    """Sums tensors over all ranks of a group that share a host: call it like a function.

    Constructing it is a collective: every rank of the group does it, with the same piece_bytes, a
    multiple of 64 (0: half a megabyte per rank, 4 MB at most). The group may be of any backend.
    RuntimeError on all ranks if they are not all on one host. The memory, (2 n + 2) · piece_bytes
    for n ranks, goes when the last rank ends or lets go of the object: there is nothing to close,
    and nothing stays behind, whoever is killed. (But off Linux, if all ranks are killed in the
    milliseconds before they have opened it: then a file stays in the temporary folder.)

    A call takes a contiguous CPU tensor of any shape, length and dtype that can be added, the same
    on every rank, and sums it in place; all ranks get the same bits. Any other tensor is a
    RuntimeError before anything is written: if all ranks have it, the next call works. If a rank
    doesn't come within `timeout` seconds, because it has died or is elsewhere, or comes with
    another tensor, or for another call, the others get a RuntimeError. The object is then of no
    more use, and says so to every rank that calls it.

    **How a rank says something.** By a count of its own in the shared memory: a single byte, which
    cannot be read half-written, modulo 256. No rank is ever more than three steps ahead of another.
    That the count is seen later than what it announces needs an order of stores and of loads. x86
    keeps both. ARM does not, so there `fence` takes and gives back a file lock that all ranks
    share, between the data and the count, and again between reading the count and the data. Two
    ranks that take the same lock are in an order: if the reader were first, it could not have seen
    the count. Python's interpreter adds no reordering, because each step is a call of its own.
    """

    def __init__(self, process_group=None, piece_bytes: int = 0, timeout: float = 300.0):
        if piece_bytes < 0 or piece_bytes % 64 != 0:
            raise ValueError(f"piece_bytes={piece_bytes} is not a multiple of 64")
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.timeout = timeout
        piece_bytes = piece_bytes or PART_BYTES * min(self.world_size, 8)
        lines = (self.world_size + 1) * LINE  # the first one is for all ranks
        slots = self.world_size + 1  # the last one is for the sums
        self.file, self.memory = open_shared_memory(lines + 2 * slots * piece_bytes, process_group)
        data = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.slots = data[lines:].view(2, slots, piece_bytes)
        self.words = data[LINE:lines].view(torch.int64).view(self.world_size, -1)
        self.calls = 0
        self.pieces = 0  # so many are done: the next one goes through the set of slots 0, 1, 0, 1 …
        self.count = 0  # so often this rank has said that something is there

    def __call__(self, tensor: torch.Tensor) -> None:
        self.calls += 1
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            needs = "SharedMemoryAllReduce needs a contiguous CPU tensor"
            raise RuntimeError(f"{needs}; .contiguous() makes one")
        flat = tensor.detach().view(-1)
        if self.world_size == 1 or len(flat) == 0:
            return
        self.check_whole()
        try:
            self.sum(flat)
        except BaseException:  # an interrupt, too: nobody knows any more who has read what
            self.memory[BROKEN] = 1
            raise

    def sum(self, flat: torch.Tensor) -> None:
        """The four moves, piece by piece."""
        slots = self.slots.view(flat.dtype)
        pieces = flat.split(slots.shape[2])
        self.words[self.rank, 1] = zlib.crc32(f"{self.calls} {len(flat)} {flat.dtype}".encode())
        brought = self.bring(pieces[0], slots[self.pieces % 2])
        for number, piece in enumerate(pieces, start=1):
            slots_of_piece = slots[self.pieces % 2]
            slots_of_next = slots[(self.pieces + 1) % 2]
            sums = slots_of_piece[-1]
            start, end = self.part(len(piece))
            my_part = piece[start:end]

            self.wait(brought)
            if number == 1:
                self.check_words()
            for rank in range(self.world_size):
                if rank != self.rank:
                    my_part.add_(slots_of_piece[rank, start:end])
            sums[start:end].copy_(my_part)
            summed = self.announce()

            if number < len(pieces):  # while the others still add
                brought = self.bring(pieces[number], slots_of_next)

            self.wait(summed)
            piece[:start].copy_(sums[:start])
            piece[end:].copy_(sums[end : len(piece)])
            self.pieces += 1

    def check_whole(self) -> None:
        if self.memory[BROKEN]:
            raise RuntimeError(
                "SharedMemoryAllReduce: a call has failed on some rank: make a new one"
            )

    def check_words(self) -> None:
        """Every rank must be in the same call, with as long a tensor of the same dtype."""
        if len(set(self.words[:, 1].tolist())) > 1:
            differ = "the ranks' tensors differ, or a rank has left out a call"
            raise RuntimeError(f"SharedMemoryAllReduce: {differ}")

    def part(self, length: int) -> tuple[int, int]:
        """Where this rank's part of a piece begins and ends; it may be empty."""
        start = self.rank * length // self.world_size
        end = (self.rank + 1) * length // self.world_size
        return start, end

    def bring(self, piece: torch.Tensor, slots: torch.Tensor) -> int:
        """Copy into this rank's slot what the others add. Returns the count that says so.

        The slot is free: what was in it was added before the sums were there that we have waited
        for since.
        """
        start, end = self.part(len(piece))
        slot = slots[self.rank]
        slot[:start].copy_(piece[:start])
        slot[end : len(piece)].copy_(piece[end:])
        return self.announce()

    def announce(self) -> int:
        """Tell the others that one thing more is there. Returns the count that says so."""
        self.fence()
        self.count += 1
        self.memory[(1 + self.rank) * LINE] = self.count % 256
        return self.count

    def wait(self, count: int) -> None:
        """Until every rank has counted that far.

        There may be fewer cores than ranks: who waits offers its core to the others, and soon
        sleeps for a tenth of what it has waited.
        """
        for rank in range(self.world_size):
            flag = (1 + rank) * LINE
            tries = 0
            while (self.memory[flag] - count) % 256 > 127:  # still behind
                self.check_whole()
                tries += 1
                if tries == 1:
                    began = time.monotonic()
                if tries <= YIELDS:
                    os.sched_yield()
                    continue
                waited = time.monotonic() - began
                if waited > self.timeout:
                    who = f"rank {self.rank} timed out: it waited {self.timeout:g} s for"
                    raise RuntimeError(f"SharedMemoryAllReduce: {who} rank {rank}")
                time.sleep(min(waited / 10, 1e-3))
        self.fence()

    def fence(self) -> None:
        """No load or store passes this line, as far as ranks are concerned that call it too."""
        if not STORES_IN_ORDER:
            fcntl.flock(self.file, fcntl.LOCK_SH)
            fcntl.flock(self.file, fcntl.LOCK_UN)


def open_shared_memory(size: int, process_group=None) -> tuple:
    """(file, mmap) of the same `size` bytes, all 0, in every rank of a group. A collective.

    RuntimeError on every rank if one of them cannot have it. On Linux this memory never has a name:
    the others reach it as a file that rank 0 has open. Elsewhere it is a file in the folder for
    temporary files, which every rank removes as soon as all have it open or one has failed. The
    same path may lead to another file, where ranks have containers of their own: so rank 0 tells
    which file it is, and what is in it.
    """
    is_first = dist.get_rank(process_group) == 0
    nameless = hasattr(os, "memfd_create")
    path = os.path.join(tempfile.gettempdir(), f"all-reduce-{uuid.uuid4().hex}")
    nonce = uuid.uuid4().bytes

    def create():
        if not is_first:
            return None
        if nameless:
            new = os.fdopen(os.memfd_create("all-reduce"), "r+b")
        else:
            new = open(path, "x+b")
        new.write(bytes(size))  # has the memory now, or fails now, and not in a later call
        new.seek(NONCE.start)
        new.write(nonce)
        new.flush()
        return new

    def join():
        if len({(host, size) for *_, host, size in proposals}) > 1:
            raise OSError("not all ranks are on one host, or want the same size")
        opened = file
        if not is_first:
            if which(os.stat(path)) != expected_file:
                raise OSError(f"{path} is another file for this rank")
            opened = open(path, "r+b")
        memory = mmap.mmap(opened.fileno(), size)
        if memory[NONCE] != expected_nonce:
            raise OSError(f"{path} has another content for this rank")
        return opened, memory

    try:
        file = together(create, process_group)
        identity = None
        if is_first:
            identity = which(os.fstat(file.fileno()))
            if nameless:
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        proposals = [None] * dist.get_world_size(process_group)
        mine = path, identity, nonce, socket.gethostname(), size
        dist.all_gather_object(proposals, mine, process_group)
        path, expected_file, expected_nonce, _, _ = proposals[0]
        return together(join, process_group)
    finally:
        if not nameless:
            with suppress(OSError):
                os.unlink(path)


def which(status: os.stat_result) -> tuple[int, int]:
    """Which file it is, among all of this host."""
    return status.st_dev, status.st_ino


def together(function: Callable, process_group=None):
    """What function() returns, called on every rank; RuntimeError on all if one of them fails."""
    problem = None
    result = None
    try:
        result = function()
    except Exception as error:  # MemoryError, mmap's ValueError: the others would wait for ever
        problem = f"rank {dist.get_rank(process_group)}: {str(error) or type(error).__name__}"
    problems = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(problems, problem, process_group)
    if any(problems):
        raise RuntimeError(f"no shared memory: {'; '.join(filter(None, problems))}")
    return result


# ==================================================================================================
# Below this line: verify, the measurement beside gloo and the ring, main.

SMALL_PIECE = 4096  # bytes, so that a small tensor has many of them
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.complex64]


def verify(device: torch.device, backend: str) -> None:
    """Compare sums with torch's: empty parts, one piece and many, pieces one element off."""
    from allreduce import demonstrate, differing_sums

    from common.setup import say

    world_size = dist.get_world_size()
    floats = SMALL_PIECE // 4
    lengths = [0, 1, world_size - 1, world_size + 1, floats - 1, floats, floats + 1, 9973]
    all_reduce = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE)
    differing = differing_sums(all_reduce, lengths, DTYPES)
    if differing:
        sys.exit(f"verify: FAILED, other sums than {backend}'s of (length, dtype) {differing}")
    say(f"verify: passed, {len(lengths)} lengths of {len(DTYPES)} dtypes, bitwise {backend}'s sums")
    demonstrate(device, backend, all_reduce)


def measure_shared(device: torch.device, backend: str, *options) -> None:
    """The stage's benchmark with one algorithm more, where tensors are on the CPU."""
    from allreduce import benchmark

    more_algorithms = {}
    if backend == "gloo":
        more_algorithms["shared"] = SharedMemoryAllReduce()
    benchmark(device, backend, *options, more_algorithms)


def main():
    folder = Path(__file__).resolve().parent
    stage = folder.parent
    sys.path[:0] = [str(folder), str(stage), str(stage.parent)]
    try:
        from allreduce import read_arguments, run

        import common.setup  # noqa: F401
    except ModuleNotFoundError as error:
        files = "the repository's folder common/, and the scripts of 01_allreduce"
        sys.exit(f"error: {error}: copy {files} beside this script")

    args = read_arguments(__doc__, "shared_memory.png")
    run(args, f"{stage.name}/{folder.name}", verify, measure_shared)


if __name__ == "__main__":
    main()
