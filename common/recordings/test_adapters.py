"""The adapter lines of the pages' section For CS336 are executed: two ranks train through them."""

import copy
import re
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.testing.harness import ROOT

LADDER = ["ddp_individual_parameters", "ddp"]  # of the course in 2025 and in 2026
ADAPTERS = {
    "02_naive_ddp": LADDER,
    "03_flat_ddp": LADDER,
    "04_overlap_ddp": LADDER,
    "05_bucketed": ["ddp_bucketed", "ddp"],
    "06_sharded_optimizer": ["sharded_optimizer"],
    "06_sharded_optimizer/fsdp": ["fsdp"],
}


@pytest.mark.parametrize("stage", ADAPTERS)
def test_adapter_lines(ranks, stage):
    page = (ROOT / stage / "README.md").read_text()
    section = page.split("\n## For CS336\n")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    assert re.findall(r"^def get_(\w+)\(", code, re.MULTILINE) == ADAPTERS[stage]
    ranks(2).run(trains_through_adapters, code, str(ROOT / stage))


def trains_through_adapters(code: str, folder: str) -> None:
    """Each is called as the course's tests do, by the names of its arguments."""
    sys.path.insert(0, folder)
    adapters = {}
    exec(compile(code, "adapter lines", "exec"), adapters)
    for name in [name.removeprefix("get_") for name in adapters if name.startswith("get_")]:
        get = adapters[f"get_{name}"]
        after_backward = adapters.get(f"{name}_on_after_backward")
        if name == "sharded_optimizer":
            trains_with_a_sharded_optimizer(get)
        elif name == "fsdp":
            trains_sharded(get, after_backward, adapters["fsdp_gather_full_params"])
        elif name == "ddp_bucketed":
            batch_start = adapters["ddp_bucketed_on_train_batch_start"]
            for size in (0.0001, 25.0):
                trains_replicas(partial(get, bucket_size_mb=size), after_backward, batch_start)
        else:
            trains_replicas(get, after_backward)


class Net(nn.Module):
    """With a frozen parameter and tied weights, as the course's models."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.second.weight = self.first.weight

    def forward(self, tokens):
        x = torch.tanh(self.first(self.embedding(tokens)))
        return self.head(torch.tanh(self.second(x * self.frozen)))


def train(model, twin, optimizers, after_backward, values, batch_start=lambda: None):
    """Each rank trains the model with its own batch, the twin with all: the weights are equal.

    `values`: returns the model's whole weights by name.
    """
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(12, (2, 4 * dist.get_world_size()), generator=generator)
        batch_start()
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[mine]), targets[mine]).backward()
        after_backward()
        nn.functional.cross_entropy(twin(tokens), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        found = values()
        for name, expected in twin.named_parameters():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-10)


def trains_replicas(get, after_backward, batch_start=lambda **_: None):
    torch.manual_seed(0)
    twin = Net().double()
    torch.manual_seed(dist.get_rank())  # rank 0's weights, the twin's, must win
    model = get(module=Net().double())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin)]
    given = {"ddp_model": model, "optimizer": optimizers[0]}
    after = partial(after_backward, **given)
    start = partial(batch_start, **given)
    train(model, twin, optimizers, after, lambda: dict(model.module.named_parameters()), start)


def trains_with_a_sharded_optimizer(get):
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    sharded = get(params=model.parameters(), optimizer_cls=torch.optim.AdamW, **options)
    whole = torch.optim.AdamW(twin.parameters(), **options)

    def average_gradients():
        for parameter in model.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))

    train(model, twin, [sharded, whole], average_gradients, lambda: dict(model.named_parameters()))
    moments = []
    for optimizer in (sharded, whole):
        states = optimizer.state.values()
        moments.append(sum(state["exp_avg"].numel() for state in states))
    assert 0 < moments[0] < moments[1], "the optimizer's state is not sharded"


def trains_sharded(get, after_backward, gather):
    torch.manual_seed(0)
    twin = Net().double()
    model = get(module=copy.deepcopy(twin))
    held, whole = [sum(p.numel() for p in net.parameters()) for net in (model, twin)]
    assert held < whole, "nothing is sharded"
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (model, twin)]
    after = partial(after_backward, fsdp_model=model, optimizer=optimizers[0])
    train(model, twin, optimizers, after, partial(gather, fsdp_model=model))
    rounded = get(module=Net(), compute_dtype=torch.bfloat16)
    assert rounded(torch.tensor([1])).dtype == torch.bfloat16
