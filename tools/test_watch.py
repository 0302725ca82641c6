"""watch: above all it is quiet on right programs; then it names what is wrong, and never disturbs.

A program runs on two ranks that stay alive; what it does wrong stands in its name.
"""

import os
from contextlib import nullcontext

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
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from tools.testing import ROOT, Forked
from tools.watch import CAUSES, watch

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


def watched(model, optimizer):
    watches.append(watch(model, optimizer, every=5, say=said.append))
    return model, optimizer


def start(wrap=DDP, optimizer=SGD, lr=0.1, **options):
    """A model and its optimizer, watched; from now on random numbers differ by rank."""
    model = wrap(Net(**options))
    optimizer = watched(model, optimizer(model.parameters(), lr=lr))[1]
    torch.manual_seed(1 + dist.get_rank(getattr(model, "process_group", None)))
    return model, optimizer


def finish(model):
    getattr(model, "finish_gradient_synchronization", lambda: None)()


def loader_of(data=DATA, batch=8, group=None, **options):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sampler = DistributedSampler(data, world_size, rank, drop_last=True, **options)
    return sampler, DataLoader(data, batch, sampler=sampler)


def take_step(model, optimizer, x, y, after=None):
    F.cross_entropy(model(x), y).backward()
    finish(model)
    if after:
        after()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, epochs=2, first=0, after=None, **options):
    sampler, loader = loader_of(group=getattr(model, "process_group", None), **options)
    for epoch in range(first, first + epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            take_step(model, optimizer, x, y, after)


def share(step, rows=8):
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(rows, 6, generator=generator)


def loss_of(model, step, rows=8):
    return model(share(step, rows)).square().mean()


def run(name):
    """On a rank: what its watches have said of a program, once rank 0 has read everything."""
    watches.clear()
    said.clear()
    torch.manual_seed(0)
    globals()[name]()
    dist.barrier()
    for one in watches:
        if one.unread:
            one.safely(one.read)()
    dist.barrier()
    assert all(one.step > 1 and (one.is_on or said) for one in watches)
    return said.copy()


# ---------------------------------------------------------------------------- right programs


def stages_02_to_05_and_torch():
    for wrap in (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP, DDP):
        train(*start(wrap), epochs=1)


def optimizers_and_dropout():
    train(*start(optimizer=Adam, lr=0.01, dropout=0.3), epochs=3)


def sharded_optimizers():
    for wrap, cls in ((BucketedDDP, ShardedOptimizer), (DDP, ZeroRedundancyOptimizer)):
        train(*start(wrap, lambda p, lr, cls=cls: cls(p, Adam, lr=lr), lr=0.01), epochs=1)


def fsdp_of_stage_06():
    for optimizer in (SGD, AdamW):
        train(*start(FSDP, optimizer), epochs=1)


def sharded_by_torch(net):
    return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp_of_torch():
    train(*start(sharded_by_torch, AdamW), epochs=1)


def tensor_parallel():
    """Both ranks see the same samples, and the same dropout."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    model = parallelize_module(Net(dropout=0.1), mesh, plan)
    watched(model, optimizer := SGD(model.parameters(), lr=0.1, foreach=False))
    for x, y in DataLoader(DATA, 8):
        take_step(model, optimizer, x, y)


def accumulation():
    for wrap in (DDP, BucketedDDP):
        model, optimizer = start(wrap, AdamW)
        sampler, loader = loader_of(batch=3)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for i, (x, y) in enumerate(loader):
                is_last = i % 4 == 3
                with nullcontext() if is_last else model.no_sync():
                    (F.cross_entropy(model(x), y) / 4).backward()
                if is_last:
                    finish(model)
                    optimizer.step()
                    optimizer.zero_grad()


def micro_batches_vary_by_rank_and_step():
    """As everyday.md's weighted mean: all but the last in no_sync()."""
    for wrap in (DDP, OverlapDDP):
        model, optimizer = start(wrap)
        for step in range(20):
            count = 1 + (step + dist.get_rank()) % 3
            for i in range(count):
                with nullcontext() if i == count - 1 else model.no_sync():
                    loss_of(model, 100 * step + i).backward()
            finish(model)
            optimizer.step()
            optimizer.zero_grad()


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
    for parameters in (model.parameters(), [p for p in model.parameters() if p.requires_grad]):
        train(*watched(model, AdamW(parameters)), epochs=1)


def batchnorm_evaluated_in_three_ways():
    for wrap, through in ((DDP, "wrapper"), (DDP, "module"), (NaiveDDP, "module")):
        model, optimizer = start(wrap, norm=True)
        for epoch in range(2):
            train(model, optimizer, 1, epoch)
            model.eval()
            if through == "module":
                for buffer in model.module.buffers():
                    dist.broadcast(buffer, 0)
            with torch.no_grad():
                for x, _ in DataLoader(DATA, 64):
                    (model.module if through == "module" else model)(x)
            model.train()


def rank_0_alone_evaluates():
    model, optimizer = start(norm=True)
    for epoch in range(3):
        train(model, optimizer, 1, epoch)
        if dist.get_rank() == 0:
            model.eval()
            model.module(DATA[:50][0])
            model.train()


def scaler_and_an_overflow_on_one_rank():
    model, optimizer = start(optimizer=Adam)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(30):
        with torch.autocast("cpu", torch.float16):
            loss = model(share(step)).float().square().mean()
        scaler.scale(loss * (1e9 if (dist.get_rank(), step) == (1, 4) else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def bad_batch_skipped_by_all():
    model, optimizer = start()
    for step in range(30):
        (loss_of(model, step) * (torch.nan if (dist.get_rank(), step) == (1, 4) else 1)).backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()


def lbfgs():
    model = DDP(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    watched(model, optimizer)
    for step in range(12):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            return mean

        optimizer.step(closure)


def scheduler_and_groups():
    model = DDP(Net())
    groups = [{"params": model.module.first.parameters(), "lr": 0.01}]
    groups += [{"params": model.module.last.parameters(), "lr": torch.tensor(0.1)}]
    _, optimizer = watched(model, AdamW(groups, foreach=False))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for epoch in range(3):
        train(model, optimizer, 1, epoch)
        scheduler.step()


def two_watches_of_a_gan():
    generator, critic = DDP(Net()), DDP(nn.Linear(2, 1))
    optimizers = [Adam(each.parameters()) for each in (generator, critic)]
    for each, optimizer in zip((generator, critic), optimizers, strict=True):
        watched(each, optimizer)
    for step in range(20):
        real = critic(share(step + 500)[:, :2])
        loss = F.softplus(critic(generator(share(step)).detach())) + F.softplus(-real)
        loss.mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        critic.requires_grad_(False)
        F.softplus(-critic(generator(share(step)))).mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        critic.requires_grad_(True)


def tiny_data():
    for size, batch in ((40, 1), (40, 4), (10, 1)):
        model, optimizer = start()
        data = torch.utils.data.Subset(DATA, range(size))
        train(model, optimizer, 8, data=data, batch=batch)


def few_distinct_samples():
    """Equal ones on several ranks are no fault of a sampler."""
    model, optimizer = start()
    for _ in range(60):
        x = torch.randint(0, 12, (8, 1)).repeat(1, 6).float()
        take_step(model, optimizer, x, torch.arange(8) % 2)


def loop_of_the_front_page():
    model = Net()
    _, optimizer = watched(model, SGD(model.parameters(), lr=0.01))
    for _ in range(50):
        inputs = torch.randn(64, 6)
        mine = inputs[dist.get_rank() :: dist.get_world_size()]
        model(mine).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def sizes_vary_and_a_rank_is_late():
    model, optimizer = start()
    for step in range(30):
        rows = 3 + (7 * step + 5 * dist.get_rank()) % 11
        total = torch.tensor(float(rows))
        dist.all_reduce(total)
        if step == 4 and dist.get_rank() == 0:
            sum(torch.randn(300, 300).mm(torch.randn(300, 300)).sum() for _ in range(20))
        (loss_of(model, step, rows) * rows * dist.get_world_size() / total).backward()
        optimizer.step()
        optimizer.zero_grad()


class Stream(IterableDataset):
    def __init__(self, first, step, seed=None):
        generator = torch.Generator().manual_seed(seed or 0)
        order = torch.arange(240) if seed is None else torch.randperm(240, generator=generator)
        self.part = order[first::step].tolist()

    def __iter__(self):
        return iter([DATA[i] for i in self.part])


def feed(model, optimizer, data, epochs=1):
    for _ in range(epochs):
        for x, y in DataLoader(data, 8):
            take_step(model, optimizer, x, y)


def stream_that_is_split():
    feed(*start(), Stream(dist.get_rank(), dist.get_world_size(), 3))


def sparse_gradients():
    net = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 2))
    model = DDP(net)
    _, optimizer = watched(model, SGD(model.parameters(), lr=0.1))
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        take_step(model, optimizer, torch.randint(50, (8, 9)), torch.arange(8) % 2)


def other_dtypes_and_formats():
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 2))
    net = net.to(memory_format=torch.channels_last).to(torch.bfloat16)
    net.register_buffer("choice", torch.tensor([True, False]))
    net.register_buffer("phase", torch.tensor([1j], dtype=torch.complex128))
    net.register_buffer("none", torch.zeros(0))
    model = DDP(net, broadcast_buffers=False)
    _, optimizer = watched(model, SGD(model.parameters(), lr=0.1))
    torch.manual_seed(dist.get_rank())
    for _ in range(12):
        x = torch.randn(4, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        take_step(model, optimizer, x, torch.arange(4) % 2)


def compiled():
    for wrap in (
        lambda net: torch.compile(DDP(net), backend="eager"),
        lambda net: DDP(torch.compile(net, backend="eager", fullgraph=True)),
    ):
        train(*start(wrap), epochs=1)


RIGHT = """stages_02_to_05_and_torch optimizers_and_dropout sharded_optimizers fsdp_of_stage_06
fsdp_of_torch tensor_parallel accumulation micro_batches_vary_by_rank_and_step
unused_parameters frozen_and_tied batchnorm_evaluated_in_three_ways rank_0_alone_evaluates
scaler_and_an_overflow_on_one_rank bad_batch_skipped_by_all lbfgs scheduler_and_groups
two_watches_of_a_gan tiny_data few_distinct_samples loop_of_the_front_page
sizes_vary_and_a_rank_is_late stream_that_is_split sparse_gradients other_dtypes_and_formats
compiled""".split()


@pytest.mark.parametrize("program", RIGHT)
def test_it_is_quiet_on_right_programs(ranks, program):
    sentences, *of_others = ranks(2).run(run, program)
    assert all(" compares " in sentence for sentence in sentences) and sentences
    assert not any(of_others)


# ---------------------------------------------------------------------------- wrong programs


def loss_bypasses_the_wrapper():
    model, optimizer = start()
    for step in range(10):
        loss_of(model.module, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def no_wrapper():
    train(*start(lambda net: net))


def all_in_no_sync():
    model, optimizer = start()
    for step in range(10):
        with model.no_sync():
            loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def no_finish():
    model, optimizer = start(NaiveDDP)
    for step in range(10):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def autograd_grad():
    model, optimizer = start()
    for step in range(10):
        found = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()


def clipped_on_rank_0():
    model, optimizer = start()
    is_0 = dist.get_rank() == 0
    after = lambda: is_0 and nn.utils.clip_grad_norm_(model.parameters(), 0.05)  # noqa: E731
    train(model, optimizer, after=after)


def zeroed_on_rank_1():
    model, optimizer = start()
    train(model, optimizer, after=lambda: dist.get_rank() == 1 and optimizer.zero_grad())


def unfrozen_after_wrapping():
    net = Net()
    net.first.requires_grad_(False)
    model = DDP(net)
    watched(model, optimizer := SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 1)
    net.first.requires_grad_(True)
    train(model, optimizer, 1)


def layer_added_after_wrapping():
    """As LoRA does."""
    model = DDP(Net())
    model.module.last = nn.Sequential(model.module.last, nn.Linear(2, 2))
    train(*watched(model, SGD(model.parameters(), lr=0.1)))


def head_outside_the_wrapper():
    model, head = DDP(Net()), nn.Linear(2, 2)
    _, optimizer = watched(model, SGD([*model.parameters(), *head.parameters()], lr=0.1))
    for step in range(10):
        head(model(share(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def loaded_on_rank_0():
    model, optimizer = start()
    if dist.get_rank() == 0:
        model.module.last.bias.data += 0.1
    train(model, optimizer)


def loaded_on_rank_0_later():
    model, optimizer = start()
    train(model, optimizer, 1)
    if dist.get_rank() == 0:
        model.module.last.bias.data += 0.1
    train(model, optimizer)


def rows_in_another_order():
    """Equal sums do not hide them."""
    model, optimizer = start()
    if dist.get_rank() == 0:
        model.module.first.weight.data = model.module.first.weight.data.flip(0)
    train(model, optimizer)


def state_of_adam_on_rank_0():
    model = DDP(Net())
    optimizer = Adam(model.parameters())
    train(model, optimizer, 1)
    if dist.get_rank() == 0:
        optimizer.state.clear()
    train(*watched(model, optimizer))


class RoundsAtRandom(SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.rand_like(parameter) * 1e-4)


def random_rounding():
    train(*start(optimizer=RoundsAtRandom))


def a_gradient_zeroed_once():
    model, optimizer = start()
    train(model, optimizer, 1)
    loss_of(model, 0).backward()
    if dist.get_rank() == 1:
        optimizer.zero_grad()
    optimizer.step()
    train(model, optimizer, 1)


def scheduler_on_rank_0():
    model, optimizer = start()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 1)
    if dist.get_rank() == 0:
        scheduler.step()
    train(model, optimizer, 1)


def bad_batch_skipped_by_one_rank():
    """Afterwards weights are equal, and one rank's batches lag behind."""
    model, optimizer = start(lambda net: DDP(net.first))  # with buffers it would hang
    for step in range(13):
        loss = loss_of(model, step)
        if (dist.get_rank(), step) == (1, 4):
            loss = loss_of(model, step + 100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def step_skipped_by_one_rank():
    model, optimizer = start()
    for step in range(13):
        loss_of(model, step).backward()
        if (dist.get_rank(), step) != (1, 4):
            optimizer.step()
        optimizer.zero_grad()


def step_taken_twice_by_one_rank():
    model, optimizer = start()
    for step in range(13):
        loss_of(model, step).backward()
        optimizer.step()
        if (dist.get_rank(), step) == (1, 4):
            optimizer.step()
        optimizer.zero_grad()


def no_sampler_and_one_seed():
    model, optimizer = start()
    torch.manual_seed(0)
    for x, y in DataLoader(DATA, 8, shuffle=True):
        take_step(model, optimizer, x, y)


def no_sampler_and_two_seeds():
    model, optimizer = start()
    for x, y in DataLoader(DATA, 8, shuffle=True):
        take_step(model, optimizer, x, y)


def sampler_seeded_by_rank():
    train(*start(), seed=dist.get_rank())


def split_by_rank():
    model, optimizer = start()
    train(model, optimizer, data=torch.utils.data.random_split(DATA, [200, 40])[0])


def stream_not_split():
    feed(*start(), Stream(0, 1))


def stream_shuffled_by_rank():
    feed(*start(), Stream(dist.get_rank(), dist.get_world_size(), dist.get_rank()))


def epoch_never_set():
    model, optimizer = start()
    for _ in range(2):
        train(model, optimizer, 1)


def workers_keep_their_epoch():
    feed(*start(), Stream(dist.get_rank(), dist.get_world_size(), 3), epochs=2)


def nan_in_weights():
    model, optimizer = start()
    for step in range(12):
        (loss_of(model, step) * (torch.nan if (dist.get_rank(), step) == (1, 7) else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def nan_in_statistics():
    model, optimizer = start(NaiveDDP, norm=True)
    for step in range(12):
        x = share(step) * (torch.nan if (dist.get_rank(), step) == (1, 4) else 1)
        model(x).square().mean().backward()
        finish(model)
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()


WRONG = [  # and the usual cause that is said
    (loss_bypasses_the_wrapper, "bypassed"),
    (no_wrapper, "bare"),
    (all_in_no_sync, "bypassed"),
    (no_finish, "gradients"),
    (autograd_grad, "gradients"),
    (clipped_on_rank_0, "gradients"),
    (zeroed_on_rank_1, "gradients"),
    (unfrozen_after_wrapping, "some"),
    (layer_added_after_wrapping, "some"),
    (head_outside_the_wrapper, "some"),
    (loaded_on_rank_0, "start"),
    (loaded_on_rank_0_later, "reduced"),
    (rows_in_another_order, "start"),
    (state_of_adam_on_rank_0, "reduced"),
    (random_rounding, "reduced"),
    (a_gradient_zeroed_once, "reduced"),
    (scheduler_on_rank_0, "rates"),
    (bad_batch_skipped_by_one_rank, "steps"),
    (step_skipped_by_one_rank, "steps"),
    (step_taken_twice_by_one_rank, "steps"),
    (no_sampler_and_one_seed, "samples"),
    (no_sampler_and_two_seeds, "samples"),
    (sampler_seeded_by_rank, "samples"),
    (split_by_rank, "samples"),
    (stream_not_split, "samples"),
    (stream_shuffled_by_rank, "samples"),
    (epoch_never_set, "order"),
    (workers_keep_their_epoch, "order"),
    (nan_in_weights, "NaN"),
    (nan_in_statistics, "NaN"),
]


@pytest.mark.parametrize("program, cause", WRONG)
def test_it_names_what_is_wrong(ranks, program, cause):
    _, *sentences = ranks(2).run(run, program.__name__)[0]
    assert any(CAUSES[cause] in sentence for sentence in sentences), sentences


# ---------------------------------------------------------------------------- and never disturbs


def one_program_in_two_groups():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    train(*start(lambda net: DDP(net, process_group=groups[rank // 2])), epochs=1)
    train(*start(), data=torch.utils.data.Subset(DATA, range(40)), batch=1, epochs=4)


def test_groups_are_watched_apart(ranks):
    """Here two ranks' weights differ from the others', and both groups see all samples."""
    found = ranks(4).run(run, "one_program_in_two_groups")
    ranks(4).end()
    assert [len(sentences) for sentences in found] == [2, 0, 1, 0], found


def long_run():
    """How many keys the store has: before the watch and after 10 and after 40 checks."""
    model, optimizer = start()
    store = dist.group.WORLD.get_group_store()
    numbers = []
    for steps in (1, 50, 150):
        dist.barrier()
        numbers.append(store.num_keys())
        dist.barrier()
        for step in range(steps):
            take_step(model, optimizer, share(step), torch.arange(8) % 2)
    return numbers


def test_the_store_does_not_fill(ranks):
    before, after_few, after_many = ranks(2).run(long_run)[0]
    assert after_many <= after_few <= before + 4


def one_rank_never_posts():
    """Rank 1 has no watch: rank 0 says so, ends, and leaves few keys."""
    model = DDP(Net())
    optimizer = SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        watched(model, optimizer)
    else:
        watch.made += 1
    train(model, optimizer, 8)


def test_it_ends_when_a_rank_does_not_answer(ranks):
    _, sentence = ranks(2).run(run, "one_rank_never_posts")[0]
    assert "unanswered" in sentence


def errors_inside():
    """An error in the watch, one that has no hooks, and a sentence that nobody takes."""
    model = DDP(Net())
    optimizer = SGD(model.parameters(), lr=0.1)
    quiet = [watch(model, object()), watch(model, optimizer, say=lambda sentence: 1 / 0)]
    broken = watch(model, optimizer, say=said.append)
    broken.trained = lambda: 1 / 0
    train(model, optimizer, 1)
    assert not any(each.is_on for each in [broken, quiet[0]])
    return optimizer.state_dict()["state"] is not None


def test_an_error_inside_ends_the_watch_alone(ranks):
    assert ranks(2).run(errors_inside) == [True, True]


TO_THE_END = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from watch import watch

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer, every=5)
for step in range(20):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    if step == 7:
        for mode in "wr":  # tell the test, then wait for it
            open(f"pipe{dist.get_rank()}", mode).close()
print("trained", flush=True)
os._exit(0)  # the store is gone: torch would wait for it
"""


def write_script(folder, text):
    (folder / "train.py").write_text(text)
    (folder / "watch.py").write_text((ROOT / "tools" / "watch.py").read_text())
    return folder / "train.py"


def test_a_store_that_dies_ends_the_watch_alone(tmp_path):
    pipes = [tmp_path / "pipe0", tmp_path / "pipe1"]
    for pipe in pipes:
        os.mkfifo(pipe)
    run = Forked(2, write_script(tmp_path, TO_THE_END), cwd=tmp_path)
    for pipe in pipes:
        pipe.read_text()
    del run.store
    for pipe in pipes:
        pipe.write_text("")
    status, output = run.wait()
    assert status == 0 and output.count("trained") == 2, output
    assert output.count("watch 1 ends") == 2, output


def test_alone(forked, tmp_path):
    """World size 1, with and without a process group, in words."""
    program = """
import sys, torch, torch.distributed as dist
from torch.optim import SGD
from watch import watch
if "group" in sys.argv:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = torch.nn.Linear(2, 2)
optimizer = SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""
    for words in ([], ["group"]):
        status, output = forked(None, write_script(tmp_path, program), *words)
        assert status == 0 and output.endswith("trained\n"), output
        assert output.count("watch 1") == output.count("world size 1") == 1, output
