"""The adapter lines of the pages' section For CS336 are executed: two ranks train through them."""

import ast
import copy
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.testing.harness import ROOT

# Of the course's tests/adapters.py.
SIGNATURES = {
    "get_ddp_individual_parameters": ["module"],
    "ddp_individual_parameters_on_after_backward": ["ddp_model", "optimizer"],
    "get_ddp_bucketed": ["module", "bucket_size_mb"],
    "ddp_bucketed_on_after_backward": ["ddp_model", "optimizer"],
    "ddp_bucketed_on_train_batch_start": ["ddp_model", "optimizer"],
    "get_ddp": ["module"],
    "ddp_on_after_backward": ["ddp_model", "optimizer"],
    "get_sharded_optimizer": ["params", "optimizer_cls", "kwargs"],
    "get_fsdp": ["module", "compute_dtype"],
    "fsdp_on_after_backward": ["fsdp_model", "optimizer"],
    "fsdp_gather_full_params": ["fsdp_model"],
}
LADDER = ["get_ddp_individual_parameters", "ddp_individual_parameters_on_after_backward"]  # 2025
LADDER += ["get_ddp", "ddp_on_after_backward"]  # 2026
ADAPTERS = {
    "02_naive_ddp": LADDER,
    "03_flat_ddp": LADDER,
    "04_overlap_ddp": LADDER,
    "05_bucketed": [name for name in SIGNATURES if "bucketed" in name] + LADDER[2:],
    "06_sharded_optimizer": ["get_sharded_optimizer"],
    "06_sharded_optimizer/fsdp": [name for name in SIGNATURES if "fsdp" in name],
}


def adapter_lines(text: str) -> str:
    """The python blocks of `## For CS336`, together."""
    section = re.search(r"^## For CS336\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```python\n(.*?)^```", section[1], re.DOTALL | re.MULTILINE)
    return "\n".join(blocks)


def check_adapters(ranks, code: str, folder: Path, names: list[str]) -> None:
    """They define these names, with the course's arguments, and two ranks train through them."""
    tree = ast.parse(code)
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert sorted(defined) == sorted(names)
    for name, node in defined.items():
        arguments = [one.arg for one in [*node.args.args, node.args.kwarg] if one]
        assert arguments == SIGNATURES[name], name
    ranks(2).run(trains_through_adapters, code, str(folder), names)


@pytest.mark.parametrize("stage", ADAPTERS)
def test_adapter_lines(ranks, stage):
    code = adapter_lines((ROOT / stage / "README.md").read_text())
    check_adapters(ranks, code, ROOT / stage, ADAPTERS[stage])


def trains_through_adapters(code: str, folder: str, names: list[str]) -> None:
    sys.path.insert(0, folder)
    adapters = {}
    exec(compile(code, "adapter lines", "exec"), adapters)
    imported = [value for value in adapters.values() if hasattr(value, "__module__")]
    files = [getattr(sys.modules.get(value.__module__), "__file__", None) for value in imported]
    assert folder in [str(Path(file).parent) for file in files if file], "not the stage's code"
    getters = {name: adapters[name] for name in names if name.startswith("get_")}
    assert getters
    for name, getter in getters.items():
        if name == "get_sharded_optimizer":
            trains_with_a_sharded_optimizer(getter)
        elif name == "get_fsdp":
            gather = adapters["fsdp_gather_full_params"]
            trains_sharded(getter, adapters["fsdp_on_after_backward"], gather)
            computes_in_bfloat16(getter, adapters["fsdp_on_after_backward"], gather)
        elif name == "get_ddp_bucketed":
            after_backward = adapters["ddp_bucketed_on_after_backward"]
            batch_start = adapters["ddp_bucketed_on_train_batch_start"]
            for size in (0.0001, 25.0):
                trains_replicas(partial(getter, bucket_size_mb=size), after_backward, batch_start)
        else:
            after_backward = adapters[name.removeprefix("get_") + "_on_after_backward"]
            trains_replicas(getter, after_backward)


