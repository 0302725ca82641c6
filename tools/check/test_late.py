"""What the late network promises. That torch's own classes pass on it: test_check.py."""

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tools.check.late import LONGEST_DELAY

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_unread(tensor):
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.isnan().all()
    return (tensor == torch.iinfo(tensor.dtype).max).all()


def is_unread_until_it_is_waited_for():
    """NaN, or the largest whole number; what was only given may be read; results are gloo's."""
    rank, options = dist.get_rank(), {"async_op": True}
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8):
        reduced, sent, received, read = torch.full((4, 3), 1 + rank, dtype=dtype)
        gathered, parts = torch.zeros(6, dtype=dtype), [*torch.zeros(2, 3, dtype=dtype)]
        own = gathered[3 * rank :][:3].fill_(1 + rank)  # its input is a slice of its output
        works = [dist.all_reduce(reduced, **options), dist.broadcast(sent, 0, **options)]
        works += [all_gather_single(gathered, own, **options)]
        works += [dist.all_gather(parts, read, **options), dist.reduce(received, 1, **options)]
        assert all(map(is_unread, [reduced, own, *parts]))
        for tensor in (sent, received):
            assert is_unread(tensor) if rank == 1 else tensor.tolist() == [1] * 3
        works[0].wait()
        works[1].get_future().wait()
        while not all(work.is_completed() for work in works):
            pass
        found = [tensor.tolist() for tensor in (reduced, sent, received, gathered, *parts)]
        assert found == [[3] * 3, [1] * 3, [1 + 2 * rank] * 3, [1] * 3 + [2] * 3, [1] * 3, [2] * 3]


def tells_who_writes_into_a_tensor_on_its_way():
    """Also where NaN stays NaN, but not of another part of the same memory."""
    rank, options, flat = dist.get_rank(), {"async_op": True}, torch.ones(8)
    for is_wrong, launch, write in [
        (True, lambda: dist.all_reduce(flat, **options), lambda: flat.div_(2)),
        (True, lambda: dist.all_reduce(flat, **options), lambda: flat.data.zero_()),
        (True, lambda: dist.all_reduce(flat[:4], **options), lambda: flat[:1].zero_()),
        (False, lambda: dist.all_reduce(flat[:4], **options), lambda: flat[4:].zero_()),
        (rank == 0, lambda: dist.broadcast(flat, 0, **options), lambda: rank or flat.add_(1)),
    ]:
        work = launch()
        write()
        with pytest.raises(RuntimeError, match="was written") if is_wrong else nullcontext():
            work.wait()


def delivers_after_delays_of_its_own():
    """Others on every rank and in every call."""
    delays = []
    for _ in range(9):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        delays.append(work.delivered_at - work.launched_at)
        work.wait()
        assert time.monotonic() >= work.delivered_at
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, delays)
    assert len(set(sum(of_ranks, []))) == 18 and max(delays) < LONGEST_DELAY


def answers_gloo():
    assert dist.get_backend() == "gloo"
    assert dist.get_backend(dist.new_group()) == dist.Backend.GLOO
    assert dist.all_reduce(torch.ones(1), group=dist.new_group(), async_op=True).delivered_at


PROMISES = [is_unread_until_it_is_waited_for, tells_who_writes_into_a_tensor_on_its_way]
PROMISES += [delivers_after_delays_of_its_own, answers_gloo]


@pytest.mark.parametrize("promise", PROMISES)
def test_promises(late_ranks, promise):
    late_ranks(2).run(promise)
