"""same: right programs are the same, wrong ones never; the cause is named; training goes on.

`train` is a right program; a row of a table says what its program does otherwise. It runs on one
rank, which records, and on two, which compare.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bucketed import BucketedDDP
from naive_ddp import NaiveDDP
from sharded_optimizer import ShardedOptimizer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW
from zero2 import ZeRO2

from tools.same import same

GENERATOR = torch.Generator().manual_seed(5)
INPUTS = torch.randn(400, 6, generator=GENERATOR)
BATCH = 16
said = []


class Net(nn.Module):
    def __init__(self, norm=False, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).tanh()))


def share(step, rank=None, world_size=None):
    """This rank's rows of a step."""
    rank = dist.get_rank() if rank is None else rank
    rows = torch.arange(step * BATCH, (step + 1) * BATCH)
    return rows[rank :: world_size or dist.get_world_size()]


def nothing(*_, **__):
    """What a right program does where others make their mistake."""


def train(
    file,
    net=Net,
    wrap=DDP,
    optimizer=SGD,
    lr=0.1,
    micro_batches=1,
    synchronized=-1,  # which of them
    rows=share,
    loss=F.cross_entropy,
    through=lambda model: model,
    before=nothing,
    after=nothing,
    watch=same,
):
    torch.manual_seed(0)
    model = wrap(net())
    optimizer = optimizer(getattr(model, "shards", model.parameters()), lr=lr)
    watch(model, optimizer, file, say=said.append)
    torch.manual_seed(7 + dist.get_rank())
    for step in range(6):
        for number in range(micro_batches):
            mine = rows(step)[number::micro_batches]
            is_last = number == range(micro_batches)[synchronized]
            with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                (loss(through(model)(INPUTS[mine]), mine % 2) / micro_batches).backward()
        getattr(model, "finish_gradient_synchronization", nothing)()
        before(model, step)
        optimizer.step()
        after(model, step)
        optimizer.zero_grad()
        if step == 4:
            dist.barrier()  # all have posted, and in the last step rank 0 reads
    return model, optimizer


def by_torch(net):
    for layer in (net.first, net.last, net):
        fully_shard(layer)
    return net


class Summed(NaiveDDP):
    def finish_gradient_synchronization(self):
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)


def clip_first(net):
    model = NaiveDDP(net)
    finish = model.finish_gradient_synchronization

    def clip_and_finish():
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        finish()

    model.finish_gradient_synchronization = clip_and_finish
    return model


def of_another_seed():
    torch.manual_seed(dist.get_world_size())
    return Net()


def resumed(parameters, lr):
    """With momentum on one rank."""
    optimizer = SGD(parameters, lr=lr, momentum=0.9)
    if dist.get_world_size() == 1:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.1)
    return optimizer


def spoil(model, step, when, of_gradient=False):
    """Change a number on rank 1 alone."""
    bias = model.module.last.bias
    if dist.get_rank() == 1 and step == when:
        changed = bias.grad if of_gradient else bias.data
        changed[0] += 0.001


def leave_out(model, step):
    """Train no bias in one process."""
    if dist.get_world_size() == 1:
        model.module.last.bias.grad = None


def lr_times_ranks(parameters, lr):
    return SGD(parameters, lr=lr * dist.get_world_size())


