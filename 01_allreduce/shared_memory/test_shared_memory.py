"""Tests of the collectives through shared memory: late and dying ranks, nothing left.

test_allreduce.py has what it shares with the other two.
"""

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
from common.testing.harness import SHARED_MEMORY, left_in, masked, names_in, read_json
from common.testing.processes import Ranks

SCRIPT = Path(__file__).with_name("shared_memory.py")


def wrong_in_many_calls(stores_in_order):
    """Wrong elements over more calls than a flag counts, of all sizes; now and then a rank is late.

    Every other one is a reduce-scatter: with no all-gather between, two sets of slots have to do.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    shared = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=30)
    pattern = torch.arange(5000.0)
    wrong = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "STORES_IN_ORDER", stores_in_order)
        for call in range(300):
            if call % 30 == rank:
                time.sleep(0.02)
            mine = pattern[call : call * 16 + 1] + rank
            expected = world_size * pattern[call : call * 16 + 1] + sum(range(world_size))
            if call % 2 == 0:
                shared(mine)
            else:
                shared.reduce_scatter(mine, mine.repeat(world_size))
            wrong += (mine != expected).sum().item()
    return wrong


@pytest.mark.parametrize("stores_in_order", [True, False])
def test_call_after_call(ranks, stores_in_order):
    """Nothing but the flags keeps the ranks together; and the fence, on other processors."""
    assert ranks(3).run(wrong_in_many_calls, stores_in_order) == [0] * 3


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


def refusal(sizes, is_hidden=False):
    """What a rank is told that gets no memory. Rank 1 may be in a container of its own."""

    def finds_nothing(path, mode):
        raise FileNotFoundError(path)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as error:
        if is_hidden:
            patch.setattr(shared_memory, "open", finds_nothing, raising=False)
        SharedMemoryAllReduce(piece_bytes=sizes[dist.get_rank()])
    return str(error.value)


SIZES = [[64, 64], True, "rank 1: /"], [[128, 256], False, " bytes that it needs"]


@pytest.mark.parametrize("sizes, is_hidden, problem", SIZES)
def test_a_problem_of_one_rank_is_a_line_on_all(ranks, sizes, is_hidden, problem):
    before = names_in(SHARED_MEMORY)
    for message in ranks(2).run(refusal, sizes, is_hidden):
        assert message.startswith("no shared memory: rank 1: ") and problem in message
        assert "\n" not in message
    assert not left_in(SHARED_MEMORY, before)


@pytest.mark.skipif(not SHARED_MEMORY.exists(), reason="asks for more than it has")
def test_too_little_memory_is_an_error_at_once(ranks):
    """And not a SIGBUS in a later call."""
    free = os.statvfs(SHARED_MEMORY)
    too_much = free.f_blocks * free.f_frsize
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


def tells_different_calls():
    """Other lengths and dtypes, sum and mean, wrong parts, another collective, a call left out."""
    rank = dist.get_rank()

    def leaves_one_out(shared):
        shared.calls += rank
        shared.all_reduce(torch.ones(6))

    def calls_another(shared):
        if rank == 0:
            shared.all_reduce(torch.ones(3))
        else:
            shared.reduce_scatter(torch.ones(3), torch.ones(6))

    different = [
        lambda shared: shared.all_reduce(torch.ones(6 * rank)),
        lambda shared: shared.all_reduce(torch.ones(6, dtype=[torch.int32, torch.float32][rank])),
        lambda shared: shared.all_reduce(torch.ones(6), mean=rank == 1),
        lambda shared: shared.all_gather(torch.ones(6 + 2 * rank), torch.ones(3 + rank)),
        lambda shared: shared.reduce_scatter(torch.ones(3), torch.ones(6 + rank)),
        calls_another,
        leaves_one_out,
    ]
    for call in different:
        shared = SharedMemoryAllReduce(timeout=30)
        with pytest.raises(RuntimeError, match="tensors differ|it needs|has failed on some rank"):
            call(shared)
        with pytest.raises(RuntimeError, match="has failed on some rank"):
            shared.all_reduce(torch.ones(6))


@pytest.mark.parametrize("check", [is_broken_after_a_timeout, tells_different_calls])
def test_no_rank_gets_a_wrong_sum(ranks, check):
    ranks(2).run(check)


def die(name, count, timeout):
    """Rank 1 is killed as it enters that function for the count-th time."""
    owner = SharedMemory if hasattr(SharedMemory, name) else shared_memory
    function = getattr(owner, name)
    entered = 0

    def counted(*arguments):
        nonlocal entered
        entered += 1
        if entered == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    if dist.get_rank() == 1:
        setattr(owner, name, counted)
    all_reduce = SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=timeout)
    for _ in range(3):
        all_reduce(torch.ones(3 * SMALL_PIECE))


SLOW = [("_slot", 1), ("all_reduce", 2), ("open_shared_memory", 1)]
SLOW = [pytest.param(*moment, marks=pytest.mark.full) for moment in SLOW]


@pytest.mark.parametrize("name, count", [("_wait_for", 3), *SLOW])
def test_killed_at_any_moment(name, count):
    """The others end with an error, at once when it was made; no memory stays, no process."""
    memory = names_in(SHARED_MEMORY)
    is_made = name != "open_shared_memory"
    group = Ranks(3)
    processes = group.processes
    with pytest.raises(pytest.fail.Exception) as failure:
        group.run(die, name, count, 300 if is_made else 2)
    said = str(failure.value)
    assert "rank 1: EOFError" in said and "no answer" not in said, said
    message = "rank 1 has ended" if is_made else "timed out: it waited 2 s for rank 1"
    assert message in said, said
    assert not any(process.is_alive() for process in processes)
    assert not left_in(SHARED_MEMORY, memory)


# The script


def test_script(forked, tmp_path):
    words = ["--nproc", "2", "--sizes-mb", "0.5,32", "--steps", "3", "--warmup", "1", "--no-plot"]
    status, output = forked(None, SCRIPT, *words, "--json", tmp_path / "a.json")
    assert status == 0, output
    assert output.startswith("verify: passed, sums of 8 lengths and 8 dtypes, bitwise gloo's\n")
    recorded = output_of(SCRIPT.with_name("reference_output.txt")).partition("\nmodel")[0]
    if torch.cuda.device_count() < 2:
        assert set(masked(recorded)) <= set(masked(output)), output
    result = read_json(tmp_path / "a.json", "01_allreduce/shared_memory")
    rows = [row for row in result["rows"] if row["algorithm"] == "shared"]
    assert [row["wrong"] for row in rows] == [0, 0]


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)
