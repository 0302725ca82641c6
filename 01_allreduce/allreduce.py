"""01: all-reduce, shown, opened up and measured.

After an all-reduce every rank holds the sum of all ranks' tensors. Data parallelism stands on this
one operation. The script shows it on four small tensors, and times the backend's own beside two
written by hand: a plain ring, and a ring that works in pieces. cost_model.py says what the times
mean. Unlike most later stages this script starts its ranks itself.

    make 01_allreduce                       (0.01 to 100 MB on 2, 4 and 6 ranks: a minute or two)
    make 01_allreduce NPROC=4               (only 4 ranks)
    python 01_allreduce/allreduce.py --sizes-mb 1,10,100,1000 --steps 10 --warmup 2
                                            (the course's sizes, 9 GB; with 10 calls, as recorded)
    python 01_allreduce/allreduce.py --backends gloo,nccl --nproc 2     (with a GPU for each rank)

The JSON has a row for each size, algorithm and world size. Its "seconds" are those of the slowest
rank, a number for each call, where later stages have [rank][step]; "seconds_in_a_row" are a call's
of 20 without a barrier between them.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009; bandwidths as nccl-tests defines them (doc/PERFORMANCE.md); Stanford CS336, assignment 2,
"Distributed communication".
"""

import itertools
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def plain_ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum a contiguous CPU tensor over all ranks, in place; for gloo.

    The tensor is cut into one chunk per rank. In every step each rank sends a chunk to its right
    neighbour and receives one from its left: always the chunk that it passes on in the next step.
    For the first n-1 steps what arrives is added (reduce-scatter: rank r ends up with the whole sum
    of chunk r+1), for the other n-1 steps it replaces what was there (all-gather).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.detach().view(-1).tensor_split(world_size)  # lengths differ by one at most
    buffer = torch.empty_like(chunks[0])
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]  # what came in the step before
        incoming = chunks[(rank - step - 1) % world_size]
        arrived = buffer[: len(incoming)]
        sending = dist.isend(outgoing, (rank + 1) % world_size)
        dist.recv(arrived, (rank - 1) % world_size)
        sending.wait()
        if step < world_size - 1:
            incoming.add_(arrived)
        else:
            incoming.copy_(arrived)


