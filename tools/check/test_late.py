"""What the late network promises. That torch's own classes pass on it: test_check.py."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_unread_until_it_is_waited_for():
    """It is NaN; what was only given may be read; results are gloo's."""
    rank, options = dist.get_rank(), {"async_op": True}
    for dtype in (torch.float64, torch.bfloat16):
        reduced, sent = torch.full((2, 3), 1 + rank, dtype=dtype)
        gathered = torch.zeros(6, dtype=dtype)
        own = gathered[3 * rank :][:3].fill_(1 + rank)  # its input is a slice of its output
        works = [dist.all_reduce(reduced, **options), dist.broadcast(sent, 0, **options)]
        works.append(all_gather_single(gathered, own, **options))
        assert reduced.isnan().all() and own.isnan().all()
        assert sent.isnan().all() if rank == 1 else sent.tolist() == [1] * 3
        works[0].wait()
        works[1].get_future().wait()
        assert all(work.is_completed() for work in works)
        found = [tensor.tolist() for tensor in (reduced, sent, gathered)]
        assert found == [[3] * 3, [1] * 3, [1] * 3 + [2] * 3]


def tells_who_writes_into_a_tensor_on_its_way():
    """Also where NaN stays NaN, but not of another part of the same memory."""
    rank, options, flat = dist.get_rank(), {"async_op": True}, torch.ones(8)
    for is_wrong, launch, write in [
        (True, lambda: dist.all_reduce(flat, **options), lambda: flat.div_(2)),
        (False, lambda: dist.all_reduce(flat[:4], **options), lambda: flat[4:].zero_()),
        (rank == 0, lambda: dist.broadcast(flat, 0, **options), lambda: rank or flat.add_(1)),
    ]:
        work = launch()
        write()
        with pytest.raises(RuntimeError, match="was written") if is_wrong else nullcontext():
            work.wait()


@pytest.mark.parametrize(
    "promise", [is_unread_until_it_is_waited_for, tells_who_writes_into_a_tensor_on_its_way]
)
def test_promises(late_ranks, promise):
    late_ranks(2).run(promise)
