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
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common.testing import harness
from common.testing.harness import ROOT, SHARED_MEMORY, left_in, names_in

FOLDER = Path(__file__).parent
STAGES = ["05_bucketed", "06_sharded_optimizer", "06_sharded_optimizer/fsdp"]
sys.path[:0] = [str(FOLDER), *(str(ROOT / stage) for stage in STAGES)]

import backend  # noqa: E402, F401 (registers it)
import shared_memory  # noqa: E402
from bucketed import BucketedDDP  # noqa: E402
from fsdp import FSDP  # noqa: E402
from sharded_optimizer import ShardedOptimizer  # noqa: E402
from shared_memory import all_gather_single, reduce_scatter_single  # noqa: E402

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX
MEAN = dist.ReduceOp.AVG
DTYPES = [torch.float64, torch.float32, torch.int64, torch.uint8]  # gloo has them everywhere
slow = pytest.mark.full


def groups():
    """On a rank: all ranks over the backend, and over gloo."""
    return dist.new_group(backend="shared"), dist.new_group(backend="gloo")


def numbers(shape, dtype):
    seed = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 10, shape, generator=seed).to(dtype)


# Every collective


def ways(group) -> dict:
    """All ways to call a collective: each takes a tensor, and one that has a row for every rank."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    on = {"group": group}

    def asynchronous(one, rows):
        work = dist.all_reduce(one, async_op=True, **on)
        work.wait()
        assert work.is_completed() and work.result()[0].data_ptr() == one.data_ptr()

    def reduce(one, rows):
        dist.reduce(one, 0, **on)
        dist.broadcast(one, 0, **on)  # elsewhere it is undefined

    def gather_objects(one, rows):
        ranks = [None] * n
        dist.all_gather_object(ranks, rank, **on)
        assert ranks == list(range(n))

    def send_and_receive(one, rows):
        if n > 1:
            sent = dist.isend(one, (rank + 1) % n, **on)
            dist.recv(rows[0], (rank - 1) % n, **on)
            sent.wait()

    return {
        "sum": lambda one, rows: dist.all_reduce(one, **on),
        "maximum": lambda one, rows: dist.all_reduce(one, MAX, **on),
        "product": lambda one, rows: dist.all_reduce(one, dist.ReduceOp.PRODUCT, **on),
        "of a part": lambda one, rows: dist.all_reduce(rows[-1], **on),
        "transposed": lambda one, rows: dist.all_reduce(rows.t(), **on),
        "asynchronous": asynchronous,
        "all-gather": lambda one, rows: all_gather_single(rows.view(-1), one, **on),
        "all-gather, list": lambda one, rows: dist.all_gather(list(rows), one, **on),
        "reduce-scatter": lambda one, rows: reduce_scatter_single(one, rows.view(-1), **on),
        "its maximum": lambda one, rows: reduce_scatter_single(one, rows.view(-1), MAX, **on),
        "reduce-scatter, list": lambda one, rows: dist.reduce_scatter(one, list(rows), **on),
        "broadcast": lambda one, rows: dist.broadcast(one, n - 1, **on),
        "reduce": reduce,
        "gather": lambda one, rows: dist.gather(one, None if rank else list(rows), **on),
        "all-to-all": lambda one, rows: dist.all_to_all_single(rows, rows.clone(), **on),
        "objects": gather_objects,
        "send and receive": send_and_receive,
        "barrier": lambda one, rows: dist.barrier(**on),
    }


def differences(lengths, dtypes):
    """What is not bitwise gloo's: (collective, length, dtype)."""
    shared, gloo = groups()
    assert dist.get_backend(shared) == "shared" and shared.memory is not None
    n = dist.get_world_size()
    found = []
    for name, over_gloo in ways(gloo).items():
        for length in lengths:
            for dtype in dtypes:
                of_gloo = numbers([length], dtype), numbers([n, length], dtype)
                ours = [tensor.clone() for tensor in of_gloo]
                over_gloo(*of_gloo)
                ways(shared)[name](*ours)
                if not all(map(torch.equal, ours, of_gloo)):
                    found.append((name, length, dtype))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(5, marks=slow)])
def test_every_collective_is_gloos(ranks, world_size):
    found = ranks(world_size).run(differences, [0, 1, 7, 1000], DTYPES)
    assert found == [[]] * world_size


# What is promised: each runs on two ranks


def takes_means():
    """Of every collective that sums; gloo has none for integers either."""
    shared, _ = groups()
    total = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(total, MEAN, group=shared)
    part = torch.empty(2)
    reduce_scatter_single(part, torch.full((4,), float(dist.get_rank())), MEAN, group=shared)
    assert [*total.tolist(), *part.tolist()] == [0.5] * 7
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), MEAN, group=shared)


def keeps_the_order():
    """What is gloo's waits for what was called before; only send and receive may come between."""
    shared, _ = groups()
    rank = dist.get_rank()
    for handed_on in (dist.barrier, partial(dist.broadcast, torch.ones(1), 0)):
        for _ in range(5):
            tensor = torch.ones(4_000_000)
            work = dist.all_reduce(tensor, group=shared, async_op=True)
            handed_on(group=shared)
            assert (tensor == 2).all()
            work.wait()
    tensor = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(tensor, group=shared, async_op=True)
        dist.send(torch.ones(3), 1, group=shared)
    else:
        dist.recv(torch.empty(3), 0, group=shared)
        work = dist.all_reduce(tensor, group=shared, async_op=True)
    work.wait()
    assert tensor.tolist() == [2.0] * 3


