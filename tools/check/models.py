"""The small models of the checks, the loss of a share of a batch, and how a class is called."""

import importlib
import re
from functools import partial
from inspect import isfunction, signature

import torch
import torch.distributed as dist
from torch import nn

from tools.check.findings import NOT_REDUCED, UNUSABLE, Failed

layers = nn  # a module with Linear and Embedding
dtype = torch.float64
FINISHES = ("finish_gradient_synchronization", "finish_gradient_sync", "finish", "synchronize")
FINISHES += ("synchronize_gradients", "sync_gradients", "average_gradients", "reduce_gradients")
FINISHES += ("all_reduce_gradients", "allreduce_gradients")


def choose(of_user: str, of_weights: torch.dtype, is_sharded: bool) -> None:
    """Build models of a module's own layers, in a dtype; what is sharded the ranks can divide."""
    global layers, dtype
    layers = importlib.import_module(of_user) if of_user else nn
    dtype = of_weights
    Plain.rows, Plain.width = [6 * dist.get_world_size()] * 2 if is_sharded else (6, 7)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Module:
    """The user's own has none, as most courses' do."""
    return nn.Linear(inputs, outputs, bias) if layers is nn else layers.Linear(inputs, outputs)


class Plain(nn.Module):
    """Some of its parameters have a shape in common."""

    rank = 0  # on which some of the others take another way
    rows, width = 6, 7  # of the embedding

    def __init__(self):
        super().__init__()
        rows, width = self.rows, self.width
        self.embedding = getattr(layers, "Embedding", nn.Embedding)(rows, width)
        self.first = linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.second = linear(width, width, bias=False)
        self.last = linear(width, rows, bias=False)
        self.to(dtype)

    def forward(self, x):
        tokens = (3 * x).abs().long().clamp(max=5)
        return self.last(self.between(self.embedding(tokens)))

    def between(self, x):
        return self.second(self.norm(self.first(x).tanh())).tanh()


class Tied(Plain):
    """Its last weight is its first one; of layers of the user's, if there is no Embedding, two."""

    def __init__(self):
        super().__init__()
        has_own = hasattr(layers, "Embedding")
        one, other = (self.last, self.embedding) if has_own else (self.second, self.first)
        name, weight = next(other.named_parameters())  # a course may call it W
        setattr(one, name, weight)


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


class UsedByRank0(Plain):
    users = (0,)  # ranks

    def __init__(self):
        super().__init__()
        self.never = linear(self.width, self.width).to(dtype)

    def between(self, x):
        return super().between(self.never(x) if self.rank in self.users else x)


class UsedByNobody(UsedByRank0):
    users = ()


class UsedTwice(Plain):
    def between(self, x):
        return self.second(super().between(x))


class Branches(Plain):
    """Even ranks go through its layers in one order, odd ones in the other; a scalar between."""

    def __init__(self):
        super().__init__()
        # Without a bias gloo cannot tell it from the second.
        self.first = linear(self.width, self.width, bias=False).to(dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def between(self, x):
        if self.rank % 2 == 0:
            return self.norm(self.second(self.scale * self.first(x).tanh()))
        return self.norm(self.first(self.scale * self.second(x).tanh()))


class SeveralBuckets(Branches):
    """Its two large weights do not fit into one bucket of 25 MB."""

    width = 1300


class SeveralDtypes(Plain):
    def __init__(self):
        super().__init__()
        self.second.float()

    def between(self, x):
        return self.second(self.norm(self.first(x)).float()).tanh().to(dtype)


class ChannelsLast(Plain):
    """The elements of a weight lie in another order in memory than contiguous ones."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 3).to(dtype, memory_format=torch.channels_last)

    def between(self, x):
        images = x[..., None, None].flatten(0, 1).expand(-1, self.width, 3, 3)[:, :6]
        return super().between(x + self.convolution(images).mean())


class Normalized(Plain):
    """It has buffers, which a forward changes: those of BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).to(dtype)


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
    return model if isinstance(model, nn.Module) else as_module(model)


def as_module(wrapper, after_backward=None, before_forward=None, gather=None):
    """What wraps a module, perhaps without being one, as a module; with the functions around it.

    before_forward and after_backward are given the wrapper and an optimizer.
    """
    inner = wrapper if isinstance(wrapper, nn.Module) else getattr(wrapper, "module", None)
    if not isinstance(inner, nn.Module):
        return wrapper
    shell = nn.Module()
    shell.inner, shell.kind = inner, type(wrapper)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.0)

    def forward(*inputs):
        if before_forward and shell.training and torch.is_grad_enabled():
            before_forward(wrapper, optimizer)
        return wrapper(*inputs) if callable(wrapper) else wrapper.forward(*inputs)

    shell.forward = forward
    for name in (*FINISHES, "no_sync", "gather_full_params"):
        if hasattr(wrapper, name):
            setattr(shell, name, getattr(wrapper, name))
    if after_backward:
        shell.finish_gradient_synchronization = partial(after_backward, wrapper, optimizer)
    if gather:
        shell.gather_full_params = partial(gather, wrapper)
    return shell


def loss_of(model: nn.Module, step: int, part: int, rank: int) -> torch.Tensor:
    """The loss of a rank's share of a batch; a step has several parts where it accumulates."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
    output = model(torch.randn(4, 6, generator=generator, dtype=torch.float64))
    if not isinstance(output, torch.Tensor):
        kind = type(output).__name__
        raise Failed(f"its forward returns {kind}, and not what the module returns", UNUSABLE)
    return output.square().mean()


def needs_nothing(method) -> bool:
    """Whether one can call it without arguments."""
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
    methods = vars(getattr(model, "kind", type(model)))
    public = [name for name in methods if isfunction(methods[name]) and name[0] != "_"]
    others = [f"{name}()" for name in public if needs_nothing(partial(methods[name], model))]
    if finish_of(model) or not others:
        return NOT_REDUCED
    return f"nobody calls its finish, {FINISHES[0]}(): it has {', '.join(others)}"
