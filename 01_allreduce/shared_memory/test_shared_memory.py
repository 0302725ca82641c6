"""Tests of the collectives through shared memory: late and dying ranks, nothing left.

test_allreduce.py has what it shares with the other two.
"""

import mmap
import os
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import shared_memory
from shared_memory import SMALL_PIECE, SharedMemory, SharedMemoryAllReduce

from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import SHARED_MEMORY, Ranks, left_in, masked, names_in, read_json

SCRIPT = Path(__file__).with_name("shared_memory.py")
slow = pytest.mark.full


# Sums


def wrong_in_many_calls(calls, late):
    """Wrong elements over calls of all sizes, to which a rank now and then comes late.

    Every other one is a reduce-scatter: with no all-gather between, two sets of slots have to do.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    shared = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=30)
    lengths = torch.randint(1, 5000, (calls,), generator=torch.Generator().manual_seed(0)).tolist()
    pattern = torch.arange(5000.0)
    wrong = 0
    for call, length in enumerate(lengths):
        if late and call % 10 == rank:
            time.sleep(0.02)
        tensor = pattern[:length] + rank + call
        if call % 2 == 0:
            shared(tensor)
        else:
            shared.reduce_scatter(tensor, [tensor.clone() for _ in range(world_size)])
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


# The memory


def names_and_mode(folder):
    """Of the file, once all ranks have it; without a /dev/shm it is in the temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        if folder:
            patch.setattr(os, "access", lambda *_: False)
            patch.setattr(tempfile, "tempdir", folder)
        shared = SharedMemoryAllReduce(timeout=30)
    shared(torch.ones(3))
    found = os.fstat(shared.file.fileno())
    return found.st_nlink, stat.S_IMODE(found.st_mode), os.listdir(folder) if folder else []


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_memory_loses_its_name(ranks, tmp_path, has_folder):
    folder = None if has_folder else str(tmp_path)
    assert ranks(2).run(names_and_mode, folder) == [(0, 0o600, [])] * 2


def refusal(sizes):
    with pytest.raises(RuntimeError) as error:
        SharedMemoryAllReduce(piece_bytes=sizes[dist.get_rank()])
    return str(error.value)


def refusal_of(rank, owner, name, error):
    """What is said where one rank has a problem, of any kind."""

    def fails(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(sys.modules[owner], name, fails, raising=False)
        return refusal([64, 64])


PROBLEMS = [(0, "mmap", "mmap", MemoryError()), (1, "mmap", "mmap", ValueError("mmap length"))]
PROBLEMS += [(0, "tempfile", "NamedTemporaryFile", PermissionError("not here"))]
PROBLEMS += [(1, "shared_memory", "open", FileNotFoundError("a container of its own"))]


@pytest.mark.parametrize("rank, owner, name, error", PROBLEMS)
def test_a_problem_of_one_rank_is_an_error_on_all(ranks, rank, owner, name, error):
    for message in ranks(2).run(refusal_of, rank, owner, name, error):
        said = str(error) or type(error).__name__
        assert message.startswith("no shared memory: ") and f"rank {rank}: {said}" in message
        assert "\n" not in message


@pytest.mark.parametrize("sizes", [[128, 256], [256, 128]])
def test_ranks_that_want_different_sizes(ranks, sizes):
    for message in ranks(2).run(refusal, sizes):
        assert "no shared memory: rank 1: " in message and " bytes that it needs" in message


@pytest.mark.skipif(not SHARED_MEMORY.exists(), reason="asks for more than it has")
def test_too_little_memory_is_an_error_at_once(ranks):
    """And not a SIGBUS in a later call."""
    free = os.statvfs(SHARED_MEMORY)
    too_much = free.f_blocks * free.f_frsize // 64 * 64
    before = names_in(SHARED_MEMORY)
    for message in ranks(2).run(refusal, [too_much, too_much]):
        assert "rank 0: [Errno 28] No space left on device" in message
    assert not left_in(SHARED_MEMORY, before)


# Errors


def is_broken_after_a_timeout():
    """Rank 1 is late; neither it nor a second try of rank 0 gets a sum."""
    all_reduce = SharedMemoryAllReduce(timeout=0.2)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="timed out: it waited 0.2 s for rank 1"):
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
        shared._meet = interrupted
        with pytest.raises(KeyboardInterrupt):
            shared.all_reduce(torch.ones(6))
        del shared._meet
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a call has failed on some rank"):
            shared.all_reduce(torch.ones(6))


