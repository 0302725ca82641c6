"""Tests of the emulated network: times as asked for, results as over gloo, nothing left behind."""

import os
import re
import shutil
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from slow_network import SlowProcessGroup, gloo_carried_by, network, read_network
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tools.testing import ONLY_RANK

SCRIPT = Path(__file__).with_name("slow_network.py")
MAXIMUM = dist.ReduceOp.MAX


def slow_group(text: str = "1gbit,1ms", timeout: float = 150, stretch: float = 1.0):
    network.spans.clear()
    network.connect(text)
    network.set_stretch(stretch)
    with gloo_carried_by("slow_network", SlowProcessGroup):
        return dist.new_group(timeout=timedelta(seconds=timeout))


# Times. What is asked for is arithmetic, and checked as such; it must never be undercut.


def times_of(elements: int, *groups) -> list[float]:
    """Launch an all-reduce in each of these groups: seconds until each of them is delivered."""
    network.free_at = 0.0
    works = []
    with network:
        for group in groups:
            tensor = torch.ones(elements)
            works.append(dist.all_reduce(tensor, MAXIMUM, group=group, async_op=True))
    for work in works:
        work.wait()
        assert time.monotonic() >= work.delivered_at and work.is_completed()
    assert not network.pending
    return [work.delivered_at - works[0].last_launch() for work in works]


def takes_what_is_asked_for(text, stretch):
    group = slow_group(text, stretch=stretch)
    another = slow_group(text, stretch=stretch)
    rate, delay = read_network(text)
    world_size = dist.get_world_size()
    delays = 4 * (world_size - 1) * delay * stretch
    for elements in (2**10, 2**18):
        sent = 2 * (world_size - 1) / world_size * 4 * elements / rate * stretch
        first, second = times_of(elements, group, group)
        assert first == pytest.approx(sent + delays, abs=1e-9)
        assert second >= 2 * (sent + delays) - 1e-9  # a group has one call under way at a time
        first, second = times_of(elements, group, another)
        assert first == pytest.approx(sent + delays, abs=1e-9)
        assert second >= 2 * sent + delays - 1e-9  # a rank sends one call after another


@pytest.mark.parametrize(
    "world_size, text, stretch",
    [(2, "100mbit,0", 1.0), (2, "10gbit,10ms", 1.0), (4, "1gbit,1ms", 2.0)],
)
def test_calls_take_what_is_asked_for(ranks, world_size, text, stretch):
    ranks(world_size).run(takes_what_is_asked_for, text, stretch)


def follows_the_machine():
    """The stretch is the median of the last three steps, the mean of all ranks, by the pace."""
    here = iter([0.8, 0.8, 0.8, 0.8, 2.0, 0.4, 0.4, 1.0])

    def floor():
        return {"step_seconds": (next(here) + 0.2 * (-1) ** dist.get_rank()) / network.stretch}

    network.connect("1gbit,1ms")
    step = network.paced(floor, 0.4)
    found = []
    for _ in range(4):
        step()
        found.append((network.stretch, network.lowest_stretch, network.highest_stretch))
    expected = [(2.0, 2.0, 2.0), (2.0, 2.0, 2.0), (1.0, 1.0, 2.0), (1.0, 1.0, 2.0)]
    assert found == [pytest.approx(each) for each in expected]
    network.set_stretch(3.0)
    assert network.price("allreduce", 125_000_000, 2) == pytest.approx((3.0, 3 * 0.004))


def test_the_network_keeps_pace_with_the_machine(ranks):
    ranks(2).run(follows_the_machine)


