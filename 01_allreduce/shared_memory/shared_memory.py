"""01: collectives for the ranks of one host, through memory that all of them see.

gloo carries every byte through a socket, even to a neighbour on the same host: into the kernel and
out again. Ranks of one host can do without, because the system lets processes share memory. That
is what MPI does within a host, and nccl between the GPUs of one. SharedMemory does it in four
moves. A tensor goes through in pieces; for each piece every rank

    1. copies it into its slot of the shared memory, without its own part, and says so;
    2. waits for the others and adds what they brought for its part, the r-th of n;
    3. copies the sum of its part into the slot of the sums, and says so;
    4. waits for the others and copies their parts out of that slot.

Moves 1 and 2 are a reduce-scatter, 3 and 4 an all-gather, and all four an all-reduce. A piece is
so small that all of this happens in the processor's cache: main memory is read once and written
once. There are two sets of slots, so that a rank brings the next piece before it waits.

    all_reduce = SharedMemoryAllReduce()      # on every rank, after init_process_group
    all_reduce(tensor)                        # the sum over all ranks, in place

The script verifies them, and measures them as `shared` in the grid of allreduce.py, whose flags it
has. backend.py makes a backend of them, for all that is written with torch.distributed.

    make 01_allreduce/shared_memory                                   (about four minutes)
    python 01_allreduce/shared_memory/shared_memory.py --sizes-mb 1,10 --nproc 2       (seconds)

Source: the shared-memory collectives of MPI libraries; Graham and Shipman, "MPI support for
multi-core architectures: optimized shared memory collectives", EuroPVM/MPI 2008.
"""

import fcntl
import json
import mmap
import os
import platform
import socket
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

PART_BYTES = 2**19  # of a piece, per rank; smaller: waiting costs more; larger: it leaves the cache
LINE = 128  # bytes from flag to flag: each has a cache line of its own, on Apple's processors too
BROKEN = 0  # the place of a byte that is set when a call has failed
NONCE = slice(16, 32)  # the place of random bytes that tell this memory from any other
YIELDS = 50  # so often a waiting rank offers its core to others before it begins to sleep
STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


@dataclass
class Piece:
    """What one rank does with a piece of a tensor, which has a part for every rank."""

    brought: Sequence[torch.Tensor] | None  # what it adds to each part; None: nothing is summed
    mine: torch.Tensor  # where its own part stands, or the sum of that
    taken: Sequence[torch.Tensor] | None  # where it wants all parts; None: it wants its own alone