def tells_different_calls():
    """Other lengths, also 0, other dtypes, another collective, sum and mean, a call left out."""
    rank = dist.get_rank()

    def leaves_one_out(shared):
        shared.calls += rank
        shared.all_reduce(torch.ones(6))

    different = [
        leaves_one_out,
        lambda shared: shared.all_reduce(torch.ones(6 + rank)),
        lambda shared: shared.all_reduce(torch.ones(6 * rank)),
        lambda shared: shared.all_reduce(torch.ones(6, dtype=[torch.int32, torch.float32][rank])),
        lambda shared: shared.all_reduce(torch.ones(6), mean=rank == 1),
        lambda shared: shared.all_gather(torch.ones(2, 3 + rank), torch.ones(3 + rank)),
        lambda shared: shared.reduce_scatter(torch.ones(3 + rank), torch.ones(2, 3 + rank)),
        lambda shared: [shared.all_reduce, shared.reduce_scatter][rank](
            torch.ones(3), *[torch.ones(2, 3)] * rank
        ),
    ]
    for call in different:
        shared = SharedMemoryAllReduce(timeout=30)
        with pytest.raises(RuntimeError, match="tensors differ|has failed on some rank"):
            call(shared)
        with pytest.raises(RuntimeError, match="has failed on some rank"):
            shared.all_reduce(torch.ones(6))


def refuses_before_it_begins():
    """Wrong lists, and what is not on the CPU; the next call is none the worse."""
    shared = SharedMemoryAllReduce(timeout=30)
    with pytest.raises(RuntimeError, match="needs 2 tensors of 3 elements"):
        shared.reduce_scatter(torch.ones(3), torch.ones(3, 3))
    with pytest.raises(RuntimeError, match="no place for meta"):
        shared.all_reduce(torch.ones(3, device="meta"))
    tensor = torch.ones(3)
    shared.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


def hears_that_a_rank_has_let_go():
    """At once, and not after the timeout."""
    shared = SharedMemoryAllReduce(timeout=300)
    shared.all_reduce(torch.ones(3))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            shared.all_reduce(torch.ones(3))


CHECKS = [is_broken_after_a_timeout, is_broken_after_an_interrupt, tells_different_calls]
CHECKS += [refuses_before_it_begins, hears_that_a_rank_has_let_go]


@pytest.mark.parametrize("check", CHECKS)
def test_no_rank_gets_a_wrong_sum(ranks, check):
    ranks(2).run(check)


@pytest.mark.parametrize("piece_bytes", [-64, 1, 100])
def test_a_wrong_piece(piece_bytes):
    with pytest.raises(ValueError, match=f"piece_bytes={piece_bytes} "):
        SharedMemory(dist.HashStore(), 0, 1, piece_bytes)


def die(name, count, timeout):
    """Rank 1 is killed as it enters that function for the count-th time."""
    owner = next(owner for owner in (SharedMemory, mmap, shared_memory) if hasattr(owner, name))
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
    all_reduce = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=timeout)
    for _ in range(3):
        all_reduce(torch.ones(3 * SMALL_PIECE))


CALLING = [("_slot", 1), ("_meet", 1), ("_wait_for", 1), ("_meet", 2), ("_wait_for", 4)]
CALLING += [("_slot", 13), ("all_reduce", 2)]
MAKING = [("open_shared_memory", 1), ("mmap", 1)]
SLOW = [pytest.param(*moment, marks=slow) for moment in CALLING + MAKING]


@pytest.mark.distributed
@pytest.mark.parametrize("name, count", [("_wait_for", 3), *SLOW])
def test_killed_at_any_moment(name, count):
    """The others end with an error, at once when it was made; no memory stays, no process."""
    memory = names_in(SHARED_MEMORY)
    is_made = (name, count) not in MAKING
    group = Ranks(3)
    processes = group.processes
    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        group.run(die, name, count, 300 if is_made else 2)
    took = time.monotonic() - began
    said = str(failure.value)
    assert "rank 1: EOFError" in said and "no answer" not in said, said
    message = "rank 1 has ended" if is_made else "timed out: it waited 2 s for rank 1"
    assert message in said, said
    assert took < 12, took
    assert not any(process.is_alive() for process in processes)
    assert not left_in(SHARED_MEMORY, memory)


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
