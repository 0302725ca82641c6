"""The user's class or function as the checks call it: found, of a kind, and adapted.

A course's tests reach a class through functions in tests/adapters.py: get_ddp(module) makes it, and
ddp_on_after_backward(model, optimizer) is called after backward().
"""

import importlib
import inspect
import re
import textwrap
from functools import wraps

from torch import nn
from users_class import import_file, load

from tools.check import checks_of_losses as losses
from tools.check.models import Around, layout_for

OF_COURSES = re.compile(r"get_.*(ddp|fsdp|sharded)")
AROUND = ("on_after_backward", "on_train_batch_start", "gather_full_params")


def with_functions_around(text: str) -> list:
    """Return what FILE.py:NAME names, and the functions AROUND it; None for those not there."""
    mine = load(text)
    file, _, name = text.rpartition(":")
    name = name.removeprefix("get_")
    module = import_file(file)
    return [mine, *[getattr(module, f"{name}_{each}", None) for each in AROUND]]


def prepare(text: str, kind: str, layers: str = "") -> tuple:
    """Return, on a rank, the arguments of a check of this kind for what FILE.py:NAME names."""
    mine, *around = with_functions_around(text)
    if kind == "loss":
        module = import_file(text.rpartition(":")[0])
        loss = mine() if isinstance(mine, type) and issubclass(mine, nn.Module) else mine
        return ((loss, getattr(module, "batch", losses.batch)),)

    if kind == "optimizer":
        return (mine,)

    @wraps(mine)
    def adapted(*arguments, **options):
        return Around(mine(*arguments, **options), *around)

    return (adapted if any(around) else mine, layout_for(layers, kind == "fsdp"))


def call(check, *form):
    """Call a check, on a rank, with what `prepare` makes of this."""
    return check(*prepare(*form))


def find(text: str, kind: str | None, layers: str) -> list[tuple[str, str, list[str]]]:
    """Return of all that MINE names: FILE.py:NAME, its kind, and what is not written yet."""
    texts = [text]
    if text.endswith(".py"):
        module = import_file(text)
        texts = [f"{text}:{name}" for name in vars(module) if OF_COURSES.match(name)]
        if not texts:
            raise ValueError("has no get_ddp or another adapter; a class is FILE.py:NAME")
    found = []
    for each in texts:
        mine, *around = with_functions_around(each)
        missing = [name for function in (mine, *around) for name in not_written(function)]
        found.append((each, kind or kind_of(mine), missing))
    if layers:
        importlib.import_module(layers).Linear(2, 2)
    return found


def kind_of(mine) -> str:
    names = list(inspect.signature(mine).parameters)
    if "params" in names[:1]:
        return "optimizer"
    is_fsdp = "compute_dtype" in names or hasattr(mine, "gather_full_params")
    return "fsdp" if is_fsdp or "fsdp" in getattr(mine, "__name__", "").lower() else "wrapper"


def not_written(mine) -> list[str]:
    """Return the function, or a class's methods, that end in raise NotImplementedError."""
    found = []
    functions = vars(mine).values() if isinstance(mine, type) else [mine]
    for function in filter(inspect.isfunction, functions):
        last = textwrap.dedent(inspect.getsource(function)).rstrip().splitlines()[-1]
        if last.startswith("    raise NotImplementedError"):
            found.append(function.__qualname__)
    return found
