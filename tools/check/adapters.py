"""The user's class or function as the checks call it: found, of a kind, and adapted.

A course's tests reach a class through functions in tests/adapters.py: get_ddp(module) makes it, and
ddp_on_after_backward(model, optimizer) is called after backward().
"""

import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from functools import cache, wraps
from pathlib import Path

import torch

from tools.check import checks_of_losses as losses
from tools.check import models

OF_COURSES = re.compile(r"get_.*(ddp|fsdp|sharded)")
AROUND = ("on_after_backward", "on_train_batch_start", "gather_full_params")


@cache
def load_module(file: str):
    """A file of the user's, imported as part of its package if it is in one.

    The folders of the file, of its package and of its repository are first in sys.path. What is
    called common or tools there is found before ours.
    """
    path = Path(file).expanduser().resolve()
    name, package = path.stem, path.parent
    while (package / "__init__.py").exists():
        name, package = f"{package.name}.{name}", package.parent
    folders = [package]
    for folder in path.parents:
        if (folder / "pyproject.toml").exists() or (folder / ".git").exists():
            folders.append(folder)
            break
    sys.path[:0] = [str(folder) for folder in (*folders, path.parent)]
    hidden = {}
    if Path(__file__).resolve().parents[2] not in folders:
        ours = [each for each in sys.modules if each.partition(".")[0] in ("common", "tools")]
        hidden = {each: sys.modules.pop(each) for each in ours}
    try:
        if "." in name:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location("of_the_user", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["of_the_user"] = module  # as dataclasses and pickle need it
        spec.loader.exec_module(module)  # FileNotFoundError names the file
        return module
    finally:
        sys.modules.update(hidden)


def load(text: str):
    """What FILE.py:NAME names. ValueError if there is none."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{text!r} is not FILE.py:NAME")
    found = getattr(load_module(file), name, None)
    if not callable(found):
        raise ValueError(f"{file} has no class or function {name}")
    return found


def load_all(text: str) -> list:
    """What FILE.py:NAME names, and the functions AROUND it; None for those that are not there."""
    mine = load(text)
    file, _, name = text.rpartition(":")
    names = [f"{name.removeprefix('get_')}_{each}" for each in AROUND]
    return [mine, *[getattr(load_module(file), each, None) for each in names]]


def prepare(text: str, kind: str, layers="", dtype=torch.float64):
    """On a rank: what FILE.py:NAME names, as the checks call it, and models of this form."""
    mine, *around = load_all(text)
    if kind == "loss":
        return mine, getattr(load_module(text.rpartition(":")[0]), "batch", losses.batch)
    for name in ("common", "tools"):  # what it imports later finds the user's own first, too
        sys.modules.pop(name, None)
    models.choose(layers, dtype, kind == "fsdp")
    if kind == "function":
        return lambda module: models.as_module(module, lambda model, optimizer: mine(model))
    if kind == "optimizer" or not any(around):
        return mine

    @wraps(mine)
    def adapted(*arguments, **options):
        return models.as_module(mine(*arguments, **options), *around)

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
    """The function, or the methods of a class, where the end is raise NotImplementedError."""
    found = []
    functions = vars(mine).values() if isinstance(mine, type) else [mine]
    for function in filter(inspect.isfunction, functions):
        last = textwrap.dedent(inspect.getsource(function)).rstrip().splitlines()[-1]
        if last.startswith("    raise NotImplementedError"):
            found.append(function.__qualname__)
    return found
