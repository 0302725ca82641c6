"""Tests of the backend `shared`: gloo's results, under every way to call it; nothing left.

`make test BACKEND=shared ARGS="common/testing/test_wrappers.py 06_sharded_optimizer"` runs what
the stages promise over it.
"""

import atexit
import gc
import os
import sys
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common.testing import harness
from common.testing.harness import ROOT, SHARED_MEMORY, left_in, names_in

FOLDER = Path(__file__).parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed", "06_sharded_optimizer"]
sys.path[:0] = [str(FOLDER), *(str(ROOT / stage) for stage in STAGES)]
sys.path.insert(0, str(ROOT / "06_sharded_optimizer" / "fsdp"))

import backend  # noqa: E402
from bucketed import BucketedDDP  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from fsdp import FSDP  # noqa: E402
from naive_ddp import NaiveDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402
from sharded_optimizer import ShardedOptimizer  # noqa: E402
from shared_memory import all_gather_single, reduce_scatter_single  # noqa: E402

SUM = dist.ReduceOp.SUM
MEAN = dist.ReduceOp.AVG
DTYPES = [torch.float64, torch.float32, torch.int64, torch.uint8]  # gloo has them everywhere


def groups():
    """On a rank: all ranks over the backend, and over gloo."""
    return dist.new_group(backend="shared"), dist.new_group(backend="gloo")


def numbers(*shape, dtype=torch.float64):
    seed = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 10, shape, generator=seed).to(dtype)


# Every collective


def collectives(group, length, dtype):
    """The results of every collective, by name, and of all ways to call it."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    results = {}
    tensor = numbers(length, dtype=dtype)
    for operation in (SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        results[f"all-reduce {operation}"] = tensor.clone()
        dist.all_reduce(results[f"all-reduce {operation}"], operation, group=group)
    results["asynchronous"] = tensor.clone()
    work = dist.all_reduce(results["asynchronous"], group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    results["of a part"] = numbers(4, length, dtype=dtype)
    dist.all_reduce(results["of a part"][1], group=group)
    results["transposed"] = numbers(length, 3, dtype=dtype).t()
    dist.all_reduce(results["transposed"], group=group)
    results["all-gather"] = torch.empty(n * length, dtype=dtype)
    all_gather_single(results["all-gather"], tensor, group=group)
    results["list"] = [torch.empty(length, dtype=dtype) for _ in range(n)]
    dist.all_gather(results["list"], tensor, group=group)
    results["reduce-scatter"] = torch.empty(length, dtype=dtype)
    reduce_scatter_single(results["reduce-scatter"], numbers(n * length, dtype=dtype), group=group)
    results["reduce-scatter of a list"] = torch.empty(length, dtype=dtype)
    inputs = list(numbers(n, length, dtype=dtype))
    dist.reduce_scatter(results["reduce-scatter of a list"], inputs, group=group)
    results["broadcast"] = tensor.clone()
    dist.broadcast(results["broadcast"], n - 1, group=group)
    results["reduce"] = tensor.clone()
    dist.reduce(results["reduce"], 0, group=group)
    if rank != 0:
        results["reduce"] = None  # undefined there
    gathered = [torch.empty_like(tensor) for _ in range(n)] if rank == 0 else None
    dist.gather(tensor, gathered, dst=0, group=group)
    results["gather"] = gathered
    results["all-to-all"] = torch.empty(n * length, dtype=dtype)
    dist.all_to_all_single(results["all-to-all"], numbers(n * length, dtype=dtype), group=group)
    results["objects"] = [None] * n
    dist.all_gather_object(results["objects"], {"rank": rank}, group=group)
    if n > 1:
        results["received"] = torch.empty_like(tensor)
        sent = dist.isend(tensor, (rank + 1) % n, group=group)
        dist.recv(results["received"], (rank - 1) % n, group=group)
        sent.wait()
    dist.barrier(group=group)
    return results


def differences(lengths, dtypes):
    """What is not bitwise gloo's: (collective, length, dtype)."""
    shared, gloo = groups()
    assert dist.get_backend(shared) == "shared" and shared.memory is not None
    found = []
    for length in lengths:
        for dtype in dtypes:
            ours = collectives(shared, length, dtype)
            expected = collectives(gloo, length, dtype)
            for name, value in expected.items():
                if not same(ours[name], value):
                    found.append((name, length, dtype))
    return found


def same(ours, expected) -> bool:
    if torch.is_tensor(expected):
        return torch.equal(ours, expected)
    if isinstance(expected, list):
        return all(same(one, other) for one, other in zip(ours, expected, strict=True))
    return ours == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(5, marks=pytest.mark.full)])
