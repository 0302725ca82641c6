"""Run a script of torch.distributed, your own too, over an emulated network: it need not know.

make 02_naive_ddp NETWORK=1gbit,1ms
torchrun --standalone --nproc-per-node 2 01_allreduce/slow_network/over.py 1gbit,1ms SCRIPT …
"""

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (0, 2)]
from network import wire

from common.setup import cores, fail


def main() -> None:
    ranks, here = (int(os.environ.get(key, 1)) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if len(sys.argv) < 3 or here < ranks:
        fail("needs a network, as 1gbit,1ms, and a script whose ranks are all on this host")
    _, network, *sys.argv = sys.argv
    try:
        wire.connect(network, stretch=max(1.0, here / cores()))
    except ValueError as error:
        fail(str(error))
    wire.is_slow = True
    init = dist.init_process_group

    def init_process_group(backend=None, *others, **options) -> None:
        if backend not in ("gloo", "cpu:gloo"):
            fail(f"an emulated network carries gloo's calls, and not {backend}'s: use --device cpu")
        init("slow_network", *others, **options)

    dist.init_process_group = init_process_group
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
