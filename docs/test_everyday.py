"""The blocks of everyday.md are executed, by several ranks."""

import multiprocessing
import re
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from tools.harness import ROOT

sys.path.insert(0, str(ROOT / "06_sharded_optimizer" / "fsdp"))
from fsdp import FSDP  # noqa: E402

PAGE = "**.**" + (ROOT / "common" / "docs" / "everyday.md").read_text()
BLOCKS = {}  # of code, by the words in bold in front of them; the imports are ""
for bold, part in re.findall(r"^\*\*(.*?)\*\*(.*?)(?=^\*\*|\Z)", PAGE, re.DOTALL | re.MULTILINE):
    BLOCKS[bold.strip(".")] = re.search(r"```python\n(.*?)```", part, re.DOTALL)[1]
INPUTS = torch.randn(21, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(21) % 3
DATA = TensorDataset(INPUTS, TARGETS)


def execute(title: str, **names) -> dict:
    """On a rank: the page's imports and one of its blocks, with these names; all names after it."""
    names |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    names |= {"device": torch.device("cpu")}
    exec(BLOCKS[""] + BLOCKS[title], names)
    return names


def check_gradient(title: str, samples: list[torch.Tensor], of_all, **names) -> None:
    """A block leaves the gradient of the mean over the samples of all ranks in one process."""
    model = DistributedDataParallel(nn.Linear(4, 3))
    batches = [(INPUTS[chosen], TARGETS[chosen]) for chosen in samples]
    execute(title, model=model, micro_batches=batches, loss_function=F.cross_entropy, **names)
    loss = F.cross_entropy(model.module(INPUTS[of_all]), TARGETS[of_all])
    expected = torch.autograd.grad(loss, model.module.weight)[0]
    torch.testing.assert_close(model.module.weight.grad, expected)


def seeds():
    execute("Seeds", seed=5)
    numbers = [None, None]
    dist.all_gather_object(numbers, torch.rand(1))
    assert numbers[0] != numbers[1]


def shares():
    names = execute("Shares", train_set=DATA, batch_size=8, epoch=1)
    assert [len(x) for x, _ in names["loader"]] == [4, 4], "10 of each rank, the last 2 dropped"
    options = {"accumulation_steps": 3, "batch_size_that_lr_was_chosen_for": 8}
    names = execute("Learning rate", loader=names["loader"], **options)
    assert names["effective"] == 24 and names["scale"] == 3


def means():
    rank = dist.get_rank()
    check_gradient("Accumulation", torch.arange(rank, 18, 2).split(3), range(18))
    uneven = [torch.arange(7), torch.arange(7, 9)] if rank == 0 else [torch.arange(9, 10)]
    check_gradient("Mean over tokens", uneven, range(10))


def steps():
    model = DistributedDataParallel(nn.Linear(4, 3))
    weight = model.module.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "optimizer": optimizer, "loss_function": F.cross_entropy}
    execute("Mixed precision", **names, inputs=INPUTS, targets=TARGETS)
    assert weight.grad.dtype == torch.float32
    norm = execute("Clipping", **names, max_norm=1e-3)["norm"]
    assert weight.grad.norm() < 1e-3 < norm

    before = weight.clone()
    empty = INPUTS[: 4 * dist.get_rank()], TARGETS[: 4 * dist.get_rank()]  # of rank 0
    execute("A rank whose loss is NaN", **names, loss=F.cross_entropy(model(empty[0]), empty[1]))
    assert torch.equal(weight, before)
    execute("A rank whose loss is NaN", **names, loss=model(INPUTS).sum())
    assert not torch.equal(weight, before)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return nn.Sequential(OrderedDict(layers=layers, last=nn.Linear(4, 3)))


def larger_models():
    """Every weight is split, and its gradient is that of one process, up to bfloat16's rounding."""
    network, twin = stack(), stack()
    execute("Larger models", network=network)
    for model, share in ((network, slice(dist.get_rank(), 20, 2)), (twin, slice(20))):
        F.cross_entropy(model(INPUTS[share]).float(), TARGETS[share]).backward()
    for weight, expected in zip(network.parameters(), twin.parameters(), strict=True):
        assert weight.to_local().numel() < expected.numel() and weight.dtype == torch.float32
        apart = (weight.grad.full_tensor() - expected.grad).norm()
        assert apart < 0.05 * expected.grad.norm()


def losses():
    rank = dist.get_rank()
    names = execute("Print the mean loss", loss=torch.tensor(float(rank)), epoch=1)
    assert names["mean_loss"] == 0.5
    best, loss = 1.0, 1 + 0.1 * (-1) ** rank  # only on rank 0 it is not better
    names = execute("Early stopping", best=best, loss=loss, bad_epochs=2, patience=3)
    assert names["stop"] and names["best"] == min(best, loss)
    assert names["bad_epochs"] == (3 if rank == 0 else 0)


