r"""Run any script of torch.distributed over an emulated network: it need not know.

    torchrun --standalone --nproc-per-node 2 01_allreduce/slow_network/over.py 100mbit,1ms \
        train.py [its flags]                           (or: over.py 100mbit,1ms -m package.module)
    make 02_naive_ddp NETWORK=1gbit,1ms                (a script of this repository)

Every group over gloo is slow then, however the script makes it. Ranks run on this host's CPU.
"""

import os
import runpy
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is emulated are the calls of a CPU
FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
ITS_PATH = sys.path[1:]  # without this folder
sys.path = [str(FOLDER), str(ROOT), *ITS_PATH]

import network

from common.setup import cores, fail, require_torchrun, threads_per_rank


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[2:] == ["-m"]:
        fail("it needs a network and a script: over.py 1gbit,1ms train.py [its flags]")
    require_torchrun()
    text, script = sys.argv[1:3]
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if here < ranks:
        fail(f"{text} is emulated on one host, and {ranks - here} of {ranks} ranks are on others")
    try:
        network.read_network(text)
    except ValueError as error:
        fail(str(error))
    is_ours = Path(script).resolve().is_relative_to(ROOT)
    stretch = max(1.0, here * threads_per_rank(here) / cores())
    if stretch > 1 and not is_ours and os.environ["RANK"] == "0":
        says = f"{here} ranks share {cores():g} cores, so the network is {stretch:g} times slower: "
        print(f"{says}divide the times that the script prints by {stretch:g}", file=sys.stderr)
    if not is_ours:  # it may have modules of these names
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("common", "network")
        ]:
            del sys.modules[name]
    try:
        with network.emulated(text, stretch) as wire:
            wire.is_slow = True  # scripts of this repository end that but where they measure
            run(*sys.argv[2:])
    except network.NotEmulated as error:
        fail(str(error))


def run(script: str, *flags: str) -> None:
    """Run a script, or -m and a module, as __main__ with its own arguments and search path."""
    if script == "-m":
        sys.argv = [*flags]
        sys.path[:] = [os.getcwd(), *ITS_PATH]
        runpy.run_module(flags[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *flags]
        sys.path[:] = [str(Path(script).resolve().parent), *ITS_PATH]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
