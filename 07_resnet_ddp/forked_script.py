"""What the fixture `forked` of conftest.py runs in each of its processes.

A module of its own, because those processes have to find it by its name.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path


def run_script(path, words, variables, folder, output, stderr) -> None:
    """Run a script as `python path words` in this folder, with these environment variables.

    What it prints is added to the file `output`; its errors go there, too, or to `stderr`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What plain python has for a DataLoader's workers, and not what this process was made with.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in variables.items()})
    flags = os.O_WRONLY | os.O_APPEND
    opened = os.open(output, flags)
    os.dup2(opened, 1)
    os.dup2(os.open(stderr, flags | os.O_NOCTTY) if stderr else opened, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    if folder:
        os.chdir(folder)
    sys.argv = [path, *words]
    sys.path[0] = str(Path(path).parent)
    runpy.run_path(path, run_name="__main__")
