"""The user's class or function as the checks call it: found, of a kind, and adapted.

A course's tests reach a class through functions in tests/adapters.py: get_ddp(module) makes it, and
ddp_on_after_backward(model, optimizer) is called after backward().
"""

import importlib
import inspect
import re
import sys
import textwrap
from functools import cache, wraps
from pathlib import Path

from tools.check import checks_of_losses as losses
from tools.check import models

OF_COURSES = re.compile(r"get_.*(ddp|fsdp|sharded)")
AROUND = ("on_after_backward", "on_train_batch_start", "gather_full_params")


@cache
def load_module(file: str):
    """A file of the user's, imported as part of its package if it is in one.

    The folders of the file, of its package and of its repository are first in sys.path.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{file} is not a file")
    name, package = path.stem, path.parent
    while (package / "__init__.py").exists():
        name, package = f"{package.name}.{name}", package.parent
    marks = ("pyproject.toml", ".git")
    roots = [folder for folder in path.parents if any((folder / each).exists() for each in marks)]
    root = roots[0] if roots else package
    sys.path[:0] = [str(package), str(root), str(path.parent)]
    sys.modules.pop(name, None)  # another file of this name
    return importlib.import_module(name)


def load(text: str) -> list:
    """What FILE.py:NAME names, and the functions AROUND it; None for those that are not there."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{text!r} is not FILE.py:NAME")
    module = load_module(file)
    mine = getattr(module, name, None)
    if not callable(mine):
        raise ValueError(f"{file} has no class or function {name}")
    name = name.removeprefix("get_")
    return [mine, *[getattr(module, f"{name}_{each}", None) for each in AROUND]]


def prepare(text: str, kind: str, layers: str = ""):
    """On a rank: what FILE.py:NAME names, as the checks call it, and models of this kind."""
    mine, *around = load(text)
    if kind == "loss":
        return mine, getattr(load_module(text.rpartition(":")[0]), "batch", losses.batch)
    models.choose(layers, kind == "fsdp")
    if not any(around):
        return mine

    @wraps(mine)
    def adapted(*arguments, **options):
        return models.Around(mine(*arguments, **options), *around)

    return adapted


def call(check, *form):
    """On a rank: a check of what `prepare` makes of this."""
    return check(prepare(*form))


def describe(text: str, kind: str | None, layers: str) -> list[tuple[str, str, list[str]]]:
    """Of what MINE names: FILE.py:NAME, its kind, and what of it is not written yet."""
    texts = [text]
    if text.endswith(".py"):
        texts = [f"{text}:{name}" for name in vars(load_module(text)) if OF_COURSES.match(name)]
        if not texts:
            raise ValueError("has no get_ddp or another adapter; a class is FILE.py:NAME")
    described = []
    for each in texts:
        mine, *around = load(each)
        missing = [name for function in (mine, *around) for name in not_written(function)]
        described.append((each, kind or kind_of(mine), missing))
    if layers:
        importlib.import_module(layers).Linear(2, 2)
    return described


def kind_of(mine) -> str:
    names = list(inspect.signature(mine).parameters)
    if "params" in names[:1]:
        return "optimizer"
    is_fsdp = "compute_dtype" in names or hasattr(mine, "gather_full_params")
    return "fsdp" if is_fsdp or "fsdp" in getattr(mine, "__name__", "").lower() else "wrapper"


def not_written(mine) -> list[str]:
    """The function, or the methods of a class, where the end is raise NotImplementedError."""
    found = []
    functions = vars(mine).values() if isinstance(mine, type) else [mine]
    for function in filter(inspect.isfunction, functions):
        last = textwrap.dedent(inspect.getsource(function)).rstrip().splitlines()[-1]
        if last.startswith("    raise NotImplementedError"):
            found.append(function.__qualname__)
    return found
