"""Tests of the backend `shared`: gloo's results, under every way to call it; nothing left.

`make test BACKEND=shared ARGS="common/testing/test_wrappers.py 06_sharded_optimizer"` runs what
the stages promise over it.
"""

import gc
import os
import sys
import threading
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from common.testing import harness
from common.testing.harness import ROOT, SHARED_MEMORY, left_in, names_in

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(ROOT / "06_sharded_optimizer" / "fsdp")]

import backend  # noqa: E402, F401 (registers it)
import shared_memory  # noqa: E402
from fsdp import FSDP  # noqa: E402

# torch has renamed them (2.13, 2.14), and warns of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MAX = dist.ReduceOp.MAX
MEAN = dist.ReduceOp.AVG


def groups():
    """On a rank: all ranks over the backend, and over gloo."""
    return dist.new_group(backend="shared"), dist.new_group(backend="gloo")


def results(group, length):
    """What calls of all kinds make of numbers of this rank's own."""
    one = torch.arange(length) + dist.get_rank()
    rows = torch.zeros(dist.get_world_size(), length, dtype=torch.int64)
    on = {"group": group}
    calls = [
        lambda: all_gather_single(rows.view(-1), one, **on),
        lambda: dist.all_reduce(rows.t(), **on),
        lambda: reduce_scatter_single(one, rows.view(-1), **on),
        lambda: dist.all_gather(list(rows), one, **on),
        lambda: reduce_scatter_single(one, rows.view(-1), MAX, **on),
        lambda: dist.all_reduce(rows[0], MAX, **on),
        lambda: dist.broadcast(rows, 0, **on),
    ]
    found = []
    for call in calls:
        call()
        found += [one.clone(), rows.clone()]
    return found


def differing():
    """Lengths where something is not bitwise gloo's."""
    shared, gloo = groups()
    assert dist.get_backend(shared) == "shared" and shared.memory is not None
    found = []
    for length in (0, 7, 1000):
        if not all(map(torch.equal, results(shared, length), results(gloo, length))):
            found.append(length)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_are_gloos(ranks, world_size):
    assert ranks(world_size).run(differing) == [[]] * world_size


# What is promised: each runs on two ranks


def takes_means():
    """Of every collective that sums."""
    shared, _ = groups()
    total = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(total, MEAN, group=shared)
    part = torch.empty(2)
    reduce_scatter_single(part, torch.full((4,), float(dist.get_rank())), MEAN, group=shared)
    assert [*total.tolist(), *part.tolist()] == [0.5] * 7


def keeps_the_order():
    """What is gloo's waits for what was called before; only send and receive may come between."""
    shared, _ = groups()
    for handed_on in (dist.barrier, partial(dist.broadcast, torch.ones(1), 0)):
        tensor = torch.ones(4_000_000)
        work = dist.all_reduce(tensor, group=shared, async_op=True)
        handed_on(group=shared)
        assert (tensor == 2).all()
        assert work.is_completed()
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, group=shared, async_op=True)
        dist.send(torch.ones(3), 1, group=shared)
    else:
        dist.recv(torch.empty(3), 0, group=shared)
        work = dist.all_reduce(tensor, group=shared, async_op=True)
    work.wait()
    assert (tensor == 4).all()


def is_compiled():
    """torch calls the group while it compiles, for the buffers of torch's DDP."""
    shared, _ = groups()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=shared)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        inputs = torch.randn(8, 4)
        torch.testing.assert_close(compiled(inputs), model(inputs))
        compiled(inputs).sum().backward()


def leaves_tensors_as_they_are():
    """Made in inference mode or not. 04 and 05 look at versions to notice a changed gradient."""
    shared, _ = groups()
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=shared)
    all_gather_single(tensor, torch.ones(2), group=shared)
    assert tensor._version == 0
    with torch.inference_mode():
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=shared)
    assert tensor.tolist() == [2.0] * 3


def lets_go_of_tensors():
    """Once a call is done the group holds none of its tensors, though no other call follows."""
    shared, _ = groups()
    tensor = torch.ones(3)
    is_gone = threading.Event()
    weakref.finalize(tensor, is_gone.set)
    dist.all_reduce(tensor, group=shared)
    del tensor
    assert is_gone.wait(10)  # its thread may be about to


def is_gloos_on_two_hosts():
    """Where one rank does not find the memory, all take gloo."""

    def finds_nothing(*_):
        raise FileNotFoundError

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(shared_memory, "open", finds_nothing, raising=False)
        shared, _ = groups()
    assert shared.memory is None
    part = torch.empty(3)
    reduce_scatter_single(part, torch.ones(6), group=shared)
    all_gather_single(torch.empty(6), part, group=shared)
    dist.all_reduce(part, group=shared)
    assert part.tolist() == [4.0] * 3


