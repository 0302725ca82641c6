"""Tests of the emulated network: times as asked for, results as over gloo, nothing left behind."""

import gc
import os
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))

from slow_network import LONGEST_DELAY, read_network, wire

from tools.record import output_of
from tools import harness
from tools.harness import masked, read_json

SCRIPT = Path(__file__).with_name("slow_network.py")
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
MAXIMUM = dist.ReduceOp.MAX


def slow_group(network: str = "1gbit,1ms", **options):
    with_gloo = options | {"timeout": timedelta(seconds=options.get("timeout", 30))}
    group = dist.new_group(backend="slow_network", **with_gloo)
    wire.connect(network)
    wire.spans.clear()
    return group


def test_networks_are_read():
    assert read_network("1gbit,1ms") == (125e6, 1e-3)
    assert read_network("2.5gbit,200us") == pytest.approx((312.5e6, 2e-4))
    assert read_network("100mbit,0") == (12.5e6, 0)
    for text in ("1gbit", "1ms,1gbit", "0gbit,1ms", "1gbit,1", "-1gbit,1ms", "1..gbit,0"):
        with pytest.raises(ValueError, match="is not a rate and a delay"):
            read_network(text)


# Times. What is asked for is arithmetic, and checked as such; it must never be undercut.


def spans_of(elements: int, *groups) -> list[float]:
    """Launch an all-reduce in each of these groups: seconds until each of them is delivered."""
    wire.spans.clear()
    wire.free_at = 0.0
    works = []
    for group in groups:
        tensor = torch.ones(elements)
        works.append(dist.all_reduce(tensor, MAXIMUM, group=group, async_op=True))
    for work in works:
        work.wait()
        assert time.monotonic() >= work.delivered_at and work.is_completed()
    begin = works[0].last_launch.item()
    return [work.delivered_at - begin for work in works]


def takes_what_is_asked_for(network):
    group, another = slow_group(network), slow_group(network)
    rate, delay = read_network(network)
    world_size = dist.get_world_size()
    delays = 4 * (world_size - 1) * delay
    for elements in (2**10, 2**18):
        sent = 2 * (world_size - 1) / world_size * 4 * elements / rate
        assert spans_of(elements, group) == [pytest.approx(sent + delays, abs=1e-9)]
        for second_group in (group, another):  # they share the wire
            first, second = spans_of(elements, group, second_group)
            assert first == pytest.approx(sent + delays, abs=1e-9)
            assert second >= 2 * sent + delays - 1e-9  # its bytes queue behind the other's
    small = spans_of(1, *20 * [group])
    assert small[-1] >= 10 * delays  # two at a time, as gloo has two threads


@pytest.mark.parametrize("network", ["100mbit,0", "1gbit,1ms", "10gbit,10ms"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_take_what_is_asked_for(ranks, network, world_size):
    ranks(world_size).run(takes_what_is_asked_for, network)


def waits_for_the_last():
    """All are delivered by the launch of the one that comes late, at the same moment."""
    group = slow_group("1gbit,1ms")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.1)
    work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
    work.wait()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (work.launched_at, work.delivered_at))
    launches, deliveries = zip(*found, strict=True)
    assert max(launches) - min(launches) > 0.09
    assert max(deliveries) - min(deliveries) < 1e-6
    assert min(deliveries) >= max(launches) + 4e-3


def sleeps_meanwhile():
    """A rank that waits takes no part of a core."""
    group = slow_group("10mbit,1ms")
    tensor = torch.ones(2**18)
    dist.barrier()
    seconds, cpu = time.perf_counter(), time.process_time()
    dist.all_reduce(tensor, group=group)
    seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
    assert seconds > 0.8 and cpu < 0.05 * seconds, (seconds, cpu)


def is_gloo_until_it_is_slow():
    group = slow_group("1mbit,1s")
    wire.is_slow = False
    began = time.monotonic()
    dist.all_reduce(torch.ones(2**20), group=group)
    assert time.monotonic() - began < 10 and not wire.spans


def names_a_late_rank():
    """Gloo's own time-out, and its error."""
    group = slow_group(timeout=1)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3), group=group)
        future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        with pytest.raises(RuntimeError):
            future.wait()
    dist.barrier()


def leaves_nothing():
    """No thread and no file of a group that is left, and no tensor of a call that is over."""

    def count():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = count()
    group = slow_group()
    dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()
    assert not wire.pending
    dist.destroy_process_group(group)
    del group
    deadline = time.monotonic() + 10  # gloo's threads close their files when they end
    while any(now > then for now, then in zip(count(), before, strict=True)):
        assert time.monotonic() < deadline, (before, count())


