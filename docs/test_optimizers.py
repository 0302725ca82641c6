"""Which optimizers may be sharded: the table of everyday.md, computed by two ranks."""

from pathlib import Path

import pytest
import torch
from fsdp import FSDP
from sharded_optimizer import ShardedOptimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

PAGE = Path(__file__).with_name("everyday.md").read_text()
COLUMNS = ["ShardedOptimizer", "ZeroRedundancyOptimizer", "FSDP", "fully_shard"]


class ByNorm(torch.optim.Optimizer):
    """As LARS and LAMB: the larger a weight, the larger its step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def size(self, parameter) -> torch.Tensor:
        return parameter.norm() / parameter.grad.norm()

    @torch.no_grad()
    def step(self, closure=None):
        if closure:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                parameter.sub_(parameter.grad * self.size(parameter), alpha=group["lr"])


class ByNormOfAll(ByNorm):
    """As a Lamb that clips, Prodigy and D-Adaptation: by one number of all gradients."""

    def size(self, parameter) -> torch.Tensor:
        parameters = [other for group in self.param_groups for other in group["params"]]
        gradients = [other.grad for other in parameters if other.grad is not None]
        return 1 / sum(gradient.square().sum() for gradient in gradients).sqrt()


ROWS = {  # of the page: its classes
    "Adam, AdamW, SGD": [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD],
    "Adafactor": [torch.optim.Adafactor],
    "Muon": [torch.optim.Muon],
    "LBFGS": [torch.optim.LBFGS],
    "using a weight's norm": [ByNorm],
    "using a norm of all weights or gradients": [ByNormOfAll],
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    linear = [nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 8, bias=False)]
    return nn.Sequential(*linear).double()


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
    if column == "ShardedOptimizer":
        return model, ShardedOptimizer(model.parameters(), optimizer_cls, lr=0.05)
    if column == "ZeroRedundancyOptimizer":
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_cls, lr=0.05)
    if column == "FSDP":
        model = FSDP(model)
    else:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    return model, optimizer_cls(model.parameters(), lr=0.05)


def outcome(column: str, optimizer_cls) -> str:
    """On a rank: what becomes of three steps, compared with those of one process."""
    start, twin = layers().state_dict(), layers()
    train(twin, optimizer_cls(twin.parameters(), lr=0.05))
    try:
        model, optimizer = sharded(column, optimizer_cls)
        train(model, optimizer)
    except Exception:
        return "an error"
    whole = model.gather_full_params() if column == "FSDP" else model.state_dict()
    away = 0.0  # as a part of how far a weight has moved
    for name, expected in twin.state_dict().items():
        weight = whole[name].full_tensor() if isinstance(whole[name], DTensor) else whole[name]
        away = max(away, ((weight - expected).norm() / (expected - start[name]).norm()).item())
    return "equal" if away < 1e-10 else "close" if away < 0.1 else "wrong"


@pytest.mark.parametrize("name", ROWS)
def test_the_row_of_an_optimizer(ranks, name):
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {name}")]
    cells = row.strip("| ").split(" | ")[1:]
    for column, cell in zip(COLUMNS, cells, strict=True):
        allowed = cell.split(" or ")  # by torch's version
        for optimizer_cls in ROWS[name]:
            for found in ranks(2).run(outcome, column, optimizer_cls):
                assert found in allowed, (column, optimizer_cls)
