r"""01: is an all-reduce on the emulated network (network.py) as slow as requested?

make 01_allreduce/slow_network                              (2 ranks on 1 Gbit/s and 1 ms)
make 01_allreduce/slow_network NPROC=4 NETWORK=100mbit,0 ARGS="--sizes-mb 1,10,100"
torchrun --standalone --nproc-per-node 2 01_allreduce/slow_network/over.py 1gbit,1ms \
    01_allreduce/slow_network/slow_network.py
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist


def all_reduce_together(tensors: list[torch.Tensor], watch) -> dict[str, float]:
    """Launch all, then wait for all; return the seconds, and how many elements are wrong."""
    for tensor in tensors:
        tensor.fill_(dist.get_rank() + 1)
    dist.barrier()
    watch.mark("start")
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    watch.mark("end")
    wrong = torch.cat(tensors) != sum(range(dist.get_world_size() + 1))
    return {"seconds": watch.seconds("start", "end"), "wrong": wrong.sum().item()}


def main():
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from common import report, setup, timing

    parser = setup.Parser(__doc__)
    sizes = setup.list_of(setup.positive_number)
    parser.add_argument("--sizes-mb", type=sizes, default="0.001,1,10")
    setup.add_process_group_arguments(parser)
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        report.begin("01_allreduce/slow_network", args, device)
        if not setup.network().text:
            setup.fail("start it over a network: over.py 1gbit,1ms slow_network.py")
        watch = timing.Stopwatch(device)
        table, ranks = [], dist.get_world_size()
        rate, delay, calls_at_once = setup.network().network
        for size, calls in [(size, calls) for size in args.sizes_mb for calls in (1, 2)]:
            tensors = [torch.empty(max(1, int(size * 2**18))) for _ in range(calls)]
            candidates = {"calls": partial(all_reduce_together, tensors, watch)}
            samples = timing.measure(candidates, steps=5, warmup=1)["calls"]
            transfer = 2 * (ranks - 1) / ranks * tensors[0].nbytes / rate
            delays = 2 * 2 * (ranks - 1) * delay  # two for each step of the ring
            requested = calls * transfer + delays * (1 if calls_at_once > 1 else calls)
            p50 = report.percentiles(samples["seconds"])[0]
            cells = [f"{1000 * p50:.2f}", f"{1000 * requested:.2f}", f"{p50 / requested:.3f}"]
            cells.append(str(sum(map(sum, samples["wrong"]))))
            table.append([f"{calls} × {size:g} MB", *cells])
        report.print_table(["all-reduces", "p50, ms", "requested, ms", "ratio", "#wrong"], table)


if __name__ == "__main__":
    main()
