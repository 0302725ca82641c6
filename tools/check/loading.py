"""A class or function of the user's own, named as FILE.py:NAME."""

import argparse
import importlib
import importlib.util
import inspect
import sys
from functools import cache, partial
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent.parent  # this repository


@cache
def load_module(file: str):
    """A file of the user's, imported as part of its package if it is in one.

    The folders of the file, of its package and of its repository are first in sys.path. What is
    called common there is found before ours.
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
    folders.append(path.parent)
    sys.path[:0] = [str(folder) for folder in folders]
    hidden = {}
    if OURS not in folders:
        for module in [name for name in sys.modules if name.partition(".")[0] == "common"]:
            hidden[module] = sys.modules.pop(module)
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


def loadable(text: str) -> str:
    """A type for argparse: FILE.py:NAME that can be loaded."""
    try:
        load(text)
    except Exception as error:  # whatever the file does
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return text


def with_bucket_size(wrapper, megabytes: float):
    """The wrapper, with this size of its buckets if it has some."""
    if "bucket_size_mb" in inspect.signature(wrapper).parameters:
        return partial(wrapper, bucket_size_mb=megabytes)
    return wrapper
