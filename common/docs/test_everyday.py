"""The blocks of everyday.md are executed, by several ranks."""

import multiprocessing
import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common.testing.harness import ROOT

sys.path.insert(0, str(ROOT / "06_sharded_optimizer" / "fsdp"))
from fsdp import FSDP  # noqa: E402

# Blocks that other tests run, and the one for GPUs.
ELSEWHERE = ["Device", "A stream", "Unequal lengths", "Experts", "Save and resume"]


def blocks() -> dict[str, str]:
    """By the words in bold in front of them; the imports are ""."""
    text = "**.**" + (ROOT / "common" / "docs" / "everyday.md").read_text()
    parts = re.split(r"^\*\*(.*?)\*\*", text, flags=re.MULTILINE)[1:]
    found = {}
    for title, part in zip(parts[::2], parts[1::2], strict=True):
        found[title.strip(".")] = re.search(r"```python\n(.*?)```", part, re.DOTALL)[1]
    return found


def everyday() -> list[torch.Tensor]:
    """On a rank: runs what ELSEWHERE has not; returns what the ranks must agree in, or not.

    What a block has to give is computed by one process from the samples of all.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    code = blocks()
    for title in ELSEWHERE:
        code.pop(title)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(21, 4, generator=generator)
    targets = torch.randint(3, (21,), generator=generator)
    data = TensorDataset(inputs, targets)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(4, 3))
    weight = model.module.weight
    names = {"torch": torch, "dist": dist, "F": F, "rank": rank, "world_size": world_size}
    exec(code.pop(""), names)
    names |= {"train_set": data, "test_set": data, "batch_size": 8, "epoch": 1, "seed": 5}
    names |= {"accumulation_steps": 3, "batch_size_that_lr_was_chosen_for": 8}
    names |= {"model": model, "device": torch.device("cpu"), "max_norm": 1e-3}
    names |= {"loss_function": nn.CrossEntropyLoss()}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(title: str, **variables) -> None:
        names.update(variables)
        exec(code.pop(title), names)

    def gradient_of_mean(indices) -> torch.Tensor:
        """Of the mean loss over these samples, in one process."""
        loss = F.cross_entropy(model.module(inputs[indices]), targets[indices])
        return torch.autograd.grad(loss, [weight])[0]

    run("Shares")
    assert [len(x) for x, _ in names["loader"]] == [4, 4], "10 of each rank, the last 2 dropped"
    run("Learning rate")
    assert names["effective"] == 24 and names["scale"] == 3

    mine = torch.arange(rank, 18, 2)
    run("Accumulation", micro_batches=[(inputs[i], targets[i]) for i in mine.split(3)])
    torch.testing.assert_close(weight.grad, gradient_of_mean(range(18)))

    model.zero_grad()
    uneven = [torch.arange(7), torch.arange(7, 9)] if rank == 0 else [torch.arange(9, 10)]
    run("Mean over tokens", micro_batches=[(inputs[i], targets[i]) for i in uneven])
    torch.testing.assert_close(weight.grad, gradient_of_mean(range(10)))

    run("Clipping")
    assert weight.grad.norm() < 1e-3 and names["norm"] > 1e-3

    before = weight.clone()
    empty = inputs[: 4 * rank], targets[: 4 * rank]  # of rank 0
    run("A rank whose loss is NaN", loss=F.cross_entropy(model(empty[0]), empty[1]))
    assert torch.equal(weight, before)
    exec(blocks()["A rank whose loss is NaN"], names | {"loss": model(inputs).sum()})
    assert not torch.equal(weight, before)

    run("Print the mean loss", loss=torch.tensor(float(rank)))
    assert names["mean_loss"] == (world_size - 1) / 2
    best, loss = 1.0, 1 + 0.1 * (-1) ** rank  # only on rank 0 it is not better
    run("Early stopping", best=best, loss=loss, bad_epochs=2, patience=3)
    assert names["stop"] and names["best"] == min(best, loss)
    assert names["bad_epochs"] == (3 if rank == 0 else 0)
    run("Evaluate")
    model.train()
    assert list(names["share"].indices) == list(range(rank, 21, 2))
    assert names["right"] == (model.module(inputs).argmax(1) == targets).sum()

    model.zero_grad()
    run("Mixed precision", inputs=inputs, targets=targets)
    assert weight.grad.dtype == torch.float32
    run("Seeds")
    assert not code, f"not executed: {list(code)}"
    return [weight.grad, torch.rand(1)]


def test_the_blocks(ranks):
    (gradient, number), (gradient_of_1, number_of_1) = ranks(2).run(everyday)
    assert torch.equal(gradient, gradient_of_1) and number != number_of_1


def evaluate() -> list[list[float]]:
    """On a rank: BatchNorm's statistics once they are evaluated; a mask is as long as it was."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    model.module.register_buffer("mask", torch.ones(1 + rank))
    for statistic in (model.module[0].running_mean, model.module[0].running_var):
        statistic.fill_(5 + rank)
    inputs, targets = torch.linspace(-1, 1, 40).view(10, 4), torch.arange(10) % 3
    names = {"torch": torch, "dist": dist, "rank": rank, "world_size": world_size}
    names |= {"model": model, "device": torch.device("cpu")}
    exec(blocks()[""], names)
    exec(blocks()["Evaluate"], names | {"test_set": TensorDataset(inputs, targets)})
    assert len(model.module.mask) == 1 + rank
    return [model.module[0].running_mean.tolist(), model.module[0].running_var.tolist()]


