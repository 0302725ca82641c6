"""01: collectives for the ranks of one host, through memory that all of them see.

gloo carries every byte through a socket, even to a neighbour on the same host: into the kernel and
out again. Ranks of one host can do without, because the system lets processes share memory. That
is what MPI does within a host, and nccl between the GPUs of one. SharedMemory does it in two
moves. A tensor goes through in pieces, and a piece has a part for every rank.

    reduce-scatter  every rank copies what it adds to the others' parts into its slot of the shared
                    memory, says so, waits for the others, and sums up its own part, the r-th of n
    all-gather      every rank copies its own part into its slot, says so, waits for the others,
                    and copies theirs

One after the other they are an all-reduce. A piece is so small that all of this happens in the
processor's cache: main memory is read once and written once.

    all_reduce = SharedMemoryAllReduce()      # on every rank, after init_process_group
    all_reduce(tensor)                        # the sum over all ranks, in place

    make 01_allreduce/shared_memory                                   (about four minutes)
    python 01_allreduce/shared_memory/shared_memory.py --sizes-mb 1,10 --nproc 2       (seconds)

Source: the shared-memory collectives of MPI libraries; Graham and Shipman, "MPI support for
multi-core architectures: optimized shared memory collectives", EuroPVM/MPI 2008.
"""

