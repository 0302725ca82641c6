"""Tests of the emulated network: times as asked for, results as over gloo, nothing left behind."""

import re
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from network import emulated, read_network, wire
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tools.testing import ONLY_RANK

SCRIPT = Path(__file__).with_name("slow_network.py")
OVER = Path(__file__).with_name("over.py")
MAXIMUM = dist.ReduceOp.MAX


def slow_group(network: str = "1gbit,1ms", timeout: float = 150, stretch: float = 1.0):
    wire.spans.clear()
    with emulated(network, stretch):
        return dist.new_group(timeout=timedelta(seconds=timeout))


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
    return [work.delivered_at - works[0].last_launch() for work in works]


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
    if calls_at_once == 2:  # the first keeps its place for as long as the second sends its bytes
        times_of(2**18, group, group, group)
        first, second, third = list(wire.spans)[-3:]
        if second.begins < first.delivered:  # unless this machine was too busy to launch it
            assert third.delivered >= first.delivered + 2 * sent + delays - 1e-9
    *_, last = times_of(1, *10 * [group])
    assert last >= 10 / calls_at_once * delays


@pytest.mark.parametrize(
    "world_size, network, stretch",
    [(2, "100mbit,0", 1.0), (2, "10gbit,10ms,2", 1.0), (4, "1gbit,1ms,2", 2.0)],
)
def test_calls_take_what_is_asked_for(ranks, world_size, network, stretch):
    ranks(world_size).run(takes_what_is_asked_for, network, stretch)


def follows_the_machine():
    """The stretch is the median of the last three steps, the mean of all ranks, by the pace."""
    here = iter([0.8, 0.8, 0.8, 0.8, 2.0, 1.0, 1.2])

    def floor():
        return {"step_seconds": (next(here) + 0.2 * (-1) ** dist.get_rank()) / wire.stretch}

    wire.connect("1gbit,1ms")
    step = wire.paced(floor, 0.4)
    stretches = [wire.stretch]
    for _ in range(3):
        step()
        stretches.append(wire.stretch)
    assert stretches == pytest.approx([2.0, 2.0, 2.5, 3.0])
    transfer, delays = wire.cost("allreduce", 125_000_000, 2)
    assert (transfer, delays) == pytest.approx((3.0, 3 * 0.004))


def test_the_network_keeps_pace_with_the_machine(ranks):
    ranks(2).run(follows_the_machine)


def delays_collectives():
    """Those of one round, too; and nothing outside of the wire."""
    group = slow_group("1gbit,20ms")
    several = [torch.ones(3), torch.ones(3)]
    on_rank_0 = several if dist.get_rank() == 0 else None
    calls = [
        partial(dist.reduce, torch.ones(3), dst=0),
        partial(dist.broadcast, torch.ones(3), src=0),
        partial(dist.gather, torch.ones(3), on_rank_0, dst=0),
        partial(dist.scatter, torch.ones(3), on_rank_0, src=0),
        partial(dist.all_gather, several, torch.ones(3)),
        dist.barrier,
    ]
    with wire:
        for call in calls:
            start = time.monotonic()
            call(group=group)
            assert time.monotonic() - start >= 0.04, call
    dist.all_reduce(torch.ones(3), group=group)
    assert len(wire.spans) == len(calls)  # this one was not on the wire


def passes_around(tensor: torch.Tensor, group) -> None:
    """All-reduce by send and recv: every tensor goes round the whole ring."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    passed = tensor.clone()
    for _ in range(world_size - 1):
        theirs = torch.empty_like(passed)
        receiving = dist.irecv(theirs, group=group, group_src=(rank - 1) % world_size)
        sending = dist.isend(passed, group=group, group_dst=(rank + 1) % world_size)
        receiving.wait()
        sending.wait()
        tensor += theirs
        passed = theirs


def prices_messages():
    """A round of messages takes two delays and its bytes, in both directions at once."""
    group = slow_group("100mbit,10ms")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((2**15,), rank + 1.0)
    dist.barrier()
    start = time.monotonic()
    with wire:
        passes_around(tensor, group)
    requested = (world_size - 1) * (2 * 0.010 + tensor.nbytes / 12.5e6)
    assert time.monotonic() - start >= requested - 1e-3
    assert (tensor == sum(range(world_size + 1))).all()
    assert {span.name for span in wire.spans} == {"send", "recv"}
    carried = [span.delivered - span.begins for span in wire.spans]
    assert carried == pytest.approx([requested / (world_size - 1)] * len(carried))
    with wire, pytest.raises(RuntimeError, match="without a source"):
        dist.recv(tensor, group=group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_are_priced(ranks, world_size):
    ranks(world_size).run(prices_messages)


def waits_for_the_last():
    """All are delivered by the launch of the one that comes late, at the same moment."""
    group = slow_group()
    if dist.get_rank() > 0:
        dist.barrier()  # rank 0 launches first
    with wire:
        work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
    if dist.get_rank() == 0:
        dist.barrier()
    work.wait()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (work.launched_at, work.delivered_at))
    launches, deliveries = zip(*found, strict=True)
    assert max(deliveries) - min(deliveries) < 1e-6
    assert min(deliveries) >= max(launches) + 4e-3 and launches[0] < launches[1]


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
    assert len(ratios) == 4 and min(ratios) >= 1, output  # and 0 are wrong


# over.py: a script that knows nothing of it

OF_EVERY_KIND = """
import sys, time
import torch
import torch.distributed as dist
from torch.distributed import init_process_group  # by name
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import network  # the script's own

