"""The small models of the checks, the loss of a share of a batch, and how a class is called."""

import importlib
import sys
from functools import partial
from inspect import signature
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from users_class import FINISHES, GATHERS, bucket_options, finish_of, method_of

from tools.check.findings import NOT_REDUCED

SMALL_BUCKET_MB = 0.0005  # so that our models fill several


class Layout(NamedTuple):
    """Says what our models are made of: a module's layers, a dtype and two sizes."""

    layers: ModuleType = nn
    dtype: torch.dtype = torch.float64
    rows: int = 6  # of the embedding
    width: int = 7


PLAIN = Layout()
WIDTHS_WITH_A_REST = 7, 8  # of 7 rows: a weight with or without its bias, on most ranks


def layout_for(layers: str, is_sharded: bool) -> Layout:
    """Return the layout with this module's layers; for FSDP of sizes that all ranks can divide.

    It is float32 there, because many an FSDP keeps its weights so, whatever the module's are.
    """
    layout = Layout(module_of(layers)) if layers else PLAIN
    return divisible(layout)._replace(dtype=torch.float32) if is_sharded else layout


def module_of(layers: str) -> ModuleType:
    """Import a module by name; if it is the file that MINE names, it is here by another one."""
    return sys.modules.get(f"mine_{layers}") or importlib.import_module(layers)


def divisible(layout: Layout) -> Layout:
    """Return sizes that all ranks can divide; not larger: float32 rounds small gradients."""
    ranks = dist.get_world_size()
    size = -(-6 // ranks) * ranks
    return layout._replace(rows=size, width=size)


def embedding(layout: Layout, rows: int, width: int) -> nn.Module:
    return getattr(layout.layers, "Embedding", nn.Embedding)(rows, width)


def tokens_of(x: torch.Tensor) -> torch.Tensor:
    return (3 * x).abs().long().clamp(max=5)


class Plain(nn.Module):
    """Has parameters some of which have a shape in common, and a buffer."""

    rank = 0  # on which some of the others take another way

    def __init__(self, layout: Layout):
        super().__init__()
        linear, width = layout.layers.Linear, layout.width
        self.embedding = embedding(layout, layout.rows, width)
        self.first = linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.second = linear(width, width)
        self.last = linear(width, layout.rows)
        self.register_buffer("offset", torch.ones(()))
        self.to(layout.dtype)

    def forward(self, x):
        return self.last(self.between(self.embedding(tokens_of(x)) + self.offset))

    def between(self, x):
        return self.second(self.norm(self.first(x).tanh())).tanh()


class TiedAndFrozen(Plain):
    def __init__(self, layout):
        super().__init__(layout)
        name, weight = next(self.first.named_parameters())  # a course may call it W
        setattr(self.second, name, weight)
        self.last.requires_grad_(False)


class Unused(Plain):
    """Has a layer that only rank 0 uses, and one that nobody uses."""

    def __init__(self, layout):
        super().__init__(layout)
        self.sometimes = layout.layers.Linear(layout.width, layout.width).to(layout.dtype)
        self.never = layout.layers.Linear(layout.width, layout.width).to(layout.dtype)

    def between(self, x):
        return super().between(self.sometimes(x) if self.rank == 0 else x)


class Branches(Plain):
    """Takes its layers in one order on even ranks, and in the other on odd ones; a scalar between.

    Its two large weights do not fit into one bucket of 25 MB.
    """

    def __init__(self, layout):
        super().__init__(layout._replace(width=1300))
        self.scale = nn.Parameter(torch.ones((), dtype=layout.dtype))

    def between(self, x):
        if self.rank % 2 == 0:
            return self.norm(self.second(self.scale * self.first(x).tanh()))
        return self.norm(self.first(self.scale * self.second(x).tanh()))


class SeveralDtypes(Plain):
    """Has a norm in float32: too little memory to be taken for main gradients."""

    def __init__(self, layout):
        super().__init__(layout)
        self.norm.float()

    def between(self, x):
        return self.second(self.norm(self.first(x).float()).to(x.dtype)).tanh()


class Transposed(Plain):
    """Has a weight that is not contiguous, and nor is its gradient; as with channels_last."""

    def __init__(self, layout):
        super().__init__(layout)
        weight = torch.randn(layout.width, layout.width, dtype=layout.dtype)
        self.transposed = nn.Parameter(weight.T)

    def between(self, x):
        return super().between(x @ self.transposed)


def new(build, layout: Layout = PLAIN, seed: int = 0) -> nn.Module:
    """Build a model, the same on all ranks."""
    torch.manual_seed(seed)
    return build(layout)


def wrap(mine, module: nn.Module) -> nn.Module:
    """Return the user's wrapper of a module, with small buckets."""
    module.rank = dist.get_rank()
    return mine(module, **bucket_options(mine, SMALL_BUCKET_MB))


class Around(nn.Module):
    """Makes a module of a wrapper with a course's functions.

    These are given the wrapper and an optimizer; after_backward may take the wrapper alone.
    """

    def __init__(self, wrapper, after_backward=None, before_forward=None, gather=None):
        super().__init__()
        self.wrapper = wrapper
        self.optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.0)
        self.before_forward = before_forward
        if after_backward:
            given = (wrapper, self.optimizer)[: len(signature(after_backward).parameters)]
            self.finish_gradient_synchronization = partial(after_backward, *given)
        if gather:
            self.gather_full_params = partial(gather, wrapper)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.wrapper, name)

    def forward(self, *inputs):
        if self.before_forward and self.training and torch.is_grad_enabled():
            self.before_forward(self.wrapper, self.optimizer)
        return self.wrapper(*inputs)


def inputs_of(step: int, part: int, rank: int) -> torch.Tensor:
    """Return a rank's share of a batch: numbers that any dtype can hold."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
    return torch.randint(-16, 17, (4, 6), generator=generator).double() / 8


def loss_of(model: nn.Module, step: int, part: int, rank: int) -> torch.Tensor:
    """Return the loss of a rank's share of a batch; who accumulates has several parts of a step."""
    return model(inputs_of(step, part, rank)).double().square().mean()


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Return what an optimizer gets: the parameters, or a list `shards` that is not among them."""
    parameters = list(model.parameters())
    shards = getattr(model, "shards", None)
    if isinstance(shards, list) and not set(shards) <= set(parameters):
        return shards
    return parameters


def finish(model: nn.Module) -> None:
    if method := finish_of(model):
        method()


def gather_of(model: nn.Module):
    """Return its method that returns whole weights, by one of the usual names."""
    return method_of(model, GATHERS)


def of_user(model: nn.Module):
    return model.wrapper if isinstance(model, Around) else model


def public_names(model: nn.Module) -> list[str]:
    """Return the names of the user's own methods, and not those of every module."""
    names = [name for name in dir(type(of_user(model))) if name[0] != "_"]
    return [name for name in names if not hasattr(nn.Module, name)]


def why_not_reduced(model: nn.Module) -> str:
    """Return what it means that gradients are a rank's own."""
    others = public_names(model)
    if finish_of(model) or not others:
        return NOT_REDUCED
    return f"nobody calls its finish, {FINISHES[0]}(): perhaps it is one of {', '.join(others)}"
