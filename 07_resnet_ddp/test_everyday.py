"""The blocks of the page's section Everyday DDP are executed, by two ranks."""

import re
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from common.testing.harness import ROOT

PAGE = (ROOT / "07_resnet_ddp" / "README.md").read_text()


def blocks() -> dict[str, str]:
    """By the words in bold in front of them."""
    section = re.search(r"^## Everyday DDP\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)[1]
    parts = re.split(r"^\*\*(.*?)\.\*\*", section, flags=re.MULTILINE)[1:]
    found = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        found[title] = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    return found


def everyday(path) -> list[torch.Tensor]:
    """On a rank: runs all blocks in order; returns the weights, and what each has to show."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(21, 4, generator=generator)
    data = TensorDataset(inputs, torch.randint(3, (21,), generator=generator))
    torch.manual_seed(rank)
    names = {"train_set": data, "test_set": data, "batch_size": 8, "epoch": 1, "seed": 5}
    names |= {"accumulation_steps": 3, "batch_size_that_lr_was_chosen_for": 8, "path": path}
    names |= {"model": DistributedDataParallel(nn.Linear(4, 3)), "device": torch.device("cpu")}
    names |= {"loss_function": nn.CrossEntropyLoss(), "rank": rank, "world_size": world_size}
    for part in (torch, dist, DataLoader, DistributedSampler, Subset, nullcontext):
        names[part.__name__.rpartition(".")[2]] = part
    names["dist"] = dist
    code = blocks()
    for title in ("Shares of the data", "The last, incomplete batch"):
        exec(code[title], names)
    assert [len(x) for x, _ in names["loader"]] == [4, 4], "10 of each rank, the last 2 dropped"
    assert list(names["share"].indices) == list(range(rank, 21, 2))

    exec(code["Effective batch and learning rate"], names)
    assert names["effective"] == 24 and names["scale"] == 3

    model = names["model"]
    mine = list(range(rank, 18, 2))
    names["micro_batches"] = [
        (inputs[part], data.tensors[1][part]) for part in (mine[:3], mine[3:6], mine[6:])
    ]
    exec(code["Accumulation"], names)
    [expected] = torch.autograd.grad(
        nn.functional.cross_entropy(model.module(inputs[:18]), data.tensors[1][:18]),
        [model.module.weight],
    )
    torch.testing.assert_close(model.module.weight.grad, expected)

    names["loss"] = torch.tensor(float(rank))
    exec(code["Printing the mean loss"], names)
    assert names["mean_loss"] == (world_size - 1) / 2

    exec(code["Saving"], names)
    assert torch.load(path).keys() == model.module.state_dict().keys()

    exec(code["Evaluating"], names)
    model.train()
    assert names["right"] == (model.module(inputs).argmax(1) == data.tensors[1]).sum()

    names |= {"inputs": inputs, "targets": data.tensors[1]}
    exec(code["Mixed precision"], names)
    assert model.module.weight.grad.dtype == torch.float32

    exec(code["Seeds"], names)
    return [model.module.weight.grad, torch.rand(1)]


def test_the_blocks(ranks, tmp_path):
    (gradient, number), (gradient_of_1, number_of_1) = ranks(2).run(everyday, tmp_path / "model.pt")
    assert torch.equal(gradient, gradient_of_1) and number != number_of_1
