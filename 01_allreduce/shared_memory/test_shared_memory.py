"""Tests of the all-reduce through shared memory: late and dying ranks, nothing left.

test_allreduce.py has what it shares with the other two.
"""

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import shared_memory
from shared_memory import SharedMemoryAllReduce

from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import masked, read_json

SCRIPT = Path(__file__).with_name("shared_memory.py")
SMALL_PIECE = 4096


def wrong_in_many_calls(stores_in_order):
    """Wrong elements over more calls than a flag counts; now and then a rank is late."""
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
            shared(mine)
            wrong += (mine != expected).sum().item()
    return wrong


@pytest.mark.parametrize("stores_in_order", [True, False])
def test_call_after_call(ranks, stores_in_order):
    """Nothing but the flags keeps the ranks together; and the fence, on other processors."""
    assert ranks(3).run(wrong_in_many_calls, stores_in_order) == [0] * 3


def is_broken_after_a_timeout():
    """Rank 1 is late; neither it nor a second try of rank 0 gets a sum."""
    all_reduce = SharedMemoryAllReduce(timeout=0.2)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="rank 0 timed out waiting for 1"):
            all_reduce(torch.ones(6))
    dist.barrier()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a call has failed on some rank"):
            all_reduce(torch.ones(6))


def tells_different_calls():
    """Another length, another dtype, a call left out."""
    rank = dist.get_rank()
    for tensor, calls in [
        (torch.ones(3 + rank), 0),
        (torch.ones(6, dtype=[torch.int32, torch.float32][rank]), 0),
        (torch.ones(6), rank),
    ]:
        shared = SharedMemoryAllReduce(timeout=30)
        shared.calls += calls
        for _ in range(2):
            with pytest.raises(RuntimeError, match="tensors differ|has failed on some rank"):
                shared(tensor)


@pytest.mark.parametrize("check", [is_broken_after_a_timeout, tells_different_calls])
def test_no_rank_gets_a_wrong_sum(ranks, check):
    ranks(2).run(check)


def test_script(forked, tmp_path):
    words = ["--nproc", "2", "--sizes-mb", "0.5,32", "--steps", "3", "--warmup", "1", "--no-plot"]
    status, output = forked(None, SCRIPT, *words, "--json", tmp_path / "a.json")
    assert status == 0, output
    recorded = output_of(SCRIPT.with_name("reference_output.txt")).partition("\nmodel")[0]
    if torch.cuda.device_count() < 2:
        assert set(masked(recorded)) <= set(masked(output)), output
    result = read_json(tmp_path / "a.json", "01_allreduce/shared_memory")
    rows = [row for row in result["rows"] if row["algorithm"] == "shared"]
    assert [row["wrong"] for row in rows] == [0, 0]


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)