ADAM = {"optimizer": AdamW, "lr": 0.01}
SUM = {"loss": partial(F.cross_entropy, reduction="sum")}
WEIGHTED = {"loss": partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0]))}
RIGHT = {
    "DDP": {},
    "micro-batches": {"wrap": BucketedDDP, "micro_batches": 2, **ADAM},
    "ShardedOptimizer": {"optimizer": partial(ShardedOptimizer, optimizer_cls=SGD)},
    "ZeRO2": {"wrap": partial(ZeRO2, bucket_size_mb=1e-4), **ADAM},
    "fully_shard": {"wrap": by_torch, **ADAM},
    "bfloat16": {
        "net": lambda: Net().bfloat16(),
        "through": lambda model: lambda x: model(x.bfloat16()).float(),
    },
}
WRONG = {  # and what its verdict says
    "no sampler": ({"rows": partial(share, rank=0, world_size=1)}, "each comes 2 times"),
    "ranks share samples": ({"rows": partial(share, rank=0)}, "24 more come again"),
    "another order": ({"rows": lambda step: share(step + dist.get_world_size())}, "0 of 16"),
    "rate": ({"optimizer": lr_times_ranks}, "0.2 instead of 0.1"),
    "seed": ({"net": of_another_seed}, "initial values of all weights"),
    "mean of sums": (SUM, "0.5 times as large"),
    "mean of sums in shards": ({**SUM, **ADAM, "wrap": by_torch}, "0.5 times as large"),
    "sum of means": ({"wrap": Summed}, "summed over the ranks, not averaged"),
    "class weights": (WEIGHTED, "class weights"),
    "clips first": ({"wrap": clip_first}, "clipped"),
    "momentum": ({"optimizer": resumed}, "state"),
    "a part alone": ({"before": leave_out}, "last.bias are no longer zero"),
    "dropout": ({"net": partial(Net, dropout=0.3)}, "dropout"),
    "BatchNorm": ({"net": partial(Net, norm=True)}, "BatchNorm"),
    "bypassed": ({"through": lambda model: model.module}, "model.module"),
    "no_sync": ({"micro_batches": 2, "synchronized": 0}, "no_sync"),
    # Ranks that drift apart were "the same" in a first version, which asked the mean alone.
    "weights apart in 2": ({"after": partial(spoil, when=0)}, "last.bias in step 2"),
    "weights apart in 3": ({"after": partial(spoil, when=1)}, "last.bias in step 3"),
    "gradients apart": ({"before": partial(spoil, when=1, of_gradient=True)}, "step 2"),
}


def run(name, file):
    said.clear()
    options = RIGHT[name] if name in RIGHT else WRONG[name][0]
    train(file, **options)
    return said.copy()


def verdict(ranks, name, file):
    [recorded] = ranks(1).run(run, name, str(file))
    assert "recorded" in recorded[0]
    by_rank_0, by_rank_1 = ranks(2).run(run, name, str(file))
    assert len(by_rank_0) == 1 and not by_rank_1
    return by_rank_0[0]


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_the_same(ranks, tmp_path, name):
    sentence = verdict(ranks, name, tmp_path / "one.json")
    assert sentence.startswith("The same as one process: samples, rates"), sentence
    assert "one.json, made by one process" in sentence and "not compared" in sentence


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_not(ranks, tmp_path, name):
    sentence = verdict(ranks, name, tmp_path / "one.json")
    assert not sentence.startswith("The same") and WRONG[name][1] in sentence, sentence


def test_a_file_of_two_ranks_is_told_as_such(ranks, tmp_path):
    [[recorded], _] = ranks(2).run(run, "DDP", str(tmp_path / "two.json"))
    [[compared], _] = ranks(2).run(run, "DDP", str(tmp_path / "two.json"))
    assert "2 ranks are recorded" in recorded and "mistake of both" in compared
    [[refused], _] = ranks(2).run(run, "bypassed", str(tmp_path / "none.json"))
    assert "nothing is recorded" in refused and not (tmp_path / "none.json").exists()


def raising(sentence):
    raise ValueError(sentence)


def same_that_raises(model, optimizer, file, say):
    same(model, optimizer, file, say=raising)


def same_without_hooks(model, optimizer, file, say):
    same(model, object(), file, say)


@pytest.mark.parametrize("watch", [same, same_that_raises, same_without_hooks])
def test_training_is_as_without_it(ranks, tmp_path, watch):
    """Also with a broken file, and after step 3 no hook is left."""
    (tmp_path / "broken.json").write_text("{")
    ranks(2).run(trains_alike, str(tmp_path / "broken.json"), watch)
    ranks(2).run(trains_alike, str(tmp_path / "one.json"), watch)


def trains_alike(file, watch):
    model, optimizer = train(file, watch=watch)
    expected, _ = train(file, watch=nothing)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    hooks = [*model.module._forward_pre_hooks, *model.module._forward_hooks]
    hooks += [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    assert not hooks or watch is same_without_hooks


def test_no_device_is_asked_before_step_3_is_over():
    """The meta device has no values, so the comparison ends when it copies its numbers."""
    model = nn.Linear(6, 2, device="meta")
    optimizer = SGD(model.parameters(), lr=0.1)
    comparison = same(model, optimizer, "none.json")
    for _ in range(3):
        assert comparison.is_on
        model(torch.ones(4, 6, device="meta")).sum().backward()
        optimizer.step()
    assert not comparison.is_on