def test_every_collective_is_gloos(ranks, world_size):
    found = ranks(world_size).run(differences, [0, 1, 7, 1000], DTYPES)
    assert found == [[]] * world_size


@pytest.mark.full
def test_large_tensors(ranks):
    """Of several pieces."""
    length = 3 * backend.PIECE_BYTES // 8 + 1
    assert ranks(2).run(differences, [length], [torch.float64]) == [[]] * 2


def means():
    """Of every collective that sums; gloo has none for integers either."""
    shared, _ = groups()
    rank = dist.get_rank()
    n = dist.get_world_size()
    total = torch.full((5,), float(rank))
    dist.all_reduce(total, MEAN, group=shared)
    part = torch.empty(2)
    reduce_scatter_single(part, torch.full((2 * n,), float(rank)), MEAN, group=shared)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), MEAN, group=shared)
    return [*total.tolist(), *part.tolist()]


def test_means(ranks):
    assert ranks(3).run(means) == [[1.0] * 7] * 3


# Many calls, several groups


def interleaved():
    """Wrong results of calls that overlap: of three groups, of all kinds, waited for backwards."""
    rank = dist.get_rank()
    everybody = [dist.new_group(backend="shared") for _ in range(2)]
    pairs = [dist.new_group(pair, backend="shared") for pair in ([0, 1], [1, 2])]
    wrong = 0
    for turn in range(20):
        waiting = []
        for group in everybody:
            tensor = torch.full((1000,), float(rank + turn))
            waiting.append(
                (dist.all_reduce(tensor, group=group, async_op=True), tensor, 3 + 3 * turn)
            )
            part = torch.empty(10)
            inputs = torch.full((30,), float(rank))
            work = reduce_scatter_single(part, inputs, group=group, async_op=True)
            waiting.append((work, part, 3))
        for number, group in enumerate(pairs):
            if rank in (number, number + 1):
                tensor = torch.full((5,), float(rank))
                work = dist.all_reduce(tensor, group=group, async_op=True)
                waiting.append((work, tensor, 2 * number + 1))
        for work, tensor, expected in reversed(waiting):
            work.wait()
            wrong += (tensor != expected).sum().item()
    return wrong


def test_calls_and_groups_that_overlap(ranks):
    assert ranks(3).run(interleaved) == [0] * 3


def wrong_of_many(calls):
    shared, _ = groups()
    tensor = torch.zeros(3)
    wrong = 0
    for call in range(calls):
        tensor.fill_(call)
        dist.all_reduce(tensor, group=shared)
        wrong += (tensor != 2 * call).sum().item()
    return wrong


@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=pytest.mark.full)])
def test_call_after_call(ranks, calls):
    assert ranks(2).run(wrong_of_many, calls) == [0, 0]


def changes_no_version():
    """04 and 05 look at versions to notice a gradient that is changed while it travels."""
    shared, _ = groups()
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=shared)
    all_gather_single(tensor, torch.ones(2), group=shared)
    return tensor._version


def test_what_arrives_is_no_change(ranks):
    assert ranks(2).run(changes_no_version) == [0, 0]


def sum_in_inference_mode():
    shared, _ = groups()
    with torch.inference_mode():
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=shared)
    return tensor.tolist()


def test_inference_mode(ranks):
    assert ranks(2).run(sum_in_inference_mode) == [[2.0] * 3] * 2


def lets_go_of_tensors():
    """Once a call is done the group holds none of its tensors, though no other call follows."""
    shared, _ = groups()
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    dist.all_reduce(tensor, group=shared)
    del tensor
    deadline = time.monotonic() + 10  # its thread may be about to
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive() is None


def test_a_call_holds_no_tensors_afterwards(ranks):
    assert ranks(2).run(lets_go_of_tensors) == [True, True]


# Training


def wrappers(group) -> dict:
    def sharded(module):
        return fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))

    on_group = {"process_group": group}
    return {
        "NaiveDDP": partial(NaiveDDP, **on_group),
        "FlatDDP": partial(FlatDDP, **on_group),
        "OverlapDDP": partial(OverlapDDP, **on_group),
        "BucketedDDP": partial(BucketedDDP, bucket_size_mb=0.001, **on_group),
        "FSDP": partial(FSDP, **on_group),
        "torch DDP": partial(DistributedDataParallel, **on_group),
        "torch DDP, views": partial(
            DistributedDataParallel, gradient_as_bucket_view=True, **on_group
        ),
        "torch fully_shard": sharded,
    }