def names_a_late_rank():
    """On both: rank 1 comes too late, and what it then does fails, too."""
    group = dist.new_group(backend="shared", timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        late = "shared memory: rank 0 timed out: it waited 1 s for rank 1"
        with pytest.raises(RuntimeError, match=late):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    for wait in (work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError, match="has failed on some rank"):
            wait()
    assert work.is_completed()


def leaves_no_thread_and_no_file():
    """Threads and files of a group: before it, with it, after it."""

    def count():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = count()
    group = dist.new_group(backend="shared")
    dist.all_reduce(torch.ones(3), group=group)
    during = count()
    assert during[0] == before[0] + 1 and during[1] > before[1]
    dist.destroy_process_group(group)
    del group
    assert count() == before


PROMISES = [takes_means, keeps_the_order, is_compiled, leaves_tensors_as_they_are]
PROMISES += [lets_go_of_tensors, is_gloos_on_two_hosts, names_a_late_rank]
if sys.platform == "linux":  # it has /proc
    PROMISES += [leaves_no_thread_and_no_file]


@pytest.mark.parametrize("promise", PROMISES)
def test_promises(ranks, promise):
    ranks(2).run(promise)


# Training


def with_power_sgd(module, process_group):
    """A hook whose callbacks make calls."""
    model = DistributedDataParallel(module, process_group=process_group)
    state = powerSGD_hook.PowerSGDState(process_group, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def sharded_by_torch(module, process_group):
    return fully_shard(module, mesh=DeviceMesh.from_group(process_group, "cpu"))


def trained(wrap, group) -> torch.Tensor:
    """The outputs of a model after a few steps, each rank with a batch of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10)]
    model = wrap(nn.Sequential(*layers).double(), process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        model(torch.randn(8, 20).double()).square().mean().backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    return model(torch.randn(8, 20).double()).detach()


def distance(wrap) -> float:
    """How far apart training ends over the two backends."""
    ours, gloos = (trained(wrap, group) for group in groups())
    return (ours - gloos).abs().max().item()


@pytest.mark.parametrize("wrap", [DistributedDataParallel, with_power_sgd, sharded_by_torch, FSDP])
def test_training_ends_where_it_does_over_gloo(ranks, wrap):
    for found in ranks(2).run(distance, wrap):
        assert found <= 1e-12


# Scripts that know nothing of it

BUCKETED = ROOT / "05_bucketed" / "bucketed.py"
OVER_SHARED = [FOLDER / "with_shared.py", BUCKETED, "--backend", "shared"]


def test_script(launched, tmp_path):
    words = [*OVER_SHARED[1:], *harness.QUICK, "--json", tmp_path / "json"]
    status, output = launched(2, OVER_SHARED[0], *words)
    assert status == 0, output
    result = harness.read_json(tmp_path / "json", "05_bucketed")
    assert result["backend"] == "shared" and result["verify"]["passed"]
    counts = {one["name"]: one["collectives_per_step"] for one in result["candidates"]}
    assert counts == {name: harness.NANO_CALLS[name] for name in counts}
    assert not [line for line in output.splitlines() if "Error" in line or "Warning" in line]


def test_make_goes_by_way_of_the_runner():
    runner = "01_allreduce/shared_memory/with_shared.py"
    for folder, script in (("05_bucketed", "bucketed.py"), ("07_resnet_ddp", "resnet_ddp.py")):
        command = harness.would_make(folder, "BACKEND=shared")
        assert f"{runner} {folder}/{script}" in command and "--backend shared" in command
    assert runner not in harness.would_make("05_bucketed", "BACKEND=gloo")


@pytest.mark.full
def test_a_script_can_end_while_a_call_waits(script, tmp_path):
    """A rank that fails must not be kept from ending by a call that waits for another one."""
    program = f"""
import os, sys, time
sys.path.insert(0, {str(FOLDER)!r})
import torch, torch.distributed as dist, backend
dist.init_process_group("shared")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3), async_op=True)
    raise SystemExit("rank 0 has enough")
time.sleep(600)
"""
    (tmp_path / "program.py").write_text(program)
    memory = names_in(SHARED_MEMORY)
    status, output = script(harness.torchrun(2, tmp_path / "program.py")).wait(45)
    assert status != 0 and "rank 0 has enough" in output, output
    assert not left_in(SHARED_MEMORY, memory)
