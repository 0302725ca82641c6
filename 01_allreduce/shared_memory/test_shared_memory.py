"""Tests of the all-reduce through shared memory: sums, late and dying ranks, nothing left."""

import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
import shared_memory
import torch
import torch.distributed as dist
from shared_memory import PART_BYTES, SharedMemoryAllReduce

from common.testing.harness import SHARED_MEMORY, Ranks, import_alone, left_in, names_in

SCRIPT = Path(__file__).with_name("allreduce.py")
SMALL_PIECE = 4096  # so that a small tensor has many of them
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.complex64]
many = pytest.mark.full


def sums(lengths, dtypes, piece_bytes=SMALL_PIECE):
    """Those (length, dtype) whose sum differs from the backend's in a bit; exact in any order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    all_reduce = SharedMemoryAllReduce(piece_bytes=piece_bytes, timeout=30)
    differ = []
    for dtype in dtypes:
        for length in lengths:
            numbers = torch.Generator().manual_seed(1000 * length + rank)
            mine = torch.randint(0, 10, (length,), generator=numbers).to(dtype)
            theirs = mine.clone()
            assert all_reduce(mine) is None
            dist.all_reduce(theirs)
            if not torch.equal(mine, theirs) or (length > 9 and not mine.any()):
                differ.append((length, dtype))
    return differ, world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, *(pytest.param(n, marks=many) for n in (5, 8))])
def test_sum_equals_all_reduce(ranks, world_size):
    """Of all dtypes, with empty parts, with one piece and with many, and pieces one element off."""
    floats = SMALL_PIECE // 4
    lengths = [0, 1, world_size - 1, world_size + 1, floats - 1, floats, floats + 1, 9973]
    answer = ([], world_size)
    assert ranks(world_size).run(sums, lengths, DTYPES) == [answer] * world_size


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=many)])
def test_pieces_of_the_default_size(ranks, world_size):
    length = 5 * world_size * PART_BYTES // 4 + 1
    answer = ([], world_size)
    assert ranks(world_size).run(sums, [length, 7], [torch.float32], 0) == [answer] * world_size


def random_sums(length):
    mine = torch.randn(length, generator=torch.Generator().manual_seed(dist.get_rank()))
    exact = mine.double()
    SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=30)(mine)
    dist.all_reduce(exact)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return (mine - exact).abs().max().item(), all(torch.equal(one, mine) for one in gathered)


def test_random_numbers(ranks):
    for difference, same in ranks(4).run(random_sums, 100_003):
        assert difference < 1e-5 and same


def shapes():
    all_reduce = SharedMemoryAllReduce(timeout=30)
    tensor = torch.full((3, 5, 7), dist.get_rank() + 1.0, requires_grad=True)
    all_reduce(tensor)
    scalar = torch.tensor(1)
    all_reduce(scalar)
    return bool((tensor == 6).all()) and scalar.item() == 3


def test_any_shape_in_place(ranks):
    assert ranks(3).run(shapes) == [True] * 3


def refused_then_summed():
    all_reduce = SharedMemoryAllReduce(timeout=30)
    for tensor in (torch.arange(12.0)[::2], torch.ones(4, 6).t(), torch.ones(6, device="meta")):
        with pytest.raises(RuntimeError, match="contiguous CPU tensor"):
            all_reduce(tensor)
    few = torch.arange(12.0)[::2].contiguous()
    all_reduce(few)
    return few.tolist()


def test_a_refused_tensor_leaves_nothing_behind(ranks):
    assert ranks(2).run(refused_then_summed) == [[4.0 * number for number in range(6)]] * 2


def many_calls(calls, late):
    """Wrong elements over calls of all sizes, to which a rank now and then comes late."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    all_reduce = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=30)
    lengths = torch.randint(1, 5000, (calls,), generator=torch.Generator().manual_seed(0)).tolist()
    pattern = torch.arange(5000.0)
    wrong = 0
    for call, length in enumerate(lengths):
        if late and call % 10 == rank:
            time.sleep(0.02)
        tensor = pattern[:length] + rank + call
        all_reduce(tensor)
        expected = world_size * (pattern[:length] + call) + world_size * (world_size - 1) / 2
        wrong += (tensor != expected).sum().item()
    return wrong


@pytest.mark.parametrize("late", [False, True])
def test_call_after_call(ranks, late):
    """More than 256 counts of a flag; nothing but the flags keeps the ranks together."""
    assert ranks(3).run(many_calls, 100 if late else 300, late) == [0] * 3


def with_fences():
    kept, shared_memory.STORES_IN_ORDER = shared_memory.STORES_IN_ORDER, False
    wrong = many_calls(20, False)
    shared_memory.STORES_IN_ORDER = kept
    return wrong


def test_the_fence_of_processors_that_reorder(ranks):
    assert ranks(2).run(with_fences) == [0] * 2


