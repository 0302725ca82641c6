"""The user's class or function as the checks call it: found, of a kind, and adapted.

A course's tests reach a class through functions in tests/adapters.py: get_ddp(module) makes it, and
ddp_on_after_backward(model, optimizer) is called after backward().
"""

import importlib
import inspect
import sys
import textwrap
from functools import partial, wraps

import torch
from torch import nn

from tools.check import models
from tools.check.loading import load, load_module

OF_COURSES = ("get_ddp_individual_parameters", "get_ddp_bucketed", "get_ddp", "get_fsdp")
OF_COURSES += ("get_sharded_optimizer",)
AROUND = ("on_after_backward", "on_train_batch_start", "gather_full_params")
OF_CLASSES = ("__init__", "forward", "finish_gradient_synchronization", "gather_full_params")
OF_CLASSES += ("add_param_group", "step")


class Adapted(nn.Module):
    """A model, with functions of the user's as its methods."""

    def __init__(self, model: nn.Module, after_backward, before_forward=None, gather=None):
        super().__init__()
        self.model = model
        self.before_forward = before_forward
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # they are given one
        if after_backward:
            self.finish_gradient_synchronization = partial(after_backward, model, self.optimizer)
        if gather:
            self.gather_full_params = partial(gather, model)

    def forward(self, *inputs):
        if self.before_forward and self.training and torch.is_grad_enabled():
            self.before_forward(self.model, self.optimizer)
        return self.model(*inputs)


def load_all(text: str) -> list:
    """What FILE.py:NAME names, and the functions AROUND it; None for those that are not there."""
    mine = load(text)
    file, _, name = text.rpartition(":")
    names = [f"{name.removeprefix('get_')}_{each}" for each in AROUND]
    return [mine, *[getattr(load_module(file), each, None) for each in names]]


def prepare(text: str, kind: str, layers="", dtype=torch.float64):
    """On a rank: what FILE.py:NAME names, as the checks call it, and models of this form."""
    mine, *around = load_all(text)
    sys.modules.pop("common", None)  # what it imports later finds the user's own first, too
    models.choose(layers, dtype, kind == "fsdp")
    if kind == "function":
        return lambda module: Adapted(module, lambda model, optimizer: mine(model))
    if not any(around):
        return mine

    @wraps(mine)
    def adapted(*arguments, **options):
        model = mine(*arguments, **options)
        return Adapted(model, *around) if isinstance(model, nn.Module) else model

    return adapted


def call(check, *form):
    """On a rank: a check of what `prepare` makes of this."""
    return check(prepare(*form))


def describe(text: str, kind: str | None, layers: str) -> list[tuple[str, str, list[str]]]:
    """Of what MINE names: FILE.py:NAME, its kind, and what of it is not written yet."""
    texts = [text]
    if text.endswith(".py"):
        module = load_module(text)
        texts = [f"{text}:{name}" for name in OF_COURSES if hasattr(module, name)]
        if not texts:
            raise ValueError(f"has none of {', '.join(OF_COURSES)}; a class is FILE.py:NAME")
    described = []
    for each in texts:
        mine, *around = load_all(each)
        missing = [name for function in (mine, *around) for name in not_written(function)]
        described.append((each, kind or kind_of(mine), missing))
    if layers:
        importlib.import_module(layers).Linear(2, 2)
    return described


def kind_of(mine) -> str:
    names = list(inspect.signature(mine).parameters)
    is_class = isinstance(mine, type)
    if "params" in names[:1] or (is_class and issubclass(mine, torch.optim.Optimizer)):
        return "optimizer"
    is_fsdp = "compute_dtype" in names or hasattr(mine, "gather_full_params")
    return "fsdp" if is_fsdp or "fsdp" in getattr(mine, "__name__", "").lower() else "wrapper"


def not_written(mine) -> list[str]:
    """Itself, or what is called of its methods, where the end is raise NotImplementedError."""
    is_class = isinstance(mine, type)
    functions = [vars(mine).get(name) for name in OF_CLASSES] if is_class else [mine]
    found = []
    for function in filter(inspect.isfunction, functions):
        last = textwrap.dedent(inspect.getsource(function)).rstrip().splitlines()[-1]
        if last.startswith("    raise NotImplementedError"):
            found.append(function.__qualname__)
    return found