def prices_collectives():
    """Each takes its rounds, two delays long, and its share of the bytes; nothing else is slow."""
    group = slow_group("100mbit,10ms")
    world_size = dist.get_world_size()
    others = world_size - 1
    own = torch.ones(3000)
    all_ranks = torch.ones(3000 * world_size)
    pieces = list(torch.ones(world_size, 3000))
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls = [  # each with its rounds, and with the elements that a rank sends
        (partial(dist.all_reduce, own), 2 * others, 2 * others / world_size * 3000),
        (partial(dist.reduce, own, dst=0), 2 * others, 2 * others / world_size * 3000),
        (partial(dist.reduce_scatter, own, pieces), 2 * others, 2 * others * 3000),
        (partial(scatter_from, own, all_ranks), 2 * others, 2 * others * 3000),
        (partial(dist.all_gather, pieces, own), others, others * 3000),
        (partial(gather_into, all_ranks, own), others, others * 3000),
        (partial(dist.all_to_all_single, all_ranks, all_ranks + 1), others, others * 3000),
        (partial(dist.broadcast, own, src=0), others, 2 * others / world_size * 3000),
        (partial(dist.barrier), 1, 0),
    ]
    launched = network.calls
    for call, rounds, elements in calls:
        start = time.monotonic()
        with network:
            call(group=group)
        requested = 2 * rounds * 0.01 + 4 * elements / 12.5e6
        span = network.spans[-1]
        assert span.delivered - span.begins == pytest.approx(requested), span
        assert time.monotonic() - start >= requested - 1e-3, span
    dist.all_reduce(own, group=group)
    assert len(network.spans) == len(calls)  # this one was not on the network
    assert network.calls - launched == len(network.spans) + 1


def test_collectives_are_priced(ranks):
    ranks(3).run(prices_collectives)


def prices_messages():
    """A round of the ring takes two delays and its bytes, in both directions at once."""
    group = slow_group("100mbit,10ms")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    before = (rank - 1) % world_size
    after = (rank + 1) % world_size
    sent = torch.full((2**15,), float(rank))
    received = torch.empty_like(sent)
    launched = network.calls
    requested = 2 * 0.010 + sent.nbytes / 12.5e6
    dist.barrier()
    for _ in range(2):
        start = time.monotonic()
        with network:
            receiving = dist.irecv(received, group=group, group_src=before)
            sending = dist.isend(sent, group=group, group_dst=after)
            receiving.wait()
            sending.wait()
        assert time.monotonic() - start >= requested - 1e-3
        assert (received == before).all()
    assert {span.name for span in network.spans} == {"send", "recv"}
    carried = [span.delivered - span.begins for span in network.spans]
    assert carried == pytest.approx([requested] * 4)
    assert network.calls - launched == 4
    with network, pytest.raises(SystemExit):
        dist.recv(received, group=group)


def test_messages_are_priced(ranks):
    ranks(3).run(prices_messages)


def waits_for_the_last():
    """All are delivered by the launch of the one that comes late, at the same moment."""
    group = slow_group()
    if dist.get_rank() > 0:
        dist.barrier()  # rank 0 launches first
    with network:
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
        with network, pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


def test_collectives_wait_for_all_ranks_and_fail_as_over_gloo(ranks):
    for promise in (waits_for_the_last, raises_what_gloo_raises):
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
    with network:
        found = trained(slow)
    return (found - trained(dist.new_group(backend="gloo"))).abs().max().item()


def test_training_ends_where_it_does_over_gloo(ranks):
    assert ranks(2).run(distance) == [0.0, 0.0]


# The command


def test_it_measures_itself_and_what_is_there(forked):
    status, output = forked(2, SCRIPT, "1gbit,5ms")
    assert status == 0, output
    ratios = re.findall(r"^\d+ [kM]B .* (\S+)$", output, re.MULTILINE)
    assert len(ratios) == 3 and min(map(float, ratios)) >= 1, output
    status, output = forked(2, SCRIPT)
    assert status == 0 and len(re.findall(r"^\d+ [kM]B +\S+$", output, re.MULTILINE)) == 3


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
elif kind == "mesh":
    group = init_device_mesh("cpu", (2,)).get_group()
else:
    init_process_group("gloo")
    assert dist.get_backend() == "gloo"
if kind == "new":
    group = dist.new_group(backend="gloo")
layer = torch.nn.Linear(3, 3)
wrapped = layer
if kind == "fully_shard":
    fully_shard(layer)
