"""Tests of the collectives through shared memory: late and dying ranks, nothing left.

test_allreduce.py has what it shares with the other two.
"""

import mmap
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import shared_memory
from allreduce import differing_sums
from shared_memory import PART_BYTES, SMALL_PIECE, SharedMemory, SharedMemoryAllReduce

from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import SHARED_MEMORY, Ranks, left_in, masked, names_in, read_json

SCRIPT = Path(__file__).with_name("shared_memory.py")
slow = pytest.mark.full


# Sums


def differing(lengths):
    return differing_sums(SharedMemoryAllReduce(), lengths, [torch.float32])


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=slow)])
def test_pieces_of_the_default_size(ranks, world_size):
    lengths = [5 * world_size * PART_BYTES // 4 + 1, 7]
    assert ranks(world_size).run(differing, lengths) == [[]] * world_size


def wrong_in_many_calls(calls, late):
    """Wrong elements over calls of all sizes, to which a rank now and then comes late."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
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


@pytest.mark.parametrize("calls, late", [(300, False), (100, True)])
def test_call_after_call(ranks, calls, late):
    """More than 256 counts of a flag; nothing but the flags keeps the ranks together."""
    assert ranks(3).run(wrong_in_many_calls, calls, late) == [0] * 3


def wrong_with_fences():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "STORES_IN_ORDER", False)
        return wrong_in_many_calls(20, False)


def test_the_fence_of_processors_that_reorder(ranks):
    assert ranks(2).run(wrong_with_fences) == [0] * 2


def sums_of_groups():
    """Of the ranks' numbers, over every other rank and over all."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    of_half = torch.tensor([rank])
    of_all = torch.tensor([rank])
    all_reduce_half = SharedMemoryAllReduce(groups[rank % 2], timeout=30)
    SharedMemoryAllReduce(timeout=30)(of_all)
    all_reduce_half(of_half)
    return of_half.item(), of_all.item()


def test_groups_have_memory_of_their_own(ranks):
    assert ranks(4).run(sums_of_groups) == [(2, 6), (4, 6), (2, 6), (4, 6)]


# The memory


def wrong_where_memory_has_a_name(folder):
    """Wrong elements, and the files that are there once it is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "memfd_create")
        patch.setattr(tempfile, "tempdir", folder)
        return wrong_in_many_calls(10, False), os.listdir(folder)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="is how all the tests run there")
def test_memory_that_has_a_name_loses_it(ranks, tmp_path):
    assert ranks(2).run(wrong_where_memory_has_a_name, str(tmp_path)) == [(0, [])] * 2


def refusal(sizes, hosts):
    """What it says where the ranks want different sizes, or are on different hosts."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: hosts[rank])
        with pytest.raises(RuntimeError) as error:
            SharedMemoryAllReduce(piece_bytes=sizes[rank])
    return str(error.value)


@pytest.mark.parametrize("sizes, hosts", [([64, 128], ["a", "a"]), ([64, 64], ["a", "b"])])
def test_every_rank_refuses(ranks, sizes, hosts):
    for message in ranks(2).run(refusal, sizes, hosts):
        assert message.startswith("no shared memory: ") and "one host" in message


def problem_of_one_rank(error):
    """What it says where rank 1 cannot map the memory, for a reason of any kind."""

    def fails(*_):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(mmap, "mmap", fails)
        with pytest.raises(RuntimeError) as said:
            SharedMemoryAllReduce(piece_bytes=64)
    return str(said.value)


@pytest.mark.parametrize("error", [MemoryError(), ValueError("mmap length"), OSError("no")])
def test_any_problem_of_a_rank_is_an_error_on_all(ranks, error):
    for message in ranks(2).run(problem_of_one_rank, error):
        assert message.startswith("no shared memory: rank 1: ")


def takes_another_file(path):
    """As in containers of their own: what rank 0 names is, for rank 1, a file of its own."""
    rank = dist.get_rank()
    processes = [None] * 2
    dist.all_gather_object(processes, os.getpid())
    files = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(os, "getpid", lambda: processes[1])
        else:
            files = [path.open("r+b") for _ in range(100)]  # whatever number rank 0's has
        with pytest.raises(RuntimeError, match=r"rank 1: /proc/.* is another file"):
            SharedMemoryAllReduce()
    for file in files:
        file.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="is found by its name there")
def test_a_file_of_somebody_else_is_left_alone(ranks, tmp_path):
    content = bytes([7]) * 2**23
    path = tmp_path / "data"
    path.write_bytes(content)
    ranks(2).run(takes_another_file, path)
    assert path.read_bytes() == content


def is_broken_after_a_timeout():
    """Rank 1 is late; neither it nor a second try of rank 0 gets a sum."""
    all_reduce = SharedMemoryAllReduce(timeout=0.2)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="timed out"):
            all_reduce(torch.ones(6))
    dist.barrier()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a call has failed on some rank"):
            all_reduce(torch.ones(6))


def is_broken_after_an_interrupt():
    shared = SharedMemoryAllReduce(timeout=30)

    def interrupted(*_):
        raise KeyboardInterrupt

    if dist.get_rank() == 0:
        shared.announce = interrupted
        with pytest.raises(KeyboardInterrupt):
            shared.all_reduce(torch.ones(6))
        del shared.announce
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a call has failed on some rank"):
            shared.all_reduce(torch.ones(6))