import fcntl
import itertools
import mmap
import os
import platform
import sys
import tempfile
import time
import zlib
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PART_BYTES = 2**19  # of a piece, per rank; smaller: waiting costs more; larger: it leaves the cache
LINE = 128  # bytes from flag to flag: each has a cache line of its own, on Apple's processors too
FAILED = 0  # the place of a byte that is set when a call has failed
YIELDS = 50  # so often a waiting rank offers its core to others before it begins to sleep
STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class SharedMemory:
    """All-reduce, reduce-scatter and all-gather for the ranks of a group that share a host.

    Every rank constructs it, with a store of the group and the same piece_bytes (0: half a megabyte
    per rank, 4 MB at most). RuntimeError on all ranks if one of them cannot have the memory,
    2 n · piece_bytes for n ranks. It goes when the last rank ends or lets go of the object.

    A call takes contiguous CPU tensors of any shape, length and dtype that can be added, the same
    on every rank; all ranks get the same bits. With `mean` sums are divided by n. If a rank has
    ended, does not come within `timeout` seconds, or comes with another tensor or for another call,
    all ranks get a RuntimeError, from this call and from every later one.

    **How a rank says something.** By a count of its own in the shared memory: a single byte, which
    cannot be read half-written, modulo 256. No rank is ever more than one step ahead of another.
    Nobody may see the count before what it announces. x86 keeps the order of stores, and of loads.
    ARM does not, so there `_fence` takes and gives back a file lock that all ranks share, before
    the count is written and after it is read. Two ranks that take the same lock are in an order: if
    the reader were first, it could not have seen the count.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, piece_bytes: int, timeout: float
    ):
        self.rank = rank
        self.world_size = world_size
        self.others = [other for other in range(world_size) if other != rank]
        self.timeout = timeout
        self.yields = YIELDS
        piece_bytes = piece_bytes or PART_BYTES * min(world_size, 8)
        self.part_bytes = max(64, piece_bytes // world_size // 64 * 64)
        lines = (world_size + 1) * LINE  # the first one is for all ranks
        size = lines + 2 * world_size**2 * self.part_bytes
        self.file, self.memory = open_shared_memory(size, store, rank, world_size, timeout)
        slots = torch.frombuffer(self.memory, dtype=torch.uint8, offset=lines)
        self.slots = slots.view(2, world_size, world_size, self.part_bytes)
        self.slots_of_dtype = {}  # the same, cut up: [set][rank][whose part]
        self.calls = 0
        self.meetings = 0  # so often this rank has said that its slot is filled
        self.words = []  # where each rank says which call it is in
        self.awaited = []  # parts to be copied at the next meeting: (where they are wanted, slot)

    def all_reduce(self, tensor: torch.Tensor, mean: bool = False) -> None:
        """Sum a tensor over all ranks, in place."""
        flat = in_one_row(tensor)
        with self._call("all_reduce", flat, mean):
            for piece in flat.split(self.world_size * self._part_length(flat)):
                parts = piece.tensor_split(self.world_size)
                self._reduce_scatter(parts, parts[self.rank], mean)
                self._all_gather(parts)
            self._meet()

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, mean: bool = False
    ) -> None:
        """Sum a tensor of n equal parts over all ranks, its r-th part into rank r's output."""
        result = in_one_row(output)
        parts = in_one_row(tensor).tensor_split(self.world_size)
        with self._call("reduce_scatter", result, mean):
            for mine, *piece in self._pieces_of([result, *parts]):
                self._reduce_scatter(piece, mine, mean)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy rank r's tensor into the r-th of n equal parts of the output, on all ranks."""
        mine = in_one_row(tensor)
        parts = in_one_row(output).tensor_split(self.world_size)
        with self._call("all_gather", mine):
            for own, *piece in self._pieces_of([mine, *parts]):
                piece[self.rank].copy_(own)
                self._all_gather(piece)
                self._meet()

    def fail(self) -> None:
        """Let a call that waits end with an error, and every later one, on all ranks."""
        self.memory[FAILED] = 1

    def _reduce_scatter(self, parts, result: torch.Tensor, mean: bool) -> None:
        """What all ranks add to this rank's part, summed into `result`."""
        for rank in self.others:
            self._slot(self.rank, rank, parts[rank]).copy_(parts[rank])
        total = parts[self.rank]
        brought = [self._slot(rank, self.rank, total) for rank in self.others]
        self._meet()
        for part in brought:
            total = torch.add(total, part, out=result)
        if not self.others:
            result.copy_(total)
        if mean:
            result.div_(self.world_size)

    def _all_gather(self, parts) -> None:
        """This rank's part to all others, and theirs here, at the next meeting."""
        self._slot(self.rank, self.rank, parts[self.rank]).copy_(parts[self.rank])
        self.awaited = [(parts[rank], self._slot(rank, rank, parts[rank])) for rank in self.others]

    def _slot(self, rank: int, whose: int, part: torch.Tensor) -> torch.Tensor:
        """Where a rank's slot has room for that part until the next meeting.

        It is free: it was read after the last meeting but one, and since then all have met.
        """
        slot = self.slots_of_dtype[part.dtype][self.meetings % 2][rank][whose]
        return slot if len(slot) == len(part) else slot[: len(part)]

    def _part_length(self, row: torch.Tensor) -> int:
        return self.part_bytes // row.element_size()

    def _pieces_of(self, rows) -> zip:
        """One rank's row and one of each rank, cut into pieces that have a part of each."""
        if len({(len(row), row.dtype) for row in rows}) > 1:
            needs = f"{self.world_size} parts of {len(rows[0])} elements, {rows[0].dtype}"
            raise RuntimeError(f"shared memory: it needs {needs}")
        return zip(*[row.split(self._part_length(row)) for row in rows], strict=True)

    @contextmanager
    def _call(self, kind: str, row: torch.Tensor, mean: bool = False):
        """A call, which all ranks must have in common. One that fails was the last."""
        self._check_whole()
        try:
            self.calls += 1
            self.words = [self._word(rank) for rank in range(self.world_size)]
            word = f"{self.calls} {kind} {len(row)} {row.dtype} {mean}"
            self.memory[self.words[self.rank]] = zlib.crc32(word.encode()).to_bytes(4, "big")
            if row.dtype not in self.slots_of_dtype:
                typed = self.slots.view(row.dtype)
                self.slots_of_dtype[row.dtype] = [[list(slots) for slots in one] for one in typed]
            yield
        except BaseException:  # an interrupt, too: nobody knows any more who has read what
            self.fail()
            raise

    def _word(self, rank: int) -> slice:
        """Where that rank says which call it is in; of this one and the next."""
        start = (1 + rank) * LINE + 8 * (1 + self.calls % 2)
        return slice(start, start + 4)

    def _check_whole(self) -> None:
        if self.memory[FAILED]:
            raise RuntimeError("shared memory: a call has failed on some rank: make a new one")

    def _meet(self) -> None:
        """Say that this rank's slot is filled, wait for all others, and copy what is awaited."""
        self._fence()
        self.meetings += 1
        self.memory[(1 + self.rank) * LINE] = self.meetings % 256
        for rank in self.others:
            self._wait_for(rank)
        self._fence()
        if len({self.memory[word] for word in self.words}) > 1:
            raise RuntimeError("shared memory: the ranks' tensors differ, or one left out a call")
        for wanted, part in self.awaited:
            wanted.copy_(part)
        self.awaited = []

    def _wait_for(self, rank: int) -> None:
        """It offers its core to the others, and soon sleeps for a tenth of what it has waited."""
        began = time.monotonic()
        tries = 0
        while self._is_behind(rank):
            self._check_whole()
            tries += 1
            if tries <= self.yields:
                os.sched_yield()
                continue
            waited = time.monotonic() - began
            if waited > self.timeout:
                who = f"rank {self.rank} timed out: it waited {self.timeout:g} s for"
                raise RuntimeError(f"shared memory: {who} rank {rank}")
            if self._has_ended(rank) and self._is_behind(rank):  # that was not its last word
                raise RuntimeError(f"shared memory: rank {rank} has ended")
            time.sleep(min(max(waited / 10, 2e-5), 1e-3))

    def _is_behind(self, rank: int) -> bool:
        return self.memory[(1 + rank) * LINE] == (self.meetings - 1) % 256

    def _has_ended(self, rank: int) -> bool:
        """Every rank holds a lock on a byte of the file, and the system frees it when it ends."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        return True

    def _fence(self) -> None:
        """No load or store passes this line, as far as ranks are concerned that call it too."""
        if not STORES_IN_ORDER:
            fcntl.lockf(self.file, fcntl.LOCK_SH, 1, self.world_size)
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, self.world_size)


class SharedMemoryAllReduce(SharedMemory):
    """For the ranks of a process group, of any backend; called like a function it is all_reduce."""

    def __init__(self, process_group=None, piece_bytes: int = 0, timeout: float = 300.0):
        group = process_group or dist.group.WORLD
        of_group = group.get_group_store(), group.rank(), group.size()
        super().__init__(*of_group, piece_bytes, timeout)

    def __call__(self, tensor: torch.Tensor) -> None:
        self.all_reduce(tensor)


def in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in one dimension.

    By .data, because autograd counts changes, and what arrives from other ranks is none.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise RuntimeError("shared memory needs a contiguous CPU tensor; .contiguous() makes one")
    return tensor.data.view(-1)


def open_shared_memory(
    size: int, store: dist.Store, rank: int, world_size: int, timeout: float
) -> tuple:
    """(file, mmap) of the same `size` bytes, all 0, in every rank of a group. A collective.

    Rank 0 makes a file with a random name, in /dev/shm where there is one, which is memory, and the
    others open it. As soon as all have it, it loses its name and lives as long as somebody has it
    open. (If all ranks are killed in these milliseconds, the file stays.) Where one has
    a problem, as a rank in a container of its own has that finds no such file, all get a
    RuntimeError; TimeoutError if a rank says nothing at all.
    """
    number = store.add(f"shared memory/{rank}", 1)  # the keys of a store cannot be used twice
    store = dist.PrefixStore(f"shared memory/{number}", store)

    def hear(what: str, other: int) -> str:
        try:
            store.wait([f"{what}/{other}"], timedelta(seconds=timeout))
        except RuntimeError as error:
            who = f"rank {rank} timed out: it waited {timeout:g} s for rank {other}"
            raise TimeoutError(f"no shared memory: {who}") from error
        return store.get(f"{what}/{other}").decode()

    path = problem = ""
    file = memory = None
    try:
        if rank != 0:
            path = hear("path", 0)
        try:
            if rank == 0:
                folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
                file = tempfile.NamedTemporaryFile(prefix="all-reduce-", dir=folder, delete=False)
                path = file.name
                take(file, size)
            else:
                file = open(path, "r+b")
            if os.fstat(file.fileno()).st_size != size:
                raise ValueError(f"{path} has not the {size} bytes that it needs")
            memory = mmap.mmap(file.fileno(), size)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except Exception as error:  # MemoryError, mmap's ValueError: the others would wait for ever
            problem = f"rank {rank}: {str(error) or type(error).__name__}"
        if rank == 0:
            store.set("path/0", path)
        store.set(f"problem/{rank}", problem)
        problems = [hear("problem", other) for other in range(world_size)]
    finally:
        with suppress(OSError):
            os.unlink(path)
    if any(problems):
        raise RuntimeError(f"no shared memory: {'; '.join(filter(None, problems))}")
    return file, memory


def take(file, size: int) -> None:
    """Have that memory now, or fail now: a call that finds none would be killed (SIGBUS)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.write(bytes(size))
        file.flush()