else:
    wrapped = DistributedDataParallel(layer, process_group=group)
start = time.monotonic()
wrapped(torch.ones(2, 3)).sum().backward()
print(f"{network.WHOSE}: a backward took {time.monotonic() - start} s", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["nothing", "new", "mesh", "fully_shard"])
def test_every_kind_of_group_is_slow(forked, tmp_path, kind):
    """An all-reduce takes four delays; all that the script imports are its own modules."""
    (tmp_path / "train.py").write_text(OF_EVERY_KIND)
    (tmp_path / "network.py").write_text("WHOSE = 'mine'")
    status, output = forked(2, SCRIPT, "1gbit,50ms", tmp_path / "train.py", kind, cwd=tmp_path)
    seconds = re.findall(r"mine: a backward took (\S+)", output)
    assert status == 0 and len(seconds) == 2, output
    assert min(map(float, seconds)) >= 0.2


@pytest.mark.parametrize(
    "text, said", [("fast", "'fast'"), ("0gbit,1ms", "'0gbit,1ms'"), ("1gbit,1ms", "NCCL")]
)
def test_what_cannot_be_emulated_is_one_line(forked, tmp_path, text, said):
    nccl = "import torch.distributed as dist\ndist.init_process_group('nccl')"
    (tmp_path / "train.py").write_text(nccl)
    status, output = forked(2, SCRIPT, text, tmp_path / "train.py")
    assert status == 2 and output.count("error: ") == output.count("\n") == 1, output
    assert said in output


@pytest.mark.parametrize(
    "environment, words, said",
    [
        (ONLY_RANK | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ["x"], "2 of 4"),
        ({}, [], "torchrun"),
        ({}, ["-m"], "--help"),
        ({}, ["nowhere.py"], "nowhere.py"),
    ],
)
def test_wrong_command_lines_are_one_line(forked, environment, words, said):
    status, output = forked(None, SCRIPT, "1gbit,0", *words, **environment)
    assert status == 2 and output.count("\n") == 1 and said in output, output


ON_ONE_CORE = """
import os, time
import torch
import torch.distributed as dist

os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
dist.init_process_group()
start = time.monotonic()
dist.all_reduce(torch.ones(3))
print(f"an all-reduce took {time.monotonic() - start} s")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="macOS has no affinity")
def test_with_more_ranks_than_cores_all_is_slower_and_that_is_said(forked, tmp_path):
    """Once, of a module, too."""
    (tmp_path / "train.py").write_text(ON_ONE_CORE)
    status, output = forked(2, SCRIPT, "1gbit,50ms", "-m", "train", cwd=tmp_path)
    assert status == 0, output
    assert output.count("divide the times that the script prints by 2\n") == 1, output
    seconds = re.findall(r"an all-reduce took (\S+)", output)
    assert min(map(float, seconds)) >= 2 * 4 * 0.05


STARTS_RANKS = """
import os, socket, sys, time
import torch
import torch.distributed as dist

def train(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    start = time.monotonic()
    dist.all_reduce(torch.ones(3))
    print(f"an all-reduce took {time.monotonic() - start} s", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.start_processes(train, (port,), nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_copy_alone_makes_ranks_slow_that_a_script_starts(
    script, tmp_path, tmp_path_factory, method
):
    """No folder stays."""
    temporary = tmp_path_factory.mktemp("t")  # a forkserver's socket needs a short path
    (tmp_path / "train.py").write_text(STARTS_RANKS)
    copy = shutil.copy(SCRIPT, tmp_path)
    environment = {"TMPDIR": str(temporary)}
    words = [sys.executable, copy, "1gbit,50ms", "train.py", method]
    status, output = script(words, env=environment, cwd=tmp_path).wait()
    seconds = re.findall(r"an all-reduce took (\S+)", output)
    assert status == 0 and len(seconds) == 2, output
    assert min(map(float, seconds)) >= 4 * 0.05
    assert not list(temporary.glob("*/sitecustomize.py"))
