"""01: where a call's time goes: waiting, the kernel, or our own code; for pieces of several sizes.

An all-reduce on one host keeps its cores busy or leaves them idle. Each rank counts the processor
time of all its threads in its own code (adding, copying) and in the kernel (sockets); what is left
of cores × time of the call is idle, if the ranks are all that runs here. Beside the ring with
several sizes of its pieces stand the backend's own and the one through shared memory.

    python 01_allreduce/ring_profile.py                                       (half a minute)
    python 01_allreduce/ring_profile.py --world-sizes 4 --pieces-mb 1,2 --in-flight 2
"""

import functools
import resource
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def processor_seconds() -> torch.Tensor:
    """Seconds of this process's threads so far in own code and in the kernel, and their waits.

    A wait is a voluntary context switch: a thread that had nothing to do gave its core away.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return torch.tensor([usage.ru_utime, usage.ru_stime, usage.ru_nvcsw], dtype=torch.float64)


def profile(device, backend: str, size_bytes: int, pieces_bytes: list, in_flight: int, steps: int):
    """Call all candidates in turn; print for each what all ranks together used, a mean of calls."""
    from allreduce import ring_all_reduce
    from shared_memory import SharedMemoryAllReduce

    from common.setup import say, threads_per_rank
    from common.timing import Stopwatch

    candidates = {"gloo": dist.all_reduce}
    for piece_bytes in pieces_bytes:
        ring = functools.partial(ring_all_reduce, piece_bytes=piece_bytes, in_flight=in_flight)
        candidates[f"ring {piece_bytes / 2**20:g}"] = ring
    candidates["shared"] = SharedMemoryAllReduce()
    tensor = torch.zeros(size_bytes // 4)
    watch = Stopwatch(device)
    seconds = {name: [] for name in candidates}
    usage = {name: [] for name in candidates}
    for step in range(steps + 2):
        for name, all_reduce in candidates.items():
            dist.barrier()
            before = processor_seconds()
            watch.mark("start")
            all_reduce(tensor)
            watch.mark("end")
            used = processor_seconds() - before
            slowest = torch.tensor(watch.seconds("start", "end"), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            dist.all_reduce(used)
            if step >= 2:  # the first two warm up
                seconds[name].append(slowest.item())
                usage[name].append(used)
    cores = threads_per_rank(1)
    gloo = statistics.median(seconds["gloo"])
    for name, times in seconds.items():
        own, kernel, waits = torch.stack(usage[name]).mean(0).tolist()
        whole = cores * statistics.mean(times)
        shares = [f"{100 * part / whole:.0f} %" for part in (own, kernel, whole - own - kernel)]
        median = statistics.median(times)
        cells = [dist.get_world_size(), f"{1000 * median:.1f}", f"{gloo / median:.2f}"]
        cells += [f"{1000 * own:.0f}", f"{1000 * kernel:.0f}", *shares, f"{waits:.0f}"]
        say(ROW.format(name, *cells))


ROW = "{:<9} {:>5} {:>8} {:>7} {:>8} {:>10} {:>9} {:>7} {:>6} {:>6}"
HEADER = [
    "ranks",
    "p50, ms",
    "× gloo",
    "own, ms",
    "kernel, ms",
    "own code",
    "kernel",
    "idle",
    "waits",
]


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from allreduce import list_of, sizes_in_bytes
        from spawn import run_ranks

        from common import setup
    except ModuleNotFoundError as error:
        beside = "copy the repository's folder common/ and the scripts of 01_allreduce beside this"
        sys.exit(f"error: {error}: {beside}")

    parser = setup.Parser(__doc__)
    add, one = parser.add_argument, setup.whole_number(1)
    number = setup.checked(float, lambda size: 1e-5 <= size <= 1e6, "from 0.00001 to 1000000 MB")
    add("--size-mb", type=number, default="100", help="of the tensor")
    add("--pieces-mb", type=list_of(number), default="0.5,1,2,4,8", help="of the ring")
    add("--in-flight", type=one, default=3, help="receives posted ahead")
    add("--world-sizes", type=list_of(one), default="2,4", help="numbers of ranks")
    add("--steps", type=one, default=10, help="measured calls")
    args = parser.parse_args()
    [size] = sizes_in_bytes([args.size_mb], setup)
    pieces = sizes_in_bytes(args.pieces_mb, setup)
    cores = setup.threads_per_rank(1)
    setup.say(f"01_allreduce/ring_profile: torch {torch.__version__}, {cores} cores,")
    setup.say(f"a tensor of {args.size_mb:g} MB, {args.in_flight} receives in flight")
    setup.say(ROW.format("piece, MB", *HEADER))
    with tempfile.TemporaryDirectory() as temporary:
        try:
            for world_size in args.world_sizes:
                arguments = (size, pieces, args.in_flight, args.steps)
                run_ranks(world_size, temporary, profile, "gloo", *arguments)
        except KeyboardInterrupt:
            sys.exit(130)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            reason = str(error).strip().splitlines()[-1]
            sys.exit(f"ring_profile.py: error: a rank ended: {reason}")
    setup.say("ms: processor time of all ranks in a call; shares: of cores × time of the call")


if __name__ == "__main__":
    main()