def lets_callbacks_make_calls():
    """Also in a callback of a callback. One after another: two at once have no common order."""
    shared, _ = groups()

    def sum_again(future):
        return launched(future.value()[0]).wait()[0]

    def launched(tensor):
        return dist.all_reduce(tensor, group=shared, async_op=True).get_future()

    for _ in range(9):
        future = launched(torch.ones(2)).then(sum_again).then(lambda f: [f.value()])
        assert future.then(sum_again).wait().tolist() == [8.0, 8.0]


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


def changes_no_version():
    """04 and 05 look at versions to notice a gradient that is changed while it travels."""
    shared, _ = groups()
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=shared)
    all_gather_single(tensor, torch.ones(2), group=shared)
    assert tensor._version == 0


def works_in_inference_mode():
    shared, _ = groups()
    with torch.inference_mode():
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=shared)
    assert tensor.tolist() == [2.0] * 3


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
    assert alive() is None


def is_gloos_on_two_hosts():
    """Where one rank does not find the memory, all take gloo."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def finds_nothing(*_):
                raise FileNotFoundError

            patch.setattr(shared_memory, "open", finds_nothing, raising=False)
        shared, _ = groups()
    assert shared.memory is None
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=shared)
    assert tensor.tolist() == [2.0] * 3


def names_a_late_rank():
    """On both: rank 1 comes too late, and what it then does fails, too."""
    group = dist.new_group(backend="shared", timeout=timedelta(seconds=0.5))
    rank = dist.get_rank()
    time.sleep(1.5 * rank)
    late = "shared memory: rank 0 timed out: it waited 0.5 s for rank 1"
    failed = "has failed on some rank"
    with pytest.raises(RuntimeError, match=[late, failed][rank]):
        dist.all_reduce(torch.ones(3), group=group)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    for wait in (work.wait, work.result, work.get_future().wait):
        with pytest.raises(RuntimeError, match=failed):
            wait()
    assert work.is_completed() and isinstance(work.exception(), RuntimeError)


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


def survives_a_forked_child():
    """A child, like a worker that loads data, may end as it likes: the group goes on."""
    shared, _ = groups()
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=shared)
    assert tensor.tolist() == [2.0, 2.0]


PROMISES = [takes_means, keeps_the_order, lets_callbacks_make_calls, is_compiled]
PROMISES += [changes_no_version, works_in_inference_mode, lets_go_of_tensors, is_gloos_on_two_hosts]
PROMISES += [names_a_late_rank]
if sys.platform == "linux":  # it has /proc, and forks
    PROMISES += [leaves_no_thread_and_no_file, survives_a_forked_child]


@pytest.mark.parametrize("promise", PROMISES)
def test_promises(ranks, promise):
    ranks(2).run(promise)


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
            work = dist.all_reduce(tensor, group=group, async_op=True)
            waiting.append((work, tensor, 3 + 3 * turn))
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


@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=slow)])
def test_call_after_call(ranks, calls):
    assert ranks(2).run(wrong_of_many, calls) == [0, 0]


# Training


def with_power_sgd(module, group):
    """A hook whose callbacks make calls."""
    model = DistributedDataParallel(module, process_group=group)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def candidates(group) -> dict:
    """How a module is wrapped, and what takes its parameters."""
    on_group = {"process_group": group}
    adam = partial(torch.optim.Adam, lr=1e-2)
    of_shards = {"optimizer_class": torch.optim.Adam, "lr": 1e-2, **on_group}
    ours = {"optimizer_cls": torch.optim.Adam, "lr": 1e-2, **on_group}
    ddp = partial(DistributedDataParallel, **on_group)
    return {
        "BucketedDDP": (partial(BucketedDDP, bucket_size_mb=0.001, **on_group), adam),
        "FSDP": (partial(FSDP, **on_group), adam),
        "ShardedOptimizer": (ddp, partial(ShardedOptimizer, **ours)),
        "torch DDP": (ddp, adam),
        "torch DDP, views": (partial(ddp, gradient_as_bucket_view=True), adam),
        "torch DDP, PowerSGD": (partial(with_power_sgd, group=group), adam),
        "torch ZeRO": (ddp, partial(ZeroRedundancyOptimizer, **of_shards)),
        "torch fully_shard": (
            lambda module: fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu")),
            adam,
        ),
    }


def trained(wrap, make_optimizer) -> torch.Tensor:
    """The outputs of a model after a few steps, each rank with a batch of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10)]
    model = wrap(nn.Sequential(*layers).double())
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        model(torch.randn(8, 20).double()).square().mean().backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(0)
    return model(torch.randn(8, 20).double()).detach()


def distance(name) -> float:
    """How far apart training ends over the two backends."""
    ours, gloos = (trained(*candidates(group)[name]) for group in groups())
    return (ours - gloos).abs().max().item()


@pytest.mark.parametrize("name", candidates(None))
def test_training_ends_where_it_does_over_gloo(ranks, name):
    for found in ranks(2).run(distance, name):
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


def test_without_the_runner_it_is_unknown(monkeypatch, capsys):
    import bucketed

    monkeypatch.setattr(dist.Backend, "backend_list", ["undefined", "gloo", "nccl"])
    arguments = bucketed.main, BUCKETED, "--backend", "shared", monkeypatch, capsys
    harness.check_wrong_input(*arguments)


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=slow) for fault in harness.FAULTS])
def test_faults_in_training(script, tmp_path, fault):
    """kill -9 of a rank, SIGTERM, Ctrl-C: all of it ends, and nothing is left."""
    words = [*OVER_SHARED, "--size", "nano", *harness.LONG]
    command = harness.torchrun(2, *words)
    harness.check_fault(script, command, "verify: passed", fault, tmp_path)


@slow
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