def tells_different_calls():
    """Other lengths, also 0, other dtypes, another collective, sum and mean."""
    rank = dist.get_rank()
    different = [
        lambda shared: shared.all_reduce(torch.ones(6 + rank)),
        lambda shared: shared.all_reduce(torch.ones(6 * rank)),
        lambda shared: shared.all_reduce(torch.ones(6, dtype=[torch.int32, torch.float32][rank])),
        lambda shared: shared.all_reduce(torch.ones(6), mean=rank == 1),
        lambda shared: shared.all_gather(torch.ones(2, 3 + rank), torch.ones(3 + rank)),
        lambda shared: shared.reduce_scatter(torch.ones(3 + rank), torch.ones(2, 3 + rank)),
    ]
    if rank == 0:
        different.append(lambda shared: shared.all_reduce(torch.ones(6)))
    else:
        different.append(lambda shared: shared.all_gather(torch.ones(2, 3), torch.ones(3)))
    for call in different:
        with pytest.raises(RuntimeError, match="tensors differ|has failed on some rank"):
            call(SharedMemoryAllReduce(timeout=30))


def tells_a_call_left_out():
    """A tensor that one rank alone has been refused."""
    shared = SharedMemoryAllReduce(timeout=30)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="needs 2 tensors of 3 elements"):
            shared.reduce_scatter(torch.ones(3), torch.ones(3, 3))
        shared.calls += 1
    with pytest.raises(RuntimeError, match="left out a call|has failed on some rank"):
        shared.all_reduce(torch.ones(24))


@pytest.mark.parametrize(
    "check",
    [
        is_broken_after_a_timeout,
        is_broken_after_an_interrupt,
        tells_different_calls,
        tells_a_call_left_out,
    ],
)
def test_no_rank_gets_a_wrong_sum(ranks, check):
    ranks(2).run(check)


@pytest.mark.parametrize("piece_bytes", [-64, 1, 100])
def test_a_wrong_piece(piece_bytes):
    with pytest.raises(ValueError, match=f"piece_bytes={piece_bytes} "):
        SharedMemory(dist.HashStore(), 0, 1, piece_bytes)


TIMEOUT = 2.0


def die(name, count):
    """Rank 1 is killed as it enters that function for the count-th time."""
    owners = [SharedMemory, shared_memory.Meeting, shared_memory]
    owner = next(owner for owner in owners if hasattr(owner, name))
    function = getattr(owner, name)
    entered = 0

    def counted(*arguments, **options):
        nonlocal entered
        entered += 1
        if entered == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    if dist.get_rank() == 1:
        setattr(owner, name, counted)
    all_reduce = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=TIMEOUT)
    for _ in range(3):
        all_reduce(torch.ones(3 * SMALL_PIECE))


MAKING = [("open_shared_memory", 1), ("together", 1), ("together", 2)]
CALLING = [("bring", 1), ("announce", 1), ("wait", 1), ("announce", 2), ("wait", 2), ("bring", 13)]
BETWEEN = [("all_reduce", 2)]
SLOW = [pytest.param(*moment, marks=slow) for moment in MAKING + CALLING + BETWEEN]


@pytest.mark.distributed
@pytest.mark.parametrize("name, count", [("wait", 4), *SLOW])
def test_killed_at_any_moment(name, count):
    """The others end with an error in time; no memory with a name stays, no process."""
    memory = names_in(SHARED_MEMORY)
    files = names_in(Path(tempfile.gettempdir()))
    group = Ranks(3)
    processes = group.processes
    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        group.run(die, name, count)
    took = time.monotonic() - began
    said = str(failure.value)
    assert "rank 1: EOFError" in said and "no answer" not in said, said
    assert "timed out: it waited 2 s for rank 1" in said, said
    assert took < TIMEOUT + 10, took
    assert not any(process.is_alive() for process in processes)
    assert not left_in(SHARED_MEMORY, memory)
    left = names_in(Path(tempfile.gettempdir())) - files
    assert not [file for file in left if "all-reduce" in file]


# The script


def test_script(forked, tmp_path):
    words = ["--nproc", "2", "--sizes-mb", "0.5,32", "--steps", "3", "--warmup", "1"]
    files = ["--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    status, output = forked(None, SCRIPT, *words, *files)
    assert status == 0, output
    begin = "verify: passed, 3 collectives of 8 lengths and 8 dtypes, bitwise gloo's results\n"
    assert output.startswith(begin)
    recorded = output_of(SCRIPT.with_name("reference_output.txt"))
    if torch.cuda.device_count() < 2:
        assert set(masked(recorded)) <= set(masked(output)), output
    assert (tmp_path / "a.png").exists()
    result = read_json(tmp_path / "a.json", "01_allreduce/shared_memory")
    rows = [row for row in result["rows"] if row["algorithm"] == "shared" and "wrong" in row]
    assert [row["wrong"] for row in rows] == [0, 0]


def test_bad_input_is_one_line(monkeypatch, capsys):
    harness.check_wrong_input(shared_memory.main, SCRIPT, "--nproc", "0", monkeypatch, capsys)


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)