def test_all_evaluate_with_the_statistics_of_rank_0(ranks):
    assert ranks(2).run(evaluate) == 2 * [2 * [4 * [5.0]]]


class Mixture(nn.Module):
    """Each token goes through one of three experts; what comes out is what the page computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()

    def forward(self, tokens, choice):
        names = {"torch": torch, "experts": self.experts, "tokens": tokens, "choice": choice}
        exec(blocks()["Experts"], names)
        return names["outputs"]


def train_experts(wrap) -> None:
    """A rank's tokens all go to an expert of its own, and no token to the last one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    choice = torch.arange(6) % world_size
    model, twin = wrap(Mixture()), Mixture()
    shares = [slice(rank, None, world_size), slice(None)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, twin)]
    for _ in range(3):
        for each, optimizer, share in zip((model, twin), optimizers, shares, strict=True):
            each(tokens[share], choice[share]).square().mean().backward()
            getattr(each, "finish_gradient_synchronization", lambda: None)()
            optimizer.step()
            optimizer.zero_grad()
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
    code = blocks()
    script = STREAMS.format(stream=code["A stream"], unequal=code["Unequal lengths"])
    path = tmp_path / "train.py"
    path.write_text(code[""] + script)
    status, output = forked(2, path)
    assert status == 0 and output.count("both are right") == 2, output


def resumable(folder, **changes):
    """The page's program in float64, with some of its text replaced; returns its path."""
    program = blocks()[""] + blocks()["Save and resume"]
    in_float64 = "torch.set_default_dtype(torch.float64)\ntorch.manual_seed(0)"
    for old, new in {"torch.manual_seed(0)": in_float64, **changes}.items():
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    path = folder / "train.py"
    path.write_text(program)
    return path


def weights_of(forked, path, name: str, *runs) -> list[torch.Tensor]:
    """What is saved after runs on so many ranks, up to such a step."""
    for world_size, last_step in runs:
        status, output = forked(world_size, path, last_step, path.with_name(name))
        assert status == 0 and f"step {last_step}: " in output, output
    return list(torch.load(path.with_name(name))["network"].values())


def test_training_goes_on_with_another_number_of_ranks(forked, tmp_path):
    path = resumable(tmp_path)
    undisturbed = weights_of(forked, path, "undisturbed.pt", (2, 13))
    resumed = weights_of(forked, path, "run.pt", (2, 7), (3, 13))
    torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=1e-12)


def test_training_goes_on_with_the_same_dropout(forked, tmp_path):
    layer = "torch.nn.Linear(4, 1)"
    path = resumable(
        tmp_path,
        **{
            layer: f"torch.nn.Sequential(torch.nn.Dropout(), {layer})",
            "network.weight": "network[1].weight",
        },
    )
    undisturbed = weights_of(forked, path, "undisturbed.pt", (2, 13))
    resumed = weights_of(forked, path, "run.pt", (2, 7), (2, 13))
    torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)
