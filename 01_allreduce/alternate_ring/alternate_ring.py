"""01: the alternate ring: whole tensors go round, and every rank adds them as they come.

It is the simpler all-reduce: n-1 steps, in each of which every rank passes on to its right what it
got from its left, and adds it to its sum. The ring of allreduce.py cuts the tensor into n chunks
and takes 2(n-1) steps. Which is faster? A rank sends (n-1) · S bytes here and 2(n-1)/n · S there,
so with α seconds a step and β bytes a second

    t = (n-1) · (α + S/β)        against        t = 2(n-1) · (α + S/(n·β))

and the alternate ring is ahead as long as S < α·β · n/(n-2): always with two ranks, where both send
the same and it takes half the steps; with more only for small tensors, and for large ones it takes
n/2 times as long. A flaw of its own: every rank adds in another order, so that floats differ
between ranks in their last bits, and replicas that should stay equal drift apart.

    make 01_allreduce/alternate_ring                       (both, measured in turn; a minute)
    python 01_allreduce/alternate_ring/alternate_ring.py --sizes-mb 1 --nproc 2,4

Source: Stanford CS336, assignment 2 (2026), "alternate ring all-reduce".
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist


def alternate_ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum a contiguous CPU tensor over all ranks, in place; for gloo. Needs memory for two more.

    Any shape, length, dtype and world size. RuntimeError for a tensor that is not contiguous or
    not on the CPU, before anything is sent: the next call works.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        needs = "alternate_ring_all_reduce needs a contiguous CPU tensor"
        raise RuntimeError(f"{needs}; .contiguous() makes one")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    left = (rank - 1) % world_size
    right = (rank + 1) % world_size
    total = tensor.detach()
    leaving = total.clone()
    arriving = torch.empty_like(total)
    for _ in range(world_size - 1):
        receive = dist.irecv(arriving, left)
        send = dist.isend(leaving, right)
        receive.wait()
        total.add_(arriving)
        send.wait()
        leaving, arriving = arriving, leaving


# ==================================================================================================
# Below this line: the measurement beside the ring.

HEADER = ["ranks", "MB", "ring, ms", "alternate, ms", "alt./ring", "n/2", "#wrong"]
WIDTHS = [5, 6, 8, 13, 9, 5, 6]


def compare(device, backend: str, sizes_bytes: list[int], steps: int, warmup: int) -> None:
    """Measure both for every size and print a row each."""
    from allreduce import measure, ring_all_reduce

    from common.report import percentiles, print_row

    algorithms = {"ring": ring_all_reduce, "alternate": alternate_ring_all_reduce}
    world_size = dist.get_world_size()
    for size_bytes in sizes_bytes:
        tensor = torch.empty(size_bytes // 4)
        samples, _, wrong = measure(algorithms, tensor, steps, warmup)
        ring = percentiles(samples["ring"])[0]
        alternate = percentiles(samples["alternate"])[0]
        cells = [str(world_size), f"{size_bytes / 2**20:g}"]
        cells += [f"{1000 * ring:.2f}", f"{1000 * alternate:.2f}", f"{alternate / ring:.2f}"]
        cells += [f"{world_size / 2:.2f}", str(sum(wrong.values()))]
        print_row(cells, WIDTHS)


def main():
    folder = Path(__file__).resolve().parent
    stage = folder.parent
    sys.path[:0] = [str(folder), str(stage), str(stage.parent)]
    try:
        from allreduce import add_grid_arguments, sizes_in_bytes
        from spawn import run_ranks

        from common import report, setup
    except ModuleNotFoundError as error:
        files = "the repository's folder common/, and allreduce.py and spawn.py of 01_allreduce"
        sys.exit(f"error: {error}: copy {files} beside this script")

    parser = setup.Parser(__doc__)
    add_grid_arguments(parser, "0.0625,1,10,100")
    args = parser.parse_args()
    sizes = sizes_in_bytes(args.sizes_mb)
    setup.say(f"{stage.name}/{folder.name}: torch {torch.__version__}, gloo")
    report.print_row(HEADER, WIDTHS)
    try:
        for world_size in args.world_sizes:
            run_ranks(world_size, compare, "gloo", sizes, args.steps, args.warmup)
    except KeyboardInterrupt:
        sys.exit(130)
    except RuntimeError as error:
        sys.exit(f"alternate_ring.py: error: {error}")
    setup.say(
        "p50 of the slowest rank; n/2: the ratio of the bytes; #wrong: wrong elements of both"
    )


if __name__ == "__main__":
    main()
