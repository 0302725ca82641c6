"""The blocks of everyday.md are executed, by two ranks."""

import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common.testing.harness import ROOT


def blocks() -> dict[str, str]:
    """By the words in bold in front of them; the imports are ""."""
    text = "**.**" + (ROOT / "common" / "docs" / "everyday.md").read_text()
    parts = re.split(r"^\*\*(.*?)\*\*", text, flags=re.MULTILINE)[1:]
    found = {}
    for title, part in zip(parts[::2], parts[1::2], strict=True):
        found[title.strip(".")] = re.search(r"```python\n(.*?)```", part, re.DOTALL)[1]
    return found


def everyday(path) -> list[torch.Tensor]:
    """On a rank: runs all blocks but that of the GPU; returns what the ranks must agree in, or not.

    What a block has to give is computed by one process from the samples of all.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    code = blocks()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(21, 4, generator=generator)
    targets = torch.randint(3, (21,), generator=generator)
    data = TensorDataset(inputs, targets)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(4, 3))
    weight = model.module.weight
    names = {"torch": torch, "dist": dist, "F": F, "rank": rank, "world_size": world_size}
    exec(code.pop(""), names)
    code.pop("Device")
    names |= {"train_set": data, "test_set": data, "batch_size": 8, "epoch": 1, "seed": 5}
    names |= {"accumulation_steps": 3, "batch_size_that_lr_was_chosen_for": 8, "path": path}
    names |= {"model": model, "device": torch.device("cpu"), "steps_done": 1, "max_norm": 1e-3}
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
    run("Resume in mid-epoch")
    [of_rest], of_all = list(names["rest"]), list(names["loader"])
    assert torch.equal(of_rest[0], of_all[1][0])

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
    run("A rank with a NaN, or an empty batch", loss=F.cross_entropy(model(empty[0]), empty[1]))
    assert torch.equal(weight, before)
    exec(blocks()["A rank with a NaN, or an empty batch"], names | {"loss": model(inputs).sum()})
    assert not torch.equal(weight, before)

    run("Uneven inputs", batches=[(inputs[:2], targets[:2])] * (1 + rank))
    run("Print the mean loss", loss=torch.tensor(float(rank)))
    assert names["mean_loss"] == (world_size - 1) / 2
    run("Save")
    assert torch.load(path).keys() == model.module.state_dict().keys()
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


def test_the_blocks(ranks, tmp_path):
    (gradient, number), (gradient_of_1, number_of_1) = ranks(2).run(everyday, tmp_path / "model.pt")
    assert torch.equal(gradient, gradient_of_1) and number != number_of_1
