"""Tests of the emulated network: times as asked for, results as over gloo, nothing left behind."""

import re
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from network import read_network, wire
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

SCRIPT = Path(__file__).with_name("slow_network.py")
OVER = Path(__file__).with_name("over.py")
MAXIMUM = dist.ReduceOp.MAX


def slow_group(network: str = "1gbit,1ms", timeout: float = 30, stretch: float = 1.0):
    wire.connect(network, stretch)
    wire.spans.clear()
    return dist.new_group(backend="slow_network", timeout=timedelta(seconds=timeout))


# Times. What is asked for is arithmetic, and checked as such; it must never be undercut.


def times_of(elements: int, *groups) -> list[float]:
    """Launch an all-reduce in each of these groups: seconds until each of them is delivered."""
    wire.free_at = 0.0
    works = []
    with wire:
        for group in groups:
            tensor = torch.ones(elements)
            works.append(dist.all_reduce(tensor, MAXIMUM, group=group, async_op=True))
    for work in works:
        work.wait()
        assert time.monotonic() >= work.delivered_at and work.is_completed()
    assert not wire.pending
    return [work.delivered_at - works[0].last_launch.item() for work in works]


def takes_what_is_asked_for(network, stretch):
    group = slow_group(network, stretch=stretch)
    another = slow_group(network, stretch=stretch)
    rate, delay, calls_at_once = read_network(network)
    world_size = dist.get_world_size()
    delays = 4 * (world_size - 1) * delay * stretch
    for elements in (2**10, 2**18):
        sent = 2 * (world_size - 1) / world_size * 4 * elements / rate * stretch
        for second_group in (group, another):  # they share the wire
            first, second = times_of(elements, group, second_group)
            assert first == pytest.approx(sent + delays, abs=1e-9)
            assert second >= 2 * sent + delays - 1e-9  # its bytes queue behind the other's
    *_, last = times_of(1, *10 * [group])
    assert last >= 10 / calls_at_once * delays


@pytest.mark.parametrize(
    "world_size, network, stretch",
    [(2, "100mbit,0", 1.0), (2, "10gbit,10ms,2", 1.0), (4, "1gbit,1ms,2", 2.0)],
)
def test_calls_take_what_is_asked_for(ranks, world_size, network, stretch):
    ranks(world_size).run(takes_what_is_asked_for, network, stretch)


def keeps_pace():
    """The stretch is the median of the last three steps, the mean of all ranks, by the pace."""
    rank = dist.get_rank()
    wire.connect("1gbit,1ms")
    wire.pace = 0.4
    stretches = []
    for seconds in (0.8, 2.0, 1.0, 1.2):
        wire.keep_pace(seconds + 0.2 * (-1) ** rank)
        stretches.append(wire.stretch)
    assert stretches == pytest.approx([2.0, 3.5, 2.5, 3.0])
    transfer, delays = wire.cost("allreduce", 125_000_000, 2)
    assert (transfer, delays) == pytest.approx((3.0, 3 * 0.004))


def test_the_network_keeps_pace_with_the_machine(ranks):
    ranks(2).run(keeps_pace)


def delays_collectives():
    """reduce and broadcast, too; and nothing outside of the wire."""
    group = slow_group("1gbit,20ms")
    with wire:
        for call in (partial(dist.reduce, dst=0), partial(dist.broadcast, src=0)):
            start = time.monotonic()
            call(torch.ones(3), group=group)
            assert time.monotonic() - start >= 0.04
    start = time.monotonic()
    dist.all_reduce(torch.ones(3), group=group)
    assert time.monotonic() - start < 0.04


def waits_for_the_last():
    """All are delivered by the launch of the one that comes late, at the same moment."""
    group = slow_group()
    dist.barrier()
    time.sleep(0.1 * dist.get_rank())
    with wire:
        work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
    work.wait()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (work.launched_at, work.delivered_at))
    launches, deliveries = zip(*found, strict=True)
    assert max(deliveries) - min(deliveries) < 1e-6
    assert min(deliveries) >= max(launches) + 4e-3 > min(launches) + 0.09


def raises_what_gloo_raises():
    group = slow_group(timeout=1)
    if dist.get_rank() == 0:
        with wire, pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3), group=group)
        with wire, pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()
    dist.barrier()


def test_collectives_are_slow_once_all_ranks_are_there_and_fail_as_over_gloo(ranks):
    for promise in (delays_collectives, waits_for_the_last, raises_what_gloo_raises):
        ranks(2).run(promise)


# Results


def trained(group) -> torch.Tensor:
    """The outputs after a few steps of DDP, with a hook whose callbacks make calls, and wait."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers).double(), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    adam = torch.optim.Adam
    optimizer = ZeroRedundancyOptimizer(model.parameters(), adam, process_group=group, lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        model(torch.randn(8, 20).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    model.eval()
    return model(torch.randn(8, 20).double()).detach()


def distance() -> float:
    """How far apart training ends over the network and over gloo."""
    slow = slow_group("1gbit,200us")
    with wire:
        found = trained(slow)
    return (found - trained(dist.new_group(backend="gloo"))).abs().max().item()


def test_training_ends_where_it_does_over_gloo(ranks):
    assert ranks(2).run(distance) == [0.0, 0.0]


def test_script(forked):
    status, output = forked(2, OVER, "1gbit,5ms", SCRIPT, "--sizes-mb", "0.001,1")
    assert status == 0, output
    ratios = [float(ratio) for ratio in re.findall(r"^\d × .* (\S+) +0$", output, re.M)]
    assert len(ratios) == 4 and 1 <= min(ratios) and max(ratios) < 2, output  # 0 are wrong


@pytest.mark.parametrize("text", ["fast", "1gbit", "1gbit,1", "1gbit,1ms,3", "0gbit,1ms"])
def test_a_network_that_is_none_is_one_line(forked, text):
    status, output = forked(2, OVER, text, SCRIPT)
    assert status == 2 and output.count("error: ") == output.count("\n") == 1, output
    assert repr(text) in output, output