def evaluation():
    """With BatchNorm's statistics of rank 0; a mask is as long as it was."""
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    model.module.register_buffer("mask", torch.ones(1 + rank))
    model.module[0].running_mean.fill_(5 + rank)
    model.module[0].running_var.fill_(5 + rank)
    right = execute("Evaluate", model=model, test_set=DATA)["right"]
    assert right == (model.module(INPUTS).argmax(1) == TARGETS).sum()
    for statistic in (model.module[0].running_mean, model.module[0].running_var):
        assert statistic.tolist() == 4 * [5.0]
    assert len(model.module.mask) == 1 + rank


@pytest.mark.parametrize("drill", [seeds, shares, means, steps, larger_models, losses, evaluation])
def test_blocks(ranks, drill):
    ranks(2).run(drill)


def test_no_block_is_left_out():
    """But the one for GPUs, which is "Device"."""
    code = Path(__file__).read_text()
    assert [title for title in BLOCKS if f'"{title}"' not in code] == []


class Mixture(nn.Module):
    """Each token goes through one of three experts; what comes out is what the page computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()

    def forward(self, tokens, choice):
        names = execute("Experts", experts=self.experts, tokens=tokens, choice=choice)
        return names["outputs"]


def train_experts(wrap) -> None:
    """A rank's tokens all go to an expert of its own, and no token to the last one."""
    rank = dist.get_rank()
    tokens = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    choice = torch.arange(6) % 2
    model, twin = wrap(Mixture()), Mixture()
    for _ in range(3):
        for each, share in ((model, slice(rank, None, 2)), (twin, slice(None))):
            each(tokens[share], choice[share]).square().mean().backward()
            getattr(each, "finish_gradient_synchronization", lambda: None)()
            torch.optim.SGD(each.parameters(), lr=0.5).step()
            each.zero_grad()
    whole = model.gather_full_params() if wrap is FSDP else model.module.state_dict()
    torch.testing.assert_close(dict(whole), dict(twin.state_dict()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, FSDP])
def test_experts(ranks, wrap):
    ranks(2).run(train_experts, wrap)


STREAMS = """
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
torch.manual_seed(0)
inputs, targets = torch.randn(17, 4).double(), torch.randint(3, (17,))
stream, batch_size = list(zip(inputs, targets)), 4
{stream}
mine = list(loader)
all_batches = [None] * world_size
dist.all_gather_object(all_batches, mine)
assert [len(batches) for batches in all_batches] == [5, 4]
seen = torch.cat([x for batches in all_batches for x, _ in batches])
assert sorted(seen.tolist()) == sorted(inputs.tolist())

network, twin = [torch.nn.Linear(4, 3).double() for _ in range(2)]
model = DistributedDataParallel(network)
twin.load_state_dict(network.state_dict())
optimizer, other = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, twin)]
nothing = inputs[:0], targets[:0]
{unequal}
for step in itertools.zip_longest(*all_batches, fillvalue=nothing):
    x, y = map(torch.cat, zip(*step))
    F.cross_entropy(twin(x), y).backward()
    other.step()
    other.zero_grad()
for weight, expected in zip(network.parameters(), twin.parameters()):
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-12)
print("both are right")
del model
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    multiprocessing.get_all_start_methods()[0] != "fork", reason="workers would import the script"
)
def test_streams_of_unequal_lengths(forked, tmp_path):
    """With worker processes: no sample is left out or seen twice, and steps are of all samples."""
    script = STREAMS.format(stream=BLOCKS["A stream"], unequal=BLOCKS["Unequal lengths"])
    path = tmp_path / "train.py"
    path.write_text(BLOCKS[""] + script)
    status, output = forked(2, path)
    assert status == 0 and output.count("both are right") == 2, output


LAYER = "torch.nn.Linear(4, 1)"


@pytest.mark.parametrize(
    "ranks_in_the_end, before_it, apart", [(3, "", 1e-12), (2, "torch.nn.Dropout(), ", 0)]
)
def test_training_goes_on(forked, tmp_path, ranks_in_the_end, before_it, apart):
    """In float64: with another number of ranks, and with the same dropout."""
    program = BLOCKS[""] + BLOCKS["Save and resume"]
    for old, new in (
        ("torch.manual_seed(0)", "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)"),
        (LAYER, f"torch.nn.Sequential({before_it}{LAYER})"),
        ("network.weight.tolist()", "''"),
    ):
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    path = tmp_path / "train.py"
    path.write_text(program)
    for world_size, last_step, name in (
        (2, 13, "undisturbed.pt"),
        (2, 7, "run.pt"),
        (ranks_in_the_end, 13, "run.pt"),
    ):
        status, output = forked(world_size, path, last_step, tmp_path / name)
        assert status == 0 and f"step {last_step}: " in output, output
    undisturbed, resumed = (torch.load(tmp_path / name) for name in ("undisturbed.pt", "run.pt"))
    torch.testing.assert_close(resumed["network"], undisturbed["network"], rtol=0, atol=apart)