# ==================================================================================================
# Below this line: verify, the measurement beside gloo and the ring, main.

SMALL_PIECE = 4096  # bytes, so that a small tensor has many of them
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.complex64]


def differing_sums(all_reduce) -> list[tuple]:
    """Those (dtype, length) whose sum is not bitwise torch's: of integers, exact in any order.

    With empty parts, with one piece and with many, and pieces one element off.
    """
    world_size = dist.get_world_size()
    floats = SMALL_PIECE // 4
    lengths = [0, 1, world_size - 1, world_size + 1, floats - 1, floats, floats + 1, 9973]
    numbers = torch.Generator().manual_seed(dist.get_rank())
    differing = []
    for dtype, length in itertools.product(DTYPES, lengths):
        tensor = torch.randint(0, 10, (length,), generator=numbers).to(dtype)
        expected = tensor.clone()
        all_reduce(tensor)
        dist.all_reduce(expected)
        if not torch.equal(tensor, expected):
            differing.append((dtype, length))
    return differing


def verify(device: torch.device) -> None:
    """Compare sums with torch's, and show one."""
    from allreduce import demonstrate

    from common.setup import say

    shared = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE)
    if differing := differing_sums(shared):
        raise RuntimeError(f"verify: FAILED, other results than gloo's of {differing}")
    say(f"verify: passed, sums of 8 lengths and {len(DTYPES)} dtypes, bitwise gloo's")
    demonstrate(device, shared)


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

        import common.setup  # noqa: F401
    except ModuleNotFoundError as error:
        files = "the repository's folder common/, and the scripts of 01_allreduce"
        sys.exit(f"error: {error}: copy {files} beside this script")

    args = read_arguments(__doc__, "shared_memory.png")
    run(args, f"{stage.name}/{folder.name}", verify, measure_shared)


if __name__ == "__main__":
    main()