PIECE_BYTES = 2 * 2**20  # smaller: waking threads per message shows; larger: less of it overlaps
IN_FLIGHT = 3  # receives posted ahead, each into a buffer of one piece: few, to stay in the cache


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum like the plain ring, but send chunks in pieces, so that adding and sending overlap.

    While a piece is added, the next ones arrive and the last one is on its way out.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    chunks = tensor.detach().view(-1).tensor_split(world_size)
    pieces = [chunk.split(PIECE_BYTES // tensor.element_size()) for chunk in chunks]
    buffers = [torch.empty_like(pieces[0][0]) for _ in range(IN_FLIGHT)]
    steps = range(2 * (world_size - 1))
    incoming = [(step, piece) for step in steps for piece in pieces[(rank - step - 1) % world_size]]

    def receive(number: int) -> tuple[torch.Tensor, dist.Work]:
        # A piece is received beside the tensor if it is to be added; else in its own place, which
        # is free by then: what was there left this rank long ago, or its sum would not be back.
        step, piece = incoming[number]
        target = buffers[number % IN_FLIGHT][: len(piece)] if step < world_size - 1 else piece
        return target, dist.irecv(target, left)

    receives = [receive(number) for number in range(min(IN_FLIGHT, len(incoming)))]
    sends = [dist.isend(piece, right) for piece in pieces[rank]]
    for number, (step, piece) in enumerate(incoming):
        arrived, receiving = receives[number]
        receiving.wait()  # messages of two ranks arrive in the order in which they were sent
        if step < world_size - 1:
            piece.add_(arrived)
        if number + IN_FLIGHT < len(incoming):  # into the buffer that is free now
            receives.append(receive(number + IN_FLIGHT))
        if step < steps[-1]:  # pass it on, with our part in it
            sends.append(dist.isend(piece, right))
    for work in sends:
        work.wait()


# ==================================================================================================
# Below this line: the demonstration, the benchmark, main.

RINGS = {"plain ring": plain_ring_all_reduce, "ring": ring_all_reduce}
IN_A_ROW = 20  # calls without a barrier between them, as nccl-tests makes them
HEADER = ["algorithm", "ranks", "MB", "p50, ms", "p75", "p90", "p95", "of 20"]
HEADER += ["algbw", "busbw", "ratio", "#wrong"]
WIDTHS = [10, 5, 6, 7, 7, 7, 7, 7, 5, 5, 5, 6]
LEGEND = """\
Times are the slowest rank's, in ms. p50 to p95: percentiles over calls that each follow a barrier,
which ranks leave one after another, so they hold this wait, too. of 20: p50 of a call below 1 MB,
of 20 after one barrier. MB = 2^20 bytes, GB/s = 10^9 bytes per second; algbw = size / p50, busbw =
algbw · 2(n-1)/n, both in GB/s; ratio: busbw divided by that of the backend's own; #wrong: wrong
elements, over all calls with a barrier and ranks"""


def demonstrate() -> None:
    """All-reduce three random integers of each rank; rank 0 prints all, before and after.

    Ranks that print for themselves do so in any order.
    """
    from common.setup import say

    torch.manual_seed(dist.get_rank())
    before = torch.randint(0, 10, (3,))
    after = before.clone()
    dist.all_reduce(after)
    all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, (before.tolist(), after.tolist()))
    for rank, (before, after) in enumerate(all_ranks):
        say(f"rank {rank}: before {before}, after {after}")


def measure_size(algorithms: dict, tensor: torch.Tensor, steps: int, warmup: int) -> list[dict]:
    """Call the algorithms in turn (A B A B …), so that noise meets them alike, and check each call.

    Returns a row of each for the JSON: the "seconds" of the slowest rank for each measured call,
    and how many elements were "wrong", over all these calls and ranks. Below 1 MB there is a second
    measurement, "seconds_in_a_row".
    """
    import numpy

    from common.report import percentiles
    from common.timing import Stopwatch, measure

    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Small integers, of which every sum is exact. The period of the numbers is a prime, so that no
    # chunk looks like another one.
    pattern = torch.arange(1_000_003, device=tensor.device).remainder(1021).float()
    expected = world_size * pattern + world_size * (world_size - 1) / 2
    periods = tensor.split(len(pattern))
    watch = Stopwatch(tensor.device)

    def timed(all_reduce) -> dict:
        for period in periods:
            torch.add(pattern[: len(period)], rank, out=period)
        dist.barrier()
        watch.mark("start")
        all_reduce(tensor)
        watch.mark("end")
        wrong = sum((period != expected[: len(period)]).sum().item() for period in periods)
        return {"seconds": watch.seconds("start", "end"), "wrong": wrong}

    def timed_in_a_row(all_reduce) -> dict:
        watch.mark("start")
        for _ in range(IN_A_ROW):
            all_reduce(tensor)
        watch.mark("end")
        return {"seconds": watch.seconds("start", "end") / IN_A_ROW}

    candidates = {name: partial(timed, algorithms[name]) for name in algorithms}
    rows = []
    for name, samples in measure(candidates, steps, warmup).items():
        row = {"algorithm": name, "world_size": world_size, "size_bytes": tensor.nbytes}
        row["threads_per_rank"] = torch.get_num_threads()
        row["seconds"] = numpy.max(samples["seconds"], axis=0).tolist()
        row["p50"] = percentiles(row["seconds"])[0]
        row["wrong"] = int(numpy.sum(samples["wrong"]))
        rows.append(row)
    if tensor.nbytes < 2**20:
        tensor.zero_()  # which stays as it is, however often it is summed
        candidates = {name: partial(timed_in_a_row, algorithms[name]) for name in algorithms}
        in_a_row = measure(candidates, steps=max(1, steps // 4), warmup=1)
        for row in rows:
            seconds = in_a_row[row["algorithm"]]["seconds"]
            row["seconds_in_a_row"] = numpy.max(seconds, axis=0).tolist()
    return rows


def print_measured(row: dict, backend_p50: float) -> None:
    """Print a line of the table: one size with one algorithm."""
    from common.report import percentiles, print_row

    size, world_size = row["size_bytes"], row["world_size"]
    algbw = size / row["p50"] / 1e9
    rates = algbw, algbw * 2 * (world_size - 1) / world_size, backend_p50 / row["p50"]
    cells = [row["algorithm"], str(world_size), f"{round(size / 2**20, 4):g}"]
    cells += [f"{1000 * time:.2f}" for time in percentiles(row["seconds"])]
    in_a_row = row.get("seconds_in_a_row")
    cells.append(f"{1000 * percentiles(in_a_row)[0]:.2f}" if in_a_row else "-")
    print_row([*cells, *[f"{rate:.2f}" for rate in rates], str(row["wrong"])], WIDTHS)


def join(backend: str, rank: int, world_size: int, store: dist.Store) -> torch.device:
    """Join a group of the first ranks, with this rank's share of the cores; return its device."""
    from common.setup import threads_per_rank, without_gloo_greeting

    torch.set_num_threads(threads_per_rank(world_size))
    device_id = torch.device("cuda", rank) if backend == "nccl" else None
    if device_id:
        torch.cuda.set_device(device_id)
    options = {"rank": rank, "world_size": world_size, "store": store, "device_id": device_id}
    with without_gloo_greeting():
        dist.init_process_group(backend, **options)
    return device_id or torch.device("cpu")


def run_rank(rank: int, port: int, args, result: dict) -> None:
    """Show an all-reduce, then measure every cell that has this rank, in a process of its own.

    Rank 0 prints the rows of each size and writes the JSON: they are kept whatever happens next.
    """
    from cost_model import fit_and_draw

    from common.report import print_row, write_json
    from common.setup import cores, say

    os.environ["RANK"] = str(rank)  # only rank 0 prints
    store = dist.TCPStore("127.0.0.1", port)
    if rank < 4:
        join("gloo", rank, 4, dist.PrefixStore("demonstration", store))
        demonstrate()
        dist.destroy_process_group()
    say(
        f"\n01_allreduce: torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"GPUs: {torch.cuda.device_count()}, {cores():g} cores for all ranks; "
        f"measured calls: {args.steps}, after {args.warmup} to warm up"
    )
    print_row(HEADER, WIDTHS)
    rows = result["rows"] = []
    for backend, world_size in itertools.product(args.backends, args.world_sizes):
        if rank >= world_size:
            continue
        cell = f"{backend}, {world_size} ranks"
        if rank == 0:
            store.set(cell, "begins")
        store.wait([cell], timedelta(days=1))  # while smaller groups measure
        device = join(backend, rank, world_size, dist.PrefixStore(cell, store))
        # nccl sends and receives in turn, and would wait for ever in the rings.
        algorithms = {backend: dist.all_reduce} | (RINGS if backend == "gloo" else {})
        for megabytes in args.sizes_mb:
            tensor = torch.empty(max(1, int(megabytes * 2**18)), device=device)
            measured = measure_size(algorithms, tensor, args.steps, args.warmup)
            rows += measured
            write_json(args.json, result)
            for row in measured:
                print_measured(row, measured[0]["p50"])
        dist.destroy_process_group()
    if rank == 0:
        say(LEGEND)
        result["fits"] = fit_and_draw(rows, args.plot)
        write_json(args.json, result)


def read_arguments():
    """Read the command line and check it."""
    from common import setup

    parser = setup.Parser(__doc__)
    add = parser.add_argument
    backends = setup.checked(str, ("gloo", "nccl").__contains__, "gloo or nccl")
    one = setup.whole_number(1)
    sizes, ranks = setup.list_of(setup.positive_number), setup.list_of(one)
    add("--backends", "--backend", type=setup.list_of(backends), default="gloo")
    add("--sizes-mb", "--tensor_size_mb", type=sizes, default="0.01,0.1,1,10,100")
    add("--nproc", "--world_size", dest="world_sizes", type=ranks, default="2,4,6")
    add("--steps", "--iters", type=one, default=20, help="measured calls")
    add("--warmup", type=one, default=5, help="calls before them, not measured")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_plot_arguments(parser, "01_allreduce.png")
    args = parser.parse_args()
    if "nccl" in args.backends and torch.cuda.device_count() < max(args.world_sizes):
        setup.fail("argument --backends: nccl needs a GPU for each rank: use gloo, or fewer ranks")
    return args


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import cost_model  # noqa: F401

        from common import report
    except ModuleNotFoundError as error:
        files = "the repository's folder common/, and cost_model.py"
        sys.exit(f"error: {error}: copy {files} beside this script")

    args = read_arguments()
    devices = ["cuda" if backend == "nccl" else "cpu" for backend in args.backends]
    # Lists where later stages have one backend, device and world size; threads are in the rows.
    where = args.backends, devices, args.world_sizes, None
    result = report.head("01_allreduce", args, *where)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # any free port
    try:
        mp.spawn(run_rank, (store.port, args, result), max(4, *args.world_sizes))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(f"error: a rank ended: {str(error).strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