def optimizers(group) -> dict:
    adam = torch.optim.Adam
    return {
        "ShardedOptimizer": partial(ShardedOptimizer, optimizer_cls=adam, process_group=group),
        "ZeRO": partial(ZeroRedundancyOptimizer, optimizer_class=adam, process_group=group),
    }


def trained(wrap, make_optimizer) -> torch.Tensor:
    """The outputs of a model after a few steps, each rank with a batch of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10)]
    model = wrap(nn.Sequential(*layers).double())
    optimizer = make_optimizer(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        model(torch.randn(8, 20).double()).square().mean().backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    model.train()  # BatchNorm's own statistics differ by rank
    torch.manual_seed(0)
    return model(torch.randn(8, 20).double()).detach()


def distance(name) -> float:
    """How far apart training ends over the two backends."""
    results = []
    for group in groups():
        wrap = wrappers(group).get(name, lambda module: module)
        make_optimizer = optimizers(group).get(name, torch.optim.Adam)
        if name in optimizers(group):
            wrap = wrappers(group)["torch DDP"]
        results.append(trained(wrap, make_optimizer))
    return (results[0] - results[1]).abs().max().item()


@pytest.mark.parametrize("name", [*wrappers(None), *optimizers(None)])
def test_training_ends_where_it_does_over_gloo(ranks, name):
    for found in ranks(2).run(distance, name):
        assert found <= 1e-12


# Errors, the end


def error_of_a_late_rank():
    """On both: rank 1 comes too late, and what it then does fails, too."""
    group = dist.new_group(backend="shared", timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        time.sleep(1.5)
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(3), group=group)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    with pytest.raises(RuntimeError, match="has failed on some rank"):
        work.wait()
    assert work.is_completed() and isinstance(work.exception(), RuntimeError)
    with pytest.raises(RuntimeError, match="has failed on some rank"):
        work.get_future().wait()
    return str(error.value)


def test_a_late_rank_is_named(ranks):
    first, second = ranks(2).run(error_of_a_late_rank)
    assert first == "shared memory: rank 0 timed out: it waited 0.5 s for rank 1"
    assert "has failed on some rank" in second


def error_of_unequal_sizes():
    shared, _ = groups()
    with pytest.raises(RuntimeError, match="tensors differ|has failed on some rank"):
        dist.all_reduce(torch.ones(3 + dist.get_rank()), group=shared)


def test_unequal_sizes(ranks):
    ranks(2).run(error_of_unequal_sizes)


def ends_its_thread():
    """Threads and files of a group: before it, with it, after it."""

    def count():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = count()
    group = dist.new_group(backend="shared")
    dist.all_reduce(torch.ones(3), group=group)
    during = count()
    dist.destroy_process_group(group)
    del group
    return before, during, count()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts files in /proc")
def test_a_group_that_is_destroyed_leaves_nothing(ranks):
    for before, during, after in ranks(2).run(ends_its_thread):
        assert during[0] == before[0] + 1 and during[1] > before[1]
        assert after == before


def answers_after_fork():
    """A child, like a worker that loads data, may end as it likes: the group goes on."""
    shared, _ = groups()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=shared)
    return tensor.tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_child_harms_nothing(ranks):
    assert ranks(2).run(answers_after_fork) == [[2.0, 2.0]] * 2


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


def test_without_the_runner_it_is_unknown(monkeypatch, capsys):
    import bucketed

    monkeypatch.setattr(dist.Backend, "backend_list", ["undefined", "gloo", "nccl"])
    arguments = bucketed.main, BUCKETED, "--backend", "shared", monkeypatch, capsys
    harness.check_wrong_input(*arguments)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.full) for fault in harness.FAULTS]
)
def test_faults_in_training(script, tmp_path, fault):
    """kill -9 of a rank, SIGTERM, Ctrl-C: all of it ends, and nothing is left."""
    words = [*OVER_SHARED, "--size", "nano", *harness.LONG]
    command = harness.torchrun(2, *words)
    harness.check_fault(script, command, "verify: passed", fault, tmp_path)


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
    began = time.monotonic()
    status, output = script(harness.torchrun(2, tmp_path / "program.py")).wait(60)
    assert status != 0 and "rank 0 has enough" in output, output
    assert time.monotonic() - began < 45
    assert not left_in(SHARED_MEMORY, memory)


def test_file_alone(tmp_path):
    """backend.py needs torch and shared_memory.py."""
    for name in ("backend.py", "shared_memory.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    program = "import backend, torch.distributed as d; print('shared' in d.Backend.backend_list)"
    (tmp_path / "alone.py").write_text(program)
    status, output = harness.Forked(tmp_path)(None, tmp_path / "alone.py", cwd=tmp_path)
    assert (status, output) == (0, "True\n")