class SharedMemory:
    """All-reduce, reduce-scatter and all-gather for the ranks of a group that share a host.

    Constructing it is a collective: every rank does it, with a store of the group and the same
    piece_bytes, a multiple of 64 (0: half a megabyte per rank, 4 MB at most). RuntimeError on all
    ranks if they are not all on one host. The memory, (2 n + 2) · piece_bytes for n ranks, goes
    when the last rank ends or lets go of the object: nothing stays behind, whoever is killed. (But
    off Linux, if all ranks are killed in the milliseconds before they have opened it: then a file
    stays in the temporary folder.)

    A call takes CPU tensors of any shape, length and dtype that can be added, the same on every
    rank; all ranks get the same bits. Tensors that are not contiguous are copied first and back.
    With `mean` sums are divided by the number of ranks. If a rank doesn't come within `timeout`
    seconds, because it has died or is elsewhere, or comes with another tensor, or for another call,
    the others get a RuntimeError. The object is then of no more use, and says so to every rank that
    calls it.

    **How a rank says something.** By a count of its own in the shared memory: a single byte, which
    cannot be read half-written, modulo 256. No rank is ever more than three steps ahead of another.
    That the count is seen later than what it announces needs an order of stores and of loads. x86
    keeps both. ARM does not, so there `fence` takes and gives back a file lock that all ranks
    share, between the data and the count, and again between reading the count and the data. Two
    ranks that take the same lock are in an order: if the reader were first, it could not have seen
    the count. Python's interpreter adds no reordering, because each step is a call of its own.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        piece_bytes: int = 0,
        timeout: float = 300.0,
        yields: int = YIELDS,
    ):
        if piece_bytes < 0 or piece_bytes % 64 != 0:
            raise ValueError(f"piece_bytes={piece_bytes} is not a multiple of 64")
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.yields = yields
        self.piece_bytes = piece_bytes or PART_BYTES * min(world_size, 8)
        lines = (world_size + 1) * LINE  # the first one is for all ranks
        slots = world_size + 1  # the last one is for the sums
        meeting = Meeting(store, rank, world_size, timeout)
        self.file, self.memory = open_shared_memory(lines + 2 * slots * self.piece_bytes, meeting)
        data = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.slots = data[lines:].view(2, slots, self.piece_bytes)
        self.words = data[LINE:lines].view(torch.int64).view(world_size, -1)
        self.calls = 0
        self.pieces = 0  # so many are done: the next one goes through the set of slots 0, 1, 0, 1 …
        self.count = 0  # so often this rank has said that something is there
        self.closed = False

    def all_reduce(self, tensor: torch.Tensor, mean: bool = False) -> None:
        """Sum a tensor over all ranks, in place."""
        flat = in_one_row(tensor)
        pieces = []
        for piece in flat.split(self.piece_bytes // flat.element_size()):
            parts = piece.tensor_split(self.world_size)
            pieces.append(Piece(parts, parts[self.rank], parts))
        self.run("all_reduce", pieces, mean)
        copy_back(flat, tensor)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], mean: bool = False
    ) -> None:
        """Sum the r-th of n inputs over all ranks into rank r's output, which is as long."""
        check_lengths(output, inputs, self.world_size)
        rows = [in_one_row(tensor) for tensor in inputs]
        result = in_one_row(output)
        pieces = []
        for part in self.parts_of(result):
            pieces.append(Piece([row[part] for row in rows], result[part], None))
        self.run("reduce_scatter", pieces, mean)
        copy_back(result, output)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy rank r's tensor into the r-th of n outputs, which are as long, on all ranks."""
        check_lengths(tensor, outputs, self.world_size)
        rows = [in_one_row(output) for output in outputs]
        mine = in_one_row(tensor)
        rows[self.rank].copy_(mine)
        pieces = []
        for part in self.parts_of(mine):
            pieces.append(Piece(None, mine[part], [row[part] for row in rows]))
        self.run("all_gather", pieces)
        for output, row in zip(outputs, rows, strict=True):
            copy_back(row, output)

    def parts_of(self, row: torch.Tensor) -> list[slice]:
        """This row in parts of which one per rank makes a piece; an empty row has one, too."""
        length = self.piece_bytes // self.world_size // row.element_size()
        starts = range(0, max(1, len(row)), length)
        return [slice(start, min(start + length, len(row))) for start in starts]

    def run(self, kind: str, pieces: list[Piece], mean: bool = False) -> None:
        """Make the moves with all pieces. If that fails, on any rank, it was the last time."""
        self.check_whole()
        try:
            self.calls += 1
            lengths = sum(len(part) for piece in pieces for part in piece.brought or piece.taken)
            word = f"{self.calls} {kind} {mean} {lengths} {pieces[0].mine.dtype}"
            self.words[self.rank, 1 + self.calls % 2] = zlib.crc32(word.encode())
            self.move(pieces, mean)
        except BaseException:  # an interrupt, too: nobody knows any more who has read what
            self.memory[BROKEN] = 1
            raise

    def move(self, pieces: list[Piece], mean: bool) -> None:
        """The four moves, piece by piece."""
        slots = self.slots.view(pieces[0].mine.dtype)
        sums = self.world_size  # the slot
        reduces = pieces[0].brought is not None
        if reduces:
            brought = self.bring(pieces[0], slots[self.pieces % 2])
        for number, piece in enumerate(pieces, start=1):
            slots_of_piece = slots[self.pieces % 2]
            slots_of_next = slots[(self.pieces + 1) % 2]
            bounds = [0, *accumulate(len(part) for part in piece.brought or piece.taken)]
            mine = slice(bounds[self.rank], bounds[self.rank + 1])

            if reduces:
                self.wait(brought)
                if number == 1:
                    self.check_words()
                self.add(piece, slots_of_piece[:, mine], mean)
            if piece.taken is not None:
                slots_of_piece[sums, mine].copy_(piece.mine)
            summed = self.announce()

            if reduces and number < len(pieces):  # while the others still add
                brought = self.bring(pieces[number], slots_of_next)

            self.wait(summed)
            if piece.taken is not None:
                if number == 1 and not reduces:
                    self.check_words()
                for rank in self.other_ranks():
                    part = slots_of_piece[sums, bounds[rank] : bounds[rank + 1]]
                    piece.taken[rank].copy_(part)
            self.pieces += 1

    def bring(self, piece: Piece, slots: torch.Tensor) -> int:
        """Copy into this rank's slot what the others add. Returns the count that says so.

        The slot is free: what was in it was added before the sums were there that we have waited
        for since.
        """
        slot = slots[self.rank]
        start = 0
        for rank, part in enumerate(piece.brought):
            if rank != self.rank:
                slot[start : start + len(part)].copy_(part)
            start += len(part)
        return self.announce()

    def add(self, piece: Piece, slots: torch.Tensor, mean: bool) -> None:
        """This rank's part of the sum: its own and, of all `slots`, what the others brought."""
        total = piece.brought[self.rank]
        for rank in self.other_ranks():
            total = torch.add(total, slots[rank], out=piece.mine)
        if self.world_size == 1:
            piece.mine.copy_(total)
        if mean:
            piece.mine.div_(self.world_size)

    def other_ranks(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def check_whole(self) -> None:
        if self.memory[BROKEN]:
            raise RuntimeError("shared memory: a call has failed on some rank: make a new one")
        if self.closed:
            raise RuntimeError("shared memory: it was closed while a call was under way")

    def check_words(self) -> None:
        """Every rank must be in the same call, with as long a tensor of the same dtype."""
        if len(set(self.words[:, 1 + self.calls % 2].tolist())) > 1:
            differ = "the ranks' tensors differ, or a rank has left out a call"
            raise RuntimeError(f"shared memory: {differ}")

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
                if tries <= self.yields:
                    os.sched_yield()
                    continue
                waited = time.monotonic() - began
                if waited > self.timeout:
                    who = f"rank {self.rank} timed out: it waited {self.timeout:g} s for"
                    raise RuntimeError(f"shared memory: {who} rank {rank}")
                time.sleep(min(max(waited / 10, 2e-5), 1e-3))
        self.fence()

    def fence(self) -> None:
        """No load or store passes this line, as far as ranks are concerned that call it too."""
        if not STORES_IN_ORDER:
            fcntl.flock(self.file, fcntl.LOCK_SH)
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def close(self) -> None:
        """End a call that waits in another thread, with an error."""
        self.closed = True


class SharedMemoryAllReduce(SharedMemory):
    """For the ranks of a process group, of any backend; called like a function it is all_reduce."""

    def __init__(self, process_group=None, piece_bytes: int = 0, timeout: float = 300.0):
        group = process_group or dist.group.WORLD
        of_group = group.get_group_store(), group.rank(), group.size()
        super().__init__(*of_group, piece_bytes, timeout)

    def __call__(self, tensor: torch.Tensor) -> None:
        self.all_reduce(tensor)


def in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in one dimension: itself, or a copy if it is not contiguous.

    By .data, because autograd counts changes: what arrives from other ranks is none, as in torch's
    own backends.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise RuntimeError(f"shared memory: it has no place for {tensor.device} {tensor.layout}")
    return tensor.data.contiguous().view(-1)


def copy_back(row: torch.Tensor, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        tensor.data.copy_(row.view(tensor.shape))


def check_lengths(tensor: torch.Tensor, others: Sequence[torch.Tensor], world_size: int) -> None:
    """RuntimeError, before anything is written."""
    found = {(other.numel(), other.dtype) for other in others}
    if len(others) != world_size or found != {(tensor.numel(), tensor.dtype)}:
        needs = f"{world_size} tensors of {tensor.numel()} elements, {tensor.dtype}"
        raise RuntimeError(f"shared memory: it needs {needs}")


class Meeting:
    """Where the ranks tell each other something before there is shared memory: all of them, or the
    error of one of them is the error of all.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float):
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        # The keys of a store cannot be used twice.
        self.number = store.add(f"shared memory/{rank}", 1)
        self.round = 0

    def exchange(self, mine) -> list:
        """What every rank says: something that JSON can hold."""
        self.round += 1
        name = f"shared memory/{self.number}/{self.round}"
        self.store.set(f"{name}/{self.rank}", json.dumps(mine))
        of_ranks = []
        for rank in range(self.world_size):
            try:
                self.store.wait([f"{name}/{rank}"], timedelta(seconds=self.timeout))
            except RuntimeError as error:
                who = f"rank {self.rank} timed out: it waited {self.timeout:g} s for rank {rank}"
                raise TimeoutError(f"no shared memory: {who}") from error
            of_ranks.append(json.loads(self.store.get(f"{name}/{rank}")))
        return of_ranks

    def together(self, function: Callable):
        """What function() returns, called on every rank; RuntimeError on all if one fails."""
        problem = None
        result = None
        try:
            result = function()
        except Exception as error:  # MemoryError, mmap's ValueError: the others would wait for ever
            problem = f"rank {self.rank}: {str(error) or type(error).__name__}"
        problems = self.exchange(problem)
        if any(problems):
            raise RuntimeError(f"no shared memory: {'; '.join(filter(None, problems))}")
        return result


def open_shared_memory(size: int, meeting: Meeting) -> tuple:
    """(file, mmap) of the same `size` bytes, all 0, in every rank of a group. A collective.

    RuntimeError on every rank if one of them cannot have it. On Linux this memory never has a name:
    the others reach it as a file that rank 0 has open. Elsewhere it is a file in the folder for
    temporary files, which every rank removes as soon as all have it open or one has failed. The
    same path may lead to another file, where ranks have containers of their own: so rank 0 tells
    which file it is, and what is in it.
    """
    is_first = meeting.rank == 0
    nameless = hasattr(os, "memfd_create")
    path = os.path.join(tempfile.gettempdir(), f"all-reduce-{uuid.uuid4().hex}")
    nonce = uuid.uuid4()

    def create():
        if not is_first:
            return None
        if nameless:
            new = os.fdopen(os.memfd_create("all-reduce"), "r+b")
        else:
            new = open(path, "x+b")
        new.write(bytes(size))  # has the memory now, or fails now, and not in a later call
        new.seek(NONCE.start)
        new.write(nonce.bytes)
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
        if memory[NONCE].hex() != expected_nonce:
            raise OSError(f"{path} has another content for this rank")
        return opened, memory

    try:
        file = meeting.together(create)
        identity = None
        if is_first:
            identity = which(os.fstat(file.fileno()))
            if nameless:
                path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        proposals = meeting.exchange([path, identity, nonce.hex, socket.gethostname(), size])
        path, expected_file, expected_nonce, _, _ = proposals[0]
        return meeting.together(join)
    finally:
        if not nameless:
            with suppress(OSError):
                os.unlink(path)


def which(status: os.stat_result) -> list[int]:
    """Which file it is, among all of this host."""
    return [status.st_dev, status.st_ino]


# ==================================================================================================
# Below this line: verify, the measurement beside gloo and the ring, main.

SMALL_PIECE = 4096  # bytes, so that a small tensor has many of them
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.complex64]
# torch has renamed them (2.13, 2.14), and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def differing_halves(shared: SharedMemory, length: int, dtype: torch.dtype) -> list[tuple]:
    """Those of reduce-scatter and all-gather whose results are not bitwise torch's."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    numbers = torch.Generator().manual_seed(1000 * length + rank)
    inputs = torch.randint(0, 10, (world_size, length), generator=numbers).to(dtype)
    sums = inputs.clone()
    dist.all_reduce(sums)
    mine = torch.empty_like(inputs[0])
    shared.reduce_scatter(mine, inputs)
    differing = [] if torch.equal(mine, sums[rank]) else [("reduce-scatter", length, dtype)]
    shared.all_gather(inputs, mine)
    if not torch.equal(inputs, sums):
        differing.append(("all-gather", length, dtype))
    return differing


def verify(device: torch.device, backend: str) -> None:
    """Compare sums with torch's: empty parts, one piece and many, pieces one element off."""
    from allreduce import demonstrate, differing_sums

    from common.setup import say

    world_size = dist.get_world_size()
    floats = SMALL_PIECE // 4
    lengths = [0, 1, world_size - 1, world_size + 1, floats - 1, floats, floats + 1, 9973]
    shared = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE)
    differing = differing_sums(shared, lengths, DTYPES)
    for dtype in DTYPES:
        for length in lengths:
            differing += differing_halves(shared, length, dtype)
    if differing:
        sys.exit(f"verify: FAILED, other results than {backend}'s of {differing}")
    what = f"3 collectives of {len(lengths)} lengths and {len(DTYPES)} dtypes"
    say(f"verify: passed, {what}, bitwise {backend}'s results")
    demonstrate(device, backend, shared)


def measure_shared(device: torch.device, backend: str, *options) -> None:
    """The stage's benchmark with one algorithm more, where tensors are on the CPU."""
    from allreduce import benchmark

    if backend != "gloo":
        benchmark(device, backend, *options)
        return
    shared = SharedMemoryAllReduce()
    benchmark(device, backend, *options, {"shared": shared})
    measure_halves(shared, *options)


def measure_halves(
    shared: SharedMemory, sizes_bytes: list[int], steps: int, warmup: int, rows_file: str
) -> None:
    """Reduce-scatter and all-gather, gloo's and ours in turn, of a tensor of at most 100 MB."""
    from common.report import percentiles
    from common.setup import say
    from common.timing import Stopwatch

    world_size = dist.get_world_size()
    sizes = [size for size in sizes_bytes if 4 * world_size <= size <= 100 * 2**20]
    if world_size == 1 or not sizes:
        return
    inputs = torch.ones(world_size, max(sizes) // 4 // world_size)
    mine = torch.empty_like(inputs[0])
    calls = {
        ("reduce-scatter", "gloo"): lambda: reduce_scatter_single(mine, inputs.view(-1)),
        ("reduce-scatter", "shared"): lambda: shared.reduce_scatter(mine, inputs),
        ("all-gather", "gloo"): lambda: all_gather_single(inputs.view(-1), mine),
        ("all-gather", "shared"): lambda: shared.all_gather(inputs, mine),
    }
    watch = Stopwatch(torch.device("cpu"))
    seconds = {key: [] for key in calls}
    for _ in range(warmup + steps):
        for key, call in calls.items():
            inputs.fill_(1.0)
            dist.barrier()
            watch.mark("start")
            call()
            watch.mark("end")
            slowest = torch.tensor(watch.seconds("start", "end"), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[key].append(slowest.item())
    if dist.get_rank() != 0:
        return
    p50 = {key: percentiles(times[warmup:])[0] for key, times in seconds.items()}
    with open(rows_file, "a") as file:
        for (collective, name), times in seconds.items():
            row = {"collective": collective, "algorithm": name, "world_size": world_size}
            row |= {"size_bytes": inputs.nbytes, "seconds": times[warmup:]}
            file.write(json.dumps(row) + "\n")
    for collective in ("reduce-scatter", "all-gather"):
        gloo = 1000 * p50[collective, "gloo"]
        ours = 1000 * p50[collective, "shared"]
        times = f"gloo {gloo:.2f} ms, shared {ours:.2f} ms, ratio {gloo / ours:.2f}"
        say(f"{collective} of {inputs.nbytes / 2**20:g} MB, {world_size} ranks (p50): {times}")


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
