"""The small models of the checks, the loss of a share of a batch, and how a class is called."""

import importlib
import re
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from tools.check.findings import NOT_REDUCED

layers = nn  # a module with Linear and Embedding
dtype = torch.float64
FINISHES = """finish_gradient_synchronization finish_gradient_sync finish synchronize sync_gradients
average_gradients reduce_gradients all_reduce_gradients allreduce_gradients""".split()


def choose(of_user: str, is_sharded: bool) -> None:
    """Build models of a module's own layers; for FSDP in float32, of sizes that ranks can divide.

    Many an FSDP keeps its weights in float32, whatever those of the module are.
    """
    global layers, dtype
    layers = importlib.import_module(of_user) if of_user else nn
    dtype = torch.float32 if is_sharded else torch.float64
    ranks = dist.get_world_size()
    divisible = -(-6 // ranks) * ranks  # not larger: float32 rounds small gradients
    Plain.rows, Plain.width = (divisible, divisible) if is_sharded else (6, 7)


class Plain(nn.Module):
    """Some of its parameters have a shape in common; a buffer."""

    rank = 0  # on which some of the others take another way
    rows, width = 6, 7  # of the embedding

    def __init__(self):
        super().__init__()
        rows, width = self.rows, self.width
        self.embedding = getattr(layers, "Embedding", nn.Embedding)(rows, width)
        self.first = layers.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.second = layers.Linear(width, width)
        self.last = layers.Linear(width, rows)
        self.register_buffer("offset", torch.ones(()))
        self.to(dtype)

    def forward(self, x):
        tokens = (3 * x).abs().long().clamp(max=5)
        return self.last(self.between(self.embedding(tokens) + self.offset))

    def between(self, x):
        return self.second(self.norm(self.first(x).tanh())).tanh()


class TiedAndFrozen(Plain):
    def __init__(self):
        super().__init__()
        name, weight = next(self.first.named_parameters())  # a course may call it W
        setattr(self.second, name, weight)
        self.last.requires_grad_(False)


class Unused(Plain):
    """Rank 0 uses one layer more than the others, and nobody uses another one."""

    def __init__(self):
        super().__init__()
        self.sometimes = layers.Linear(self.width, self.width).to(dtype)
        self.never = layers.Linear(self.width, self.width).to(dtype)

    def between(self, x):
        return super().between(self.sometimes(x) if self.rank == 0 else x)


class Branches(Plain):
    """Even ranks go through its layers in one order, odd ones in the other; a scalar between.

    Its two large weights do not fit into one bucket of 25 MB.
    """

    width = 1300

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def between(self, x):
        if self.rank % 2 == 0:
            return self.norm(self.second(self.scale * self.first(x).tanh()))
        return self.norm(self.first(self.scale * self.second(x).tanh()))


class SeveralDtypes(Plain):
    def __init__(self):
        super().__init__()
        self.second.float()

    def between(self, x):
        return self.second(self.norm(self.first(x)).float()).tanh().to(dtype)


def new(build, seed: int = 0) -> nn.Module:
    """The same model on all ranks."""
    torch.manual_seed(seed)
    return build()


def wrap(mine, module: nn.Module) -> nn.Module:
    """The user's wrapper of it; with buckets so small that our models fill several."""
    module.rank = dist.get_rank()
    options = {}
    for name, argument in signature(mine).parameters.items():
        if re.fullmatch("bucket(_size|_cap)?(_mb|_bytes)?", name):
            is_large = isinstance(argument.default, int | float) and argument.default > 10_000
            options[name] = 512 if is_large or "bytes" in name else 0.0005  # bytes, or megabytes
    model = mine(module, **options)
    is_around = hasattr(model, "module") and not isinstance(model, nn.Module)
    return Around(model) if is_around else model


class Around(nn.Module):
    """What wraps a module, perhaps without being one, as a module; with a course's functions.

    after_backward and before_forward are given the wrapper and an optimizer.
    """

    def __init__(self, wrapper, after_backward=None, before_forward=None, gather=None):
        super().__init__()
        self.wrapper = [wrapper]  # so that it is no part of this module
        self.inner = wrapper if isinstance(wrapper, nn.Module) else wrapper.module
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.0)
        self.before_forward = before_forward
        for name in (*FINISHES, "no_sync", "gather_full_params"):
            if hasattr(wrapper, name):
                setattr(self, name, getattr(wrapper, name))
        if after_backward:
            self.finish_gradient_synchronization = lambda: after_backward(wrapper, self.optimizer)
        if gather:
            self.gather_full_params = lambda: gather(wrapper)

    def forward(self, *inputs):
        [wrapper] = self.wrapper
        if self.before_forward and self.training and torch.is_grad_enabled():
            self.before_forward(wrapper, self.optimizer)
        return wrapper(*inputs) if callable(wrapper) else wrapper.forward(*inputs)


def loss_of(model: nn.Module, step: int, part: int, rank: int) -> torch.Tensor:
    """The loss of a rank's share of a batch; a step has several parts where it accumulates."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
    inputs = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return model(inputs).square().mean()


def needs_nothing(method) -> bool:
    """Whether it is a method that one can call without arguments."""
    try:
        signature(method).bind()
    except TypeError:
        return False
    return True


def finish_of(model: nn.Module):
    """Its method that ends the averaging, by one of the usual names; None if it has none."""
    methods = [getattr(model, name, None) for name in FINISHES]
    return next(filter(needs_nothing, methods), None)


def finish(model: nn.Module) -> None:
    if method := finish_of(model):
        method()


def why_not_reduced(model: nn.Module) -> str:
    """What it means that gradients are a rank's own."""
    wrapper = model.wrapper[0] if isinstance(model, Around) else model
    public = [name for name in dir(type(wrapper)) if name[0] != "_"]
    others = [name for name in public if not hasattr(nn.Module, name)]
    if finish_of(model) or not others:
        return NOT_REDUCED
    return f"nobody calls its finish, {FINISHES[0]}(): perhaps it is one of {', '.join(others)}"