def of_two_groups():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    all_reduce = SharedMemoryAllReduce(groups[rank % 2], timeout=30)
    everyone = SharedMemoryAllReduce(timeout=30)
    one, all_of_them = torch.tensor([rank]), torch.tensor([rank])
    everyone(all_of_them)
    all_reduce(one)
    return one.item(), all_of_them.item()


def test_groups_have_memory_of_their_own(ranks):
    assert ranks(4).run(of_two_groups) == [(2, 6), (4, 6), (2, 6), (4, 6)]


def with_a_name(folder):
    """As on a system without memory that has no name. Files that are there once it is made."""
    nameless, kept = os.memfd_create, tempfile.tempdir
    del os.memfd_create
    tempfile.tempdir = folder
    wrong = many_calls(10, False)
    os.memfd_create, tempfile.tempdir = nameless, kept
    return wrong, os.listdir(folder)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="is how all the tests run there")
def test_memory_that_has_a_name_loses_it(ranks, tmp_path):
    assert ranks(2).run(with_a_name, str(tmp_path)) == [(0, [])] * 2


def refused(sizes, hosts):
    """What it says where the ranks want different sizes, or are on different hosts."""
    rank = dist.get_rank()
    kept, socket.gethostname = socket.gethostname, lambda: hosts[rank]
    with pytest.raises(RuntimeError) as error:
        SharedMemoryAllReduce(piece_bytes=sizes[rank])
    socket.gethostname = kept
    return str(error.value)


@pytest.mark.parametrize("sizes, hosts", [([64, 128], ["a", "a"]), ([64, 64], ["a", "b"])])
def test_every_rank_refuses(ranks, sizes, hosts):
    for message in ranks(2).run(refused, sizes, hosts):
        assert message.startswith("no shared memory: ") and "one host" in message


@pytest.mark.parametrize("piece_bytes", [-64, 1, 100])
def test_a_wrong_piece(piece_bytes):
    with pytest.raises(ValueError, match=f"piece_bytes={piece_bytes} "):
        SharedMemoryAllReduce(piece_bytes=piece_bytes)


TIMEOUT = 2.0


def dies(name, count):
    """Rank 1 is killed as it enters that function for the count-th time."""
    owner = SharedMemoryAllReduce if hasattr(SharedMemoryAllReduce, name) else shared_memory
    function = getattr(owner, name)
    entered = []

    def counted(*arguments, **options):
        entered.append(name)
        if len(entered) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    if dist.get_rank() == 1:
        setattr(owner, name, counted)
    all_reduce = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=TIMEOUT)
    for _ in range(3):
        all_reduce(torch.ones(3 * SMALL_PIECE))


MAKING = [("open_shared_memory", 1), ("together", 1), ("together", 2)]
CALLING = [("bring", 1), ("say", 1), ("wait", 1), ("say", 2), ("wait", 2), ("bring", 13)]
BETWEEN = [("__call__", 2)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name, count",
    [("wait", 4), *(pytest.param(*one, marks=many) for one in MAKING + CALLING + BETWEEN)],
)
def test_killed_at_any_moment(name, count, tmp_path):
    """The others end with an error in time; no memory with a name stays, no process."""
    memory, files = names_in(SHARED_MEMORY), names_in(Path(tempfile.gettempdir()))
    group = Ranks(3)
    processes = group.processes
    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        group.run(dies, name, count)
    took = time.monotonic() - began
    said = str(failure.value)
    assert "rank 1: EOFError" in said and "no answer" not in said, said
    assert said.count("RuntimeError") >= 2, said
    if (name, count) not in MAKING:
        assert "timed out: it waited 2 s for rank 1" in said, said
    assert took < TIMEOUT + 10, took
    assert not any(process.is_alive() for process in processes)
    assert not left_in(SHARED_MEMORY, memory)
    left = names_in(Path(tempfile.gettempdir())) - files
    assert not [file for file in left if "all-reduce" in file]


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finding the ranks needs /proc")
def test_a_killed_benchmark_leaves_nothing(script):
    memory = names_in(SHARED_MEMORY)
    grid = ["--backends", "gloo", "--sizes-mb", "1,400", "--world-sizes", "2", "--steps", "100000"]
    one = script([sys.executable, SCRIPT, *grid, "--row-seconds", "0.3"])
    for line in one.process.stdout:
        if line.startswith("shared"):
            break
    ranks = []
    for process in one.processes():
        if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes():
            ranks.append(process)
    os.kill(ranks[-1], signal.SIGKILL)
    status, rest = one.wait(30)  # fails if a process is left
    assert status == 1 and "error: a rank ended" in rest, rest
    assert not left_in(SHARED_MEMORY, memory)


def test_file_alone(tmp_path):
    """It needs torch and the standard library, and nothing that is only here."""
    assert import_alone(Path(shared_memory.__file__), tmp_path) == (0, "")
