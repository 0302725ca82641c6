"""A class of the user's own, as compare and `make check` call it: MINE=FILE.py:NAME."""

import importlib
import importlib.util
import inspect
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from common import setup
from common.ladder import BUCKET_SIZE_MB


@cache
def import_file(file: str):
    """Import a user's file, as part of its package if it is in one, and return the module.

    While it is imported its folders come first in sys.path, for what it imports, and from then on
    last. So no file of the user's hides a module of ours or of Python's that is imported later. Nor
    does our `common` hide the user's `common.py`.
    """
    path = Path(file).expanduser().resolve()
    name, package = path.stem, path.parent
    while (package / "__init__.py").exists():
        name, package = f"{package.name}.{name}", package.parent
    marks = ("pyproject.toml", ".git")
    roots = [folder for folder in path.parents if any((folder / each).exists() for each in marks)]
    folders = [str(folder) for folder in (path.parent, package, *roots[:1])]
    ours = {}
    if any(Path(folder, "common.py").exists() for folder in folders):
        ours = {each: sys.modules[each] for each in sys.modules if each.split(".")[0] == "common"}
    for each in ours:
        del sys.modules[each]
    sys.path[:0] = folders
    try:
        if package != path.parent:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(f"mine_{name}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        for folder in folders:
            sys.path.remove(folder)
        sys.path += folders
        sys.modules.update(ours)


def load(text: str):
    """Return the class or function that FILE.py:NAME names; raise whatever prevents it."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError("it is not FILE.py:NAME")
    return getattr(import_file(file), name)


FINISHES = """finish_gradient_synchronization finish_gradient_sync finish synchronize sync_gradients
average_gradients reduce_gradients all_reduce_gradients allreduce_gradients""".split()


GATHERS = """gather_full_params gather_full_parameters gather_full_state_dict full_state_dict
gather_params gather_parameters gather_weights gather_state_dict full_params full_parameters
get_full_params get_full_parameters get_full_state_dict consolidated_state_dict""".split()


def method_of(model, names: list[str]):
    """Return its first method of these names that needs no argument; None without one."""
    for name in names:
        with suppress(AttributeError, TypeError, ValueError):  # not there, or it needs arguments
            method = getattr(model, name)
            inspect.signature(method).bind()
            return method


def finish_of(model):
    """Return its method that ends the averaging, by one of the usual names; None without one."""
    return method_of(model, FINISHES)


def bucket_options(wrapper, size_mb: float) -> dict[str, float]:
    """Return the arguments of a wrapper that say how large its buckets are, for buckets of MB."""
    options = {}
    for name, argument in inspect.signature(wrapper).parameters.items():
        if re.fullmatch("bucket(_size|_cap)?(_mb|_bytes)?", name):
            is_large = isinstance(argument.default, int | float) and argument.default > 10_000
            in_bytes = "bytes" in name or is_large
            options[name] = int(size_mb * 2**20) if in_bytes else size_mb
    return options


def users_rows(text: str | None, bucket_size_mb: float = BUCKET_SIZE_MB) -> dict:
    """Return {name of its row: what --mine names}; {} without it. A wrong one ends the run."""
    if not text:
        return {}
    try:
        return {f"{text.rpartition(':')[2]} (mine)": users_class(text, bucket_size_mb)}
    except Exception as error:  # whatever the file does
        setup.fail(f"argument --mine: '{text}' is no FILE.py:NAME that can be loaded ({error!r})")


def users_class(text: str, bucket_size_mb: float):
    """Return what FILE.py:NAME names, as the stages call it; raise whatever prevents it.

    A wrapper gets our size of buckets, and its finish the name by which the stages call it.
    """
    mine = load(text)
    options = bucket_options(mine, bucket_size_mb)

    def make(*arguments, **others):
        made = mine(*arguments, **options, **others)
        finish = finish_of(made)
        if finish and not hasattr(made, FINISHES[0]):
            setattr(made, FINISHES[0], finish)
        return made

    return make
