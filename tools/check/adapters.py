"""The user's class or function as the checks call it: found, of a kind, and adapted.

A course's tests reach a class through functions in tests/adapters.py: get_ddp(module) makes it, and
ddp_on_after_backward(model, optimizer) is called after backward().
"""

import inspect
import re
import sys
import textwrap
from functools import wraps
from types import ModuleType
from typing import NamedTuple
from unittest.mock import MagicMock

from torch import nn
from users_class import FINISHES, GATHERS, finish_of, import_file

from tools.check import checks_of_losses as losses
from tools.check.models import Around, gather_of, layout_for, module_of

OF_COURSES = re.compile(r"get_.*(ddp|fsdp|sharded)")
AROUND = ("on_after_backward", "on_train_batch_start", "gather_full_params")


class Found(NamedTuple):
    """Holds all that MINE names, and what its import has missed."""

    classes: list[tuple[str, str, list[str]]]  # FILE.py:NAME, its kind, what is not written yet
    absent: list[str]  # modules that are not installed


def import_mine(file: str) -> tuple[ModuleType, list[str]]:
    """Import a file; return it, and the names of modules that it misses, as Triton on a CPU."""
    absent = []
    try:
        while True:
            try:
                return import_file(file), absent
            except ModuleNotFoundError as error:
                if not error.name or error.name in absent:
                    raise
                absent.append(error.name)
                sys.modules[error.name] = MagicMock()  # its decorators, too
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def named_by(text: str) -> tuple:
    """Return FILE.py's module, what NAME is there, and the functions AROUND it; None for others."""
    file, _, name = text.rpartition(":")
    module, _ = import_mine(file)
    around = [getattr(module, f"{name.removeprefix('get_')}_{each}", None) for each in AROUND]
    return module, getattr(module, name), *around


def function_of_a_model(module: ModuleType, names: list[str]):
    """Return a function of the file that takes a model alone, by one of these names, or None."""
    for name in names:
        function = getattr(module, name, None)
        if inspect.isfunction(function) and len(inspect.signature(function).parameters) == 1:
            return function


def prepare(text: str, kind: str, layers: str = "") -> tuple:
    """Return, on a rank, the arguments of a check of this kind for what FILE.py:NAME names."""
    module, mine, after, before, gather = named_by(text)
    if kind == "loss":
        loss = mine() if isinstance(mine, type) and issubclass(mine, nn.Module) else mine
        return ((loss, getattr(module, "batch", losses.batch)),)

    if kind == "optimizer":
        return (as_if_sharding(mine),)

    finish, whole = (function_of_a_model(module, names) for names in (FINISHES, GATHERS))

    @wraps(mine)
    def adapted(*arguments, **options):
        model = mine(*arguments, **options)
        ends = after or (None if finish_of(model) else finish)
        gathers = gather or (None if gather_of(model) else whole)
        return Around(model, ends, before, gathers)

    is_adapted = any((after, before, gather, finish, whole))
    return (adapted if is_adapted else mine, layout_for(layers, kind == "fsdp"))


def as_if_sharding(mine):
    """Return an AdamW of the user's own as if it took an optimizer's class; others as they are."""
    first, *others = inspect.signature(mine).parameters
    if "betas" not in others or "optim" in others[0]:
        return mine

    def adapted(params, optimizer_cls, **options):
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        return mine(groups if "group" in first else params, **options)

    return adapted


def call(check, *form):
    """Call a check, on a rank, with what `prepare` makes of this."""
    return check(*prepare(*form))


def find(text: str, kind: str | None, layers: str) -> Found:
    """Import what MINE names, and say what it is."""
    texts = [text]
    file = text if text.endswith(".py") else text.rpartition(":")[0]
    if not file.endswith(".py"):
        raise ValueError("it is not FILE.py:NAME")
    module, absent = import_mine(file)
    if text == file:
        texts = [f"{text}:{name}" for name in vars(module) if OF_COURSES.match(name)]
        if not texts:
            raise ValueError("has no get_ddp or another adapter; a class is FILE.py:NAME")
    found = []
    for each in texts:
        _, *functions = named_by(each)
        missing = [name for function in functions for name in not_written(function)]
        found.append((each, kind or kind_of(functions[0]), missing))
    if layers:
        module_of(layers).Linear(2, 2)
    return Found(found, absent)


def kind_of(mine) -> str:
    """Return the kind that its arguments, methods and name say."""
    names = list(inspect.signature(mine).parameters)
    if names and names[0].startswith("param"):
        return "optimizer"
    name = getattr(mine, "__name__", "").lower()
    if "zero" in name:
        return "zero2"
    gathers = any(hasattr(mine, each) for each in GATHERS)
    is_fsdp = "compute_dtype" in names or "fsdp" in name or gathers
    return "fsdp" if is_fsdp else "wrapper"


def not_written(mine) -> list[str]:
    """Return the function, or a class's methods, that end in raise NotImplementedError."""
    found = []
    functions = vars(mine).values() if isinstance(mine, type) else [mine]
    for function in filter(inspect.isfunction, functions):
        last = textwrap.dedent(inspect.getsource(function)).rstrip().splitlines()[-1]
        if last.startswith("    raise NotImplementedError"):
            found.append(function.__qualname__)
    return found
