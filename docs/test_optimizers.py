"""Which optimizers may be sharded: the table of everyday.md, computed by two ranks."""

import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from tools.harness import ROOT

sys.path[:0] = [str(ROOT / "06_sharded_optimizer" / "fsdp"), str(ROOT / "06_sharded_optimizer")]

from fsdp import FSDP  # noqa: E402
from sharded_optimizer import ShardedOptimizer  # noqa: E402

PAGE = (ROOT / "common" / "docs" / "everyday.md").read_text()
COLUMNS = ["ShardedOptimizer", "ZeroRedundancyOptimizer", "FSDP", "fully_shard"]


class OfOurOwn(torch.optim.Optimizer):
    """A weight steps by the learning rate times change(weight, its group)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.change(parameter, group), alpha=group["lr"])


class KeepsList(OfOurOwn):
    """Momentum as a list of tensors, element by element."""

    def change(self, parameter, group):
        means = self.state[parameter].setdefault("means", [torch.zeros_like(parameter)])
        return means[0].lerp_(parameter.grad, 0.5)


class WantsFlag(OfOurOwn):
    """Every group must say whether it steps by signs: there is no default."""

    def __init__(self, params, lr=0.1):
        groups = list(params)
        assert all("sign" in group for group in groups)
        super().__init__(groups, lr)

    def change(self, parameter, group):
        return parameter.grad.sign() if group["sign"] else parameter.grad


class ByNorms(OfOurOwn):
    """As LARS and LAMB: the larger the weight, the larger its step."""

    def change(self, parameter, group):
        return parameter.grad * (parameter.norm() / parameter.grad.norm())


ROWS = {  # of the page: its classes
    "Adam, AdamW, SGD": [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD],
    "Adafactor": [torch.optim.Adafactor],
    "Muon": [torch.optim.Muon],
    "LBFGS": [torch.optim.LBFGS],
    "one that keeps a list of tensors": [KeepsList],
    "one with a flag per group": [WantsFlag],
    "one that needs a weight's norm (LARS, LAMB)": [ByNorms],
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    linear = [nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 8, bias=False)]
    return nn.Sequential(*linear).double()


def groups_of(model: nn.Module, optimizer_cls) -> list[dict]:
    first, last = model.parameters()
    if optimizer_cls is torch.optim.LBFGS:  # takes one group only
        return [{"params": [first, last]}]
    return [{"params": [first], "sign": True}, {"params": [last], "sign": False}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Three steps on one batch, the same on every rank: gradients need no average."""
    inputs = torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - 0.5).square().mean()
        loss.backward()
        getattr(model, "finish_gradient_synchronization", lambda: None)()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def sharded(column: str, optimizer_cls) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers()
    options = {"lr": 0.05}
    if column == "FSDP":
        model = FSDP(model)
    elif column == "fully_shard":
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    groups = groups_of(model, optimizer_cls)
    if column == "ShardedOptimizer":
        return model, ShardedOptimizer(groups, optimizer_cls, **options)
    if column == "ZeroRedundancyOptimizer":
        return model, ZeroRedundancyOptimizer(groups, optimizer_class=optimizer_cls, **options)
    return model, optimizer_cls(groups, **options)


def outcome(column: str, optimizer_cls) -> str:
    """On a rank: what becomes of three steps, compared with those of one process."""
    start, twin = layers().state_dict(), layers()
    train(twin, optimizer_cls(groups_of(twin, optimizer_cls), lr=0.05))
    try:
        model, optimizer = sharded(column, optimizer_cls)
        train(model, optimizer)
    except Exception:
        return "an error"
    whole = model.gather_full_params() if column == "FSDP" else model.state_dict()
    away = 0.0  # as a part of how far a weight has moved
    for name, expected in twin.state_dict().items():
        weight = whole[name].full_tensor() if isinstance(whole[name], DTensor) else whole[name]
        moved = (expected - start[name]).norm()
        away = max(away, ((weight - expected).norm() / moved).item())
    return "equal" if away < 1e-10 else "close" if away < 0.1 else "wrong"


@pytest.mark.parametrize("name", ROWS)
def test_the_row_of_an_optimizer(ranks, name):
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {name} | ")]
    cells = row.strip("| ").split(" | ")[1:]
    for column, cell in zip(COLUMNS, cells, strict=True):
        allowed = cell.split(" or ")  # by torch's version
        for optimizer_cls in ROWS[name]:
            for found in ranks(2).run(outcome, column, optimizer_cls):
                assert found in allowed, (column, optimizer_cls)