kind = sys.argv[1]
group = None
if kind == "nothing":
    init_process_group()
elif kind == "two":
    init_process_group("cpu:gloo,cuda:nccl")
elif kind == "mesh":
    group = init_device_mesh("cpu", (2,)).get_group()
else:
    init_process_group("gloo")
    assert dist.get_backend() == "gloo"
if kind == "new":
    group = dist.new_group(backend="gloo")
if kind == "sub":
    group = dist.new_group([0, 1])
layer = torch.nn.Linear(3, 3)
wrapped = layer
if kind == "fully_shard":
    fully_shard(layer)
else:
    wrapped = DistributedDataParallel(layer, process_group=group)
start = time.monotonic()
wrapped(torch.ones(2, 3)).sum().backward()
print("a backward took", time.monotonic() - start, network.WHOSE, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["gloo", "nothing", "two", "new", "sub", "mesh", "fully_shard"])
def test_every_kind_of_group_is_slow(forked, tmp_path, kind):
    """An all-reduce takes four delays; all that the script imports are its own modules."""
    (tmp_path / "train.py").write_text(OF_EVERY_KIND)
    (tmp_path / "network.py").write_text("WHOSE = 'mine'")
    status, output = forked(2, OVER, "1gbit,50ms", tmp_path / "train.py", kind, cwd=tmp_path)
    seconds = re.findall(r"a backward took (\S+) mine", output)
    assert status == 0 and len(seconds) == 2, output
    assert min(map(float, seconds)) >= 0.2


def test_a_module_of_a_package_and_its_error(forked, tmp_path):
    """Relative imports work; what the script raises is shown, and ends the run."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "helper.py").write_text("WHAT = 'my own mistake'")
    raises = "import sys\nfrom .helper import WHAT\nraise ValueError(WHAT, *sys.argv[1:])"
    (tmp_path / "mine" / "train.py").write_text(raises)
    status, output = forked(2, OVER, "1gbit,1ms", "-m", "mine.train", "--flag", cwd=tmp_path)
    assert status == 1 and "ValueError: ('my own mistake', '--flag')" in output, output


WITH_A_HOOK = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
work = dist.all_reduce(torch.ones(3), async_op=True)
work.get_future().then(lambda _: time.sleep(0.05))
work.wait()
dist.destroy_process_group()
"""


def test_a_script_may_end_while_a_hook_still_runs(launched, tmp_path):
    """Python aborts when it ends while a thread of ours is within torch's C++."""
    (tmp_path / "train.py").write_text(WITH_A_HOOK)
    status, output = launched(2, OVER, "100mbit,1ms", tmp_path / "train.py")
    assert status == 0 and "terminate" not in output, output


NOT_EMULATED = {
    "fast": "'fast'",
    "1gbit": "'1gbit'",
    "1gbit,1ms,3": "'1gbit,1ms,3'",
    "0gbit,1ms": "'0gbit,1ms'",
    "1gbit,1ms": "NCCL",
}


@pytest.mark.parametrize("text", NOT_EMULATED)
def test_what_cannot_be_emulated_is_one_line(forked, tmp_path, text):
    nccl = "import torch.distributed as dist\ndist.init_process_group('nccl')"
    (tmp_path / "train.py").write_text(nccl)
    status, output = forked(2, OVER, text, tmp_path / "train.py")
    assert status == 2 and output.count("error: ") == output.count("\n") == 1, output
    assert NOT_EMULATED[text] in output


@pytest.mark.parametrize(
    "environment, said",
    [({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "2 of 4 ranks"), ({"RANK": ""}, "torchrun")],
)
def test_over_runs_under_torchrun_on_one_host(script, environment, said):
    environment = ONLY_RANK | environment
    words = [f"{name}={value}" for name, value in environment.items() if value]
    unset = [f"--unset={name}" for name, value in environment.items() if not value]
    status, output = script(["env", *unset, *words, sys.executable, OVER, "1gbit,0", "x"]).wait()
    assert status == 2 and output.count("\n") == 1 and said in output, output