class Net(nn.Module):
    """With a frozen parameter, and on demand tied weights, as the course's models."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, tokens):
        x = torch.tanh(self.first(self.embedding(tokens)))
        return self.head(torch.tanh(self.second(x * self.frozen)))


def batches(step: int):
    """The tokens and targets of this rank, and those of all."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(12, (2, 4 * dist.get_world_size()), generator=generator)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    return (tokens[mine], targets[mine]), (tokens, targets)


def backward(model, batch) -> None:
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def largest_difference(values: dict, twin: nn.Module) -> float:
    expected = dict(twin.named_parameters())
    assert expected.keys() <= values.keys(), list(values)
    return max((values[name] - value).abs().max().item() for name, value in expected.items())


def train(model, twin, optimizers, after_backward, values, batch_start=lambda: None):
    """Each rank trains the model with its own batch, the twin with all: the weights are equal."""
    for step in range(4):
        mine, everything = batches(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch_start()
        backward(model, mine)
        after_backward()
        backward(twin, everything)
        for optimizer in optimizers:
            optimizer.step()
        assert largest_difference(values(), twin) <= 1e-10, f"step {step}"


def trains_replicas(get, after_backward, batch_start=lambda **_: None):
    for tied in (False, True):
        torch.manual_seed(0)
        twin = Net(tied).double()
        torch.manual_seed(dist.get_rank())  # rank 0's weights, the twin's, must win
        model = get(Net(tied).double())
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin)]
        given = {"ddp_model": model, "optimizer": optimizers[0]}
        train(
            model,
            twin,
            optimizers,
            partial(after_backward, **given),
            lambda model=model: dict(model.module.named_parameters()),
            partial(batch_start, **given),
        )


def trains_with_a_sharded_optimizer(get):
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizers = [
        get(model.parameters(), torch.optim.AdamW, **options),
        torch.optim.AdamW(twin.parameters(), **options),
    ]

    def average_gradients():
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))

    train(model, twin, optimizers, average_gradients, lambda: dict(model.named_parameters()))
    held, whole = [
        sum(moments["exp_avg"].numel() for moments in optimizer.state.values())
        for optimizer in optimizers
    ]
    assert 0 < held < whole, "the optimizer's state is not sharded"


def trains_sharded(get, after_backward, gather):
    torch.manual_seed(0)
    twin = Net().double()
    model = get(copy.deepcopy(twin))
    held, whole = [sum(p.numel() for p in net.parameters()) for net in (model, twin)]
    assert held < whole, "nothing is sharded"
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (model, twin)]
    after = partial(after_backward, fsdp_model=model, optimizer=optimizers[0])
    train(model, twin, optimizers, after, partial(gather, fsdp_model=model))


def computes_in_bfloat16(get, after_backward, gather):
    torch.manual_seed(0)
    twin = Net()
    model = get(copy.deepcopy(twin), compute_dtype=torch.bfloat16)
    assert model(batches(0)[0][0]).dtype == torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, batches(0)[0])
    after_backward(fsdp_model=model, optimizer=optimizer)
    optimizer.step()
    values = gather(fsdp_model=model)
    assert all(value.dtype == torch.float32 for value in values.values())
    assert 0 < largest_difference(values, twin) < 1


@pytest.mark.parametrize(
    "old, new",
    [
        ("ddp_model.finish_gradient_synchronization()", "pass"),
        ("(ddp_model, optimizer)", "(model, optimizer)"),
        ("def get_ddp(", "def get_dpp("),
        ("naive_ddp import", "torch.nn.parallel import DistributedDataParallel as"),
    ],
)
def test_adapter_lines_that_are_wrong(ranks, old, new):
    code = adapter_lines((ROOT / "02_naive_ddp/README.md").read_text())
    assert old in code
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_adapters(ranks, code.replace(old, new), ROOT / "02_naive_ddp", LADDER)