@contextmanager
def late():
    wire.is_late = True
    yield
    wire.is_late = False


def is_unread(tensor):
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.isnan().all()
    return (tensor == torch.iinfo(tensor.dtype).max).all()


def is_unread_until_it_is_waited_for():
    """NaN, or the largest whole number; what was only given may be read; results are gloo's."""
    group, rank = slow_group(), dist.get_rank()
    options = {"group": group, "async_op": True}
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8):
        reduced, sent, received, read = torch.full((4, 3), 1 + rank, dtype=dtype)
        gathered, parts = torch.zeros(6, dtype=dtype), [*torch.zeros(2, 3, dtype=dtype)]
        own = gathered[3 * rank :][:3].fill_(1 + rank)  # its input is a slice of its output
        with late():
            works = [dist.all_reduce(reduced, **options), dist.broadcast(sent, 0, **options)]
            works += [all_gather_single(gathered, own, **options)]
            works += [dist.all_gather(parts, read, **options)]
            works += [dist.reduce(received, 1, **options)]
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
    group, rank = slow_group(), dist.get_rank()
    options = {"group": group, "async_op": True}
    flat = torch.ones(8)
    with late():
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
    group, delays = slow_group(), []
    with late():
        for _ in range(9):
            work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
            delays.append(work.delivered_at - work.launched_at)
            work.wait()
            assert time.monotonic() >= work.delivered_at
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, delays)
    assert len(set(sum(of_ranks, []))) == 18 and max(delays) < LONGEST_DELAY


def carries_dtensors():
    mesh = DeviceMesh.from_group(slow_group(), "cpu")
    whole = torch.arange(12.0).view(6, 2)
    shards = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal((shards + shards).full_tensor(), 2 * whole)
    assert shards.sum().full_tensor() == whole.sum()


PROMISES = [
    waits_for_the_last,
    sleeps_meanwhile,
    is_gloo_until_it_is_slow,
    names_a_late_rank,
    is_unread_until_it_is_waited_for,
    tells_who_writes_into_a_tensor_on_its_way,
    delivers_after_delays_of_its_own,
    carries_dtensors,
]
if sys.platform == "linux":  # it has /proc
    PROMISES += [leaves_nothing]


@pytest.mark.parametrize("promise", PROMISES)
def test_promises(ranks, promise):
    ranks(2).run(promise)


# Results


def ddp(module, group):
    return DistributedDataParallel(module, process_group=group)


def with_power_sgd(module, group):
    """A hook whose callbacks make calls, and wait for them."""
    model = ddp(module, group)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def sharded(module, group):
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)
    return fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)


WRAPS = {"join": ddp, "ZeRO": ddp, "PowerSGD": with_power_sgd, "fully_shard": sharded}


def trained(name, group) -> torch.Tensor:
    """The outputs of a model after a few steps, each rank with a batch of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10)]
    model = WRAPS[name](nn.Sequential(*layers).double(), group)
    adam = torch.optim.Adam
    if name == "ZeRO":
        adam = partial(ZeroRedundancyOptimizer, optimizer_class=adam, process_group=group)
    optimizer = adam(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    with model.join() if name == "join" else nullcontext():
        for _ in range(3 + dist.get_rank() if name == "join" else 4):
            model(torch.randn(8, 20).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.manual_seed(0)
    model.eval()
    return model(torch.randn(8, 20).double()).detach()


def distance(name, context) -> float:
    """How far apart training ends over the network and over gloo."""
    slow = slow_group("1gbit,200us")
    with context():
        found = trained(name, slow)
    return (found - trained(name, dist.new_group(backend="gloo"))).abs().max().item()


@pytest.mark.parametrize("context", [nullcontext, late])
@pytest.mark.parametrize("name", WRAPS)
def test_training_ends_where_it_does_over_gloo(ranks, name, context):
    """So the network that is late asks nothing that torch's own classes do not do."""
    assert ranks(2).run(distance, name, context) == [0.0, 0.0]


# Scripts


def test_script(forked, tmp_path):
    status, output = forked(2, SCRIPT, "--json", tmp_path / "a.json")
    assert status == 0, output
    assert masked(output) == masked(output_of(SCRIPT.with_name("reference_output.txt")))
    result = read_json(tmp_path / "a.json", "01_allreduce/slow_network")
    assert result["backend"] == "gloo" and result["network"] == "1gbit,1ms"
    for row in result["rows"]:
        assert row["wrong"] == 0
        assert min(map(min, row["seconds"])) >= row["expected_seconds"]


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)
