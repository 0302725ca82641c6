"""watch: above all it is quiet on right programs; then it names what is wrong, and never disturbs.

A program runs on two ranks that stay alive; what it does wrong stands in its name.
"""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bucketed import BucketedDDP
from flat_ddp import FlatDDP
from fsdp import FSDP
from naive_ddp import NaiveDDP
from overlap_ddp import OverlapDDP
from sharded_optimizer import ShardedOptimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from zero2 import ZeRO2

from tools.testing import ROOT
from tools.watch import LATE_CHECKS, PHASES, STEPS, watch, who_is_late

DATA = TensorDataset(
    torch.randn(240, 6, generator=torch.Generator().manual_seed(5)), torch.arange(240) % 2
)
watches, said = [], []  # of this rank and program


class Net(nn.Module):
    def __init__(self, norm=False, dropout=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).tanh()))


def is_rank(rank):
    return dist.get_rank() == rank


def watched(model, optimizer=None):
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    watches.append(watch(model, optimizer, every=5, say=said.append))
    return model, optimizer


def start(wrap=DDP, optimizer=SGD, lr=0.1, **options):
    """A model and its optimizer, watched; from now on random numbers differ by rank."""
    model = wrap(Net(**options))
    watched(model, optimizer := optimizer(model.parameters(), lr=lr))
    torch.manual_seed(1 + dist.get_rank(getattr(model, "process_group", None)))
    return model, optimizer


def take_step(model, optimizer, loss, after=lambda: None):
    loss.backward()
    getattr(model, "finish_gradient_synchronization", lambda: None)()
    if after() is not False:  # which skips the step
        optimizer.step()
    optimizer.zero_grad()


def share(step):
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, 6, generator=generator)


def loss_of(model, step):
    return model(share(step)).square().mean()


def steps(model, optimizer, count=13, loss=loss_of, after=lambda step: None):
    """Steps on shares; without its own one if after(step) returns False."""
    for step in range(count):
        take_step(model, optimizer, loss(model, step), lambda step=step: after(step))


def feed(model, optimizer, loader, epochs=1):
    for _ in range(epochs):
        for x, y in loader:
            take_step(model, optimizer, F.cross_entropy(model(x), y))


def loader_of(data=DATA, batch=8, group=None):
    options = {"rank": dist.get_rank(group), "num_replicas": dist.get_world_size(group)}
    sampler = DistributedSampler(data, drop_last=True, **options)
    return DataLoader(data, batch, sampler=sampler)


def train(model, optimizer, epochs=2, first=0, **options):
    loader = loader_of(group=getattr(model, "process_group", None), **options)
    for epoch in range(first, first + epochs):
        loader.sampler.set_epoch(epoch)
        feed(model, optimizer, loader)


def run(name):
    """On a rank: what its watches say of a program, once rank 0 has read everything; why."""
    watches.clear()
    said.clear()
    torch.manual_seed(0)
    program = RIGHT[name] if name in RIGHT else WRONG[name][0]
    program()
    dist.barrier()
    if is_rank(0):
        for one in watches:
            one.read()
    dist.barrier()
    assert all(one.step > 1 and one.is_on for one in watches)
    return said.copy(), [cause for one in watches for cause in one.said]


# ---------------------------------------------------------------------------- right programs


def sharded_by_torch(net):
    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def stages_02_to_06_and_torch():
    for wrap in (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP, ZeRO2, FSDP, DDP, sharded_by_torch):
        train(*start(wrap, AdamW, lr=0.01, dropout=0.3), epochs=1)


def sharded_optimizers():
    for sharded in (ShardedOptimizer, ZeroRedundancyOptimizer):
        model = DDP(Net())
        optimizer = sharded(model.parameters(), Adam, lr=0.01)
        train(*watched(model, optimizer), epochs=1)


def micro_batches():
    """All but the last in no_sync(); four, or as many as a rank wants in each step."""
    for wrap in (DDP, OverlapDDP):
        for count_of in (lambda step: 4, lambda step: 1 + (step + dist.get_rank()) % 3):
            model, optimizer = start(wrap, AdamW)
            for step in range(15):
                count = count_of(step)
                with model.no_sync():
                    for i in range(count - 1):
                        loss_of(model, 100 * step + i).backward()
                take_step(model, optimizer, loss_of(model, 100 * step + count))


