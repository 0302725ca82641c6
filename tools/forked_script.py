"""What `Forked` of processes.py runs in each of its processes.

A module of its own, because those processes have to find it by its name.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_script(path, words, variables, folder, output, errors, forks) -> None:
    """Run a script as `python path words` in this folder, with these environment variables.

    output, errors: connections to the files for what it prints. forks: the processes that it spawns
    are forked, too.
    """
    os.setsid()  # all that it starts can be found, and Ctrl-C at the tests' terminal is not for it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What plain python has for a DataLoader's workers, and not what this process was made with.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    if forks:
        contexts = multiprocessing.context._concrete_contexts
        contexts["spawn"] = contexts["fork"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    encoding = os.environ.get("PYTHONIOENCODING")
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding=encoding)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding=encoding)
    if folder:
        os.chdir(folder)
    # Nothing of this repository is imported yet, or found where plain python would not find it.
    for name in list(sys.modules):
        if name.partition(".")[0] == "common":
            del sys.modules[name]
    others = []
    for entry in filter(None, sys.path):
        if ROOT not in [Path(entry), *Path(entry).parents[:2]]:  # deeper: .venv's packages
            others.append(entry)
    sys.path[:] = [str(Path(path).parent), *others]
    sys.argv = [str(path), *words]
    runpy.run_path(str(path), run_name="__main__")
