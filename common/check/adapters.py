"""The user's class or function as the checks call it: loaded, of a kind, adapted.

A course's tests reach a class through functions in tests/adapters.py: get_ddp(module) makes it, and
ddp_on_after_backward(model, optimizer) is called after backward().
"""

import ast
import inspect
import textwrap
from functools import partial, wraps

import torch
from torch import nn
from torch.optim import Optimizer

from common import setup
from common.check import models

OF_COURSES = ("get_ddp_individual_parameters", "get_ddp_bucketed", "get_ddp", "get_fsdp")
OF_COURSES += ("get_sharded_optimizer",)


class Adapted(nn.Module):
    """A model, with functions of the user's as its methods."""

    def __init__(self, model: nn.Module, after_backward, before_forward=None, gather=None):
        super().__init__()
        self.model = model
        self.before_forward = before_forward
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # they are given one
        for name in ("finish_gradient_synchronization", "gather_full_params", "no_sync"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))
        if after_backward:
            self.finish_gradient_synchronization = partial(after_backward, model, self.optimizer)
        if gather:
            self.gather_full_params = partial(gather, model)

    def forward(self, *inputs):
        if self.before_forward and self.training and torch.is_grad_enabled():
            self.before_forward(self.model, self.optimizer)
        return self.model(*inputs)


def names_in(module) -> list[str]:
    """The functions of a course's that a module has."""
    names = [name for name in OF_COURSES if hasattr(module, name)]
    if not names:
        raise ValueError(f"has none of {', '.join(OF_COURSES)}; a class is FILE.py:NAME")
    return names


def prepare(text: str, kind: str, layers="", is_even=False, dtype=torch.float64):
    """On a rank: what FILE.py:NAME names, as the checks call it, and models of this form."""
    mine = setup.load(text)
    models.choose(layers, is_even, dtype)
    if kind == "function":
        return lambda module: Adapted(module, lambda model, optimizer: mine(model))
    module = vars(setup.load_module(text.rpartition(":")[0]))
    prefix = text.rpartition(":")[2].removeprefix("get_")
    names = ("on_after_backward", "on_train_batch_start", "gather_full_params")
    functions = [module.get(f"{prefix}_{name}") for name in names]
    if kind == "optimizer" or not any(functions):
        return mine

    @wraps(mine)
    def adapted(*arguments, **options):
        model = mine(*arguments, **options)
        return Adapted(model, *functions) if isinstance(model, nn.Module) else model

    return adapted


def kind_of(mine) -> str:
    names = list(inspect.signature(mine).parameters)
    if "params" in names[:1] or (isinstance(mine, type) and issubclass(mine, Optimizer)):
        return "optimizer"
    is_fsdp = "compute_dtype" in names or hasattr(mine, "gather_full_params")
    return "fsdp" if is_fsdp or "fsdp" in mine.__name__.lower() else "wrapper"


def not_written(mine) -> list[str]:
    """Its functions, or itself, if the last thing in them is raise NotImplementedError."""
    found = []
    for function in vars(mine).values() if isinstance(mine, type) else [mine]:
        if inspect.isfunction(function):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
            last = getattr(definition, "body", [None])[-1]
            if isinstance(last, ast.Raise) and "NotImplementedError" in ast.unparse(last):
                found.append(function.__qualname__)
    return found