class Branch(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        is_short = (self.calls + dist.get_rank()) % 3 == 0
        return x[:, :2] + self.last.bias if is_short else super().forward(x)


def unused_parameters():
    model = DDP(Branch(), find_unused_parameters=True)
    train(*watched(model, Adam(model.parameters())))


def frozen_and_tied():
    net = Net()
    net.first.requires_grad_(False)
    net.again = net.last
    model = DDP(net)
    train(*watched(model, AdamW(model.parameters())))


def batchnorm_evaluated():
    """On samples that all ranks see."""
    for through_wrapper in (True, False):
        model, optimizer = start(norm=True)
        for epoch in range(2):
            model.eval()
            with torch.no_grad():
                if through_wrapper:
                    model(DATA[:50][0])
                elif is_rank(0):
                    model.module(DATA[:50][0])
            model.train()
            train(model, optimizer, 1, epoch, batch=20)


def scaler_and_an_overflow_on_one_rank():
    model, optimizer = start(optimizer=Adam)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(13):
        with torch.autocast("cpu", torch.float16):
            loss = model(share(step)).float().square().mean()
        scaler.scale(loss * (1e9 if is_rank(1) and step == 4 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def scheduler():
    model, optimizer = start()
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for epoch in range(3):
        train(model, optimizer, 1, epoch)
        halving.step()


def tiny_data():
    for size, batch in ((40, 1), (40, 4), (10, 1)):
        data = Subset(DATA, range(size))
        train(*start(), 4, data=data, batch=batch)


def loop_of_the_front_page():
    model = Net()

    def average(step):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    steps(*watched(model), after=average)


RIGHT = {
    "stages": stages_02_to_06_and_torch,
    "sharded optimizers": sharded_optimizers,
    "micro-batches": micro_batches,
    "unused parameters": unused_parameters,
    "frozen and tied": frozen_and_tied,
    "BatchNorm": batchnorm_evaluated,
    "scaler": scaler_and_an_overflow_on_one_rank,
    "scheduler": scheduler,
    "tiny data": tiny_data,
    "loop of the front page": loop_of_the_front_page,
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_quiet_on_right_programs(ranks, name):
    (sentences, causes), *of_others = ranks(2).run(run, name)
    assert sentences and not causes, sentences
    assert of_others == [([], [])]


# ---------------------------------------------------------------------------- wrong programs


def last_in_no_sync():
    model, optimizer = start()
    for step in range(10):
        loss_of(model, 100 + step).backward()
        with model.no_sync():
            loss = loss_of(model, step)
        take_step(model, optimizer, loss)


def no_finish():
    model, optimizer = start(NaiveDDP)
    for step in range(10):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def head_outside_the_wrapper():
    model = DDP(Net())
    head = nn.Linear(2, 2)
    optimizer = SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def loss(model, step):
        return head(model(share(step))).square().mean()

    steps(*watched(model, optimizer), loss=loss)


def loaded_on_rank_0():
    model, optimizer = start()
    steps(model, optimizer, 7)
    if is_rank(0):
        model.module.last.bias.data += 0.1
    steps(model, optimizer)


def other_weights_at_the_start():
    """The same ones in another order: equal sums do not hide that."""
    model, optimizer = start()
    if is_rank(0):
        model.module.first.weight.data = model.module.first.weight.data.flip(0)
    steps(model, optimizer)


def scheduler_on_rank_0():
    model, optimizer = start()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps(model, optimizer, after=lambda step: scheduler.step() if is_rank(0) else None)


def is_bad(step):
    return is_rank(1) and step == 4


def bypassing_loss(model, step):
    return loss_of(model.module, step)


def loss_with_nan(model, step):
    return loss_of(model, step) * (torch.nan if is_bad(step) else 1)


WRONG = {  # by the cause that is said first, and what is named
    "bypassed": (lambda: steps(*start(), loss=bypassing_loss), "first.weight"),
    "no_sync": (last_in_no_sync, "first.weight"),
    "bare": (lambda: steps(*start(lambda net: net)), "first.weight"),
    "gradients": (no_finish, "first.weight"),
    "some": (head_outside_the_wrapper, "parameter 4"),
    "start": (other_weights_at_the_start, "first.weight"),
    "reduced": (loaded_on_rank_0, "last.bias"),
    "rates": (scheduler_on_rank_0, "rates"),
    "steps": (lambda: steps(*start(), after=lambda step: not is_bad(step)), "rank 1"),
    "samples": (lambda: feed(*start(), DataLoader(DATA, 8, shuffle=True)), ""),
    "order": (lambda: feed(*start(), loader_of(), epochs=2), "batch 16"),
    "NaN": (lambda: steps(*start(), loss=loss_with_nan), "first.weight"),
}


@pytest.mark.parametrize("cause", WRONG)
def test_it_names_what_is_wrong(ranks, cause):
    sentences, causes = ranks(2).run(run, cause)[0]
    assert causes == [cause] and WRONG[cause][1] in sentences[1], sentences


# ---------------------------------------------------------------------------- a late rank


LEAST = [  # ms of a step, ms late, in so many of 20 steps, which rank is told
    (50, 11, 20, 2),
    (50, 9, 20, None),
    (200, 19, 20, None),
    (50, 11, 16, 2),
    (50, 11, 15, None),
]


@pytest.mark.parametrize("step, late, count, told", LEAST)
def test_who_is_late(step, late, count, told):
    """Above 10 ms and a tenth of a step, in 80 % of the steps; rank 0 is last in the others."""
    times = torch.full((3, STEPS, len(PHASES)), step / len(PHASES))
    times[0, :, -1] -= 1
    times[2, :count, -1] -= late + 1
    times[2, :, PHASES.index("backward")] += late + 1
    rank, ms, phase = who_is_late(times)
    assert (rank, round(ms), phase) == (told, late, "backward")


def rank_0_is_late(wrap, phase):
    """What its watch says if it sleeps in this phase of each step; the others wait for buffers."""

    def sleep(*_):
        if is_rank(0):
            time.sleep(0.05)

    said.clear()
    net = Net(norm=True)
    if phase == "forward":
        net.first.register_forward_hook(sleep)
    else:
        net.last.register_full_backward_hook(sleep)
    model = wrap(net)
    optimizer = SGD(model.parameters(), lr=0.1)
    one = watch(model, optimizer, every=1, say=said.append)
    steps(model, optimizer, STEPS + LATE_CHECKS)
    dist.barrier()
    if is_rank(0):
        one.read()
    return said.copy()


@pytest.mark.parametrize("wrap, phase", [(DDP, "forward"), (BucketedDDP, "backward")])
def test_it_tells_who_is_late_and_where(ranks, wrap, phase):
    """Once so many checks in a row have found the same rank."""
    _, sentence = ranks(2).run(rank_0_is_late, wrap, phase)[0]
    assert "rank 0 is late" in sentence and f"in {phase}" in sentence


# ---------------------------------------------------------------------------- and never disturbs


def long_run():
    """How many keys the store has: before the watch and after 10 and after 30 checks."""
    model, optimizer = start()
    store = dist.group.WORLD.get_group_store()
    numbers = []
    for count in (1, 50, 100):
        dist.barrier()
        numbers.append(store.num_keys())
        dist.barrier()
        steps(model, optimizer, count)
    return numbers


def test_the_store_does_not_fill(ranks):
    before, after_few, after_many = ranks(2).run(long_run)[0]
    assert after_many <= after_few <= before + 4


def one_rank_never_posts():
    """Whether rank 0's watch is on after so many steps, of which rank 1 has posted none."""
    model, optimizer = start()
    watches[-1].is_on = is_rank(0)
    steps(model, optimizer, 20)
    was_on = watches[-1].is_on
    steps(model, optimizer, 60)
    return was_on, watches[-1].is_on


def test_it_ends_when_a_rank_does_not_answer(ranks):
    assert ranks(2).run(one_rank_never_posts)[0] == (True, False)


def errors_inside():
    """An optimizer without hooks, a sentence that nobody takes, and an error in a check."""
    model = DDP(Net())
    optimizer = SGD(model.parameters(), lr=0.1)
    no_hooks = watch(model, object())
    broken = watch(model, optimizer)
    if is_rank(0):
        watch(model, optimizer, say=lambda sentence: 1 / 0)
    broken.every = 0
    before = model.module.first.weight.clone()
    steps(model, optimizer)
    return no_hooks.is_on or broken.is_on or before.equal(model.module.first.weight)


def test_an_error_inside_ends_the_watch_alone(ranks):
    assert ranks(2).run(errors_inside) == [False, False]


ALONE = """
import torch
from watch import watch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


def test_alone(forked, tmp_path):
    """A copy of the file says in words that there is nobody to compare with."""
    (tmp_path / "train.py").write_text(ALONE)
    (tmp_path / "watch.py").write_text((ROOT / "tools" / "watch.py").read_text())
    status, output = forked(None, tmp_path / "train.py")
    assert status == 0 and output.endswith("trained\n"), output
    assert output.count("watch 1") == output.count("world size 1") == 1, output
