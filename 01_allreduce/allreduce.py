"""01: all-reduce, shown, opened up and measured.

After an all-reduce every rank holds the sum of all ranks' tensors. This is the one operation that
data parallelism stands on. Here it is shown on four small tensors, written by hand as a ring, once
plain and once in pieces, and timed beside the backend's own for sizes from 1 MB to 1 GB. Unlike the
later stages this script starts its ranks itself; alpha_beta.py says what the times mean.

    make 01_allreduce                       (all sizes, 2, 4 and 6 ranks: about four minutes)
    make 01_allreduce NPROC=4               (only 4 ranks)
    python 01_allreduce/allreduce.py --demo                             (only the demonstration)
    python 01_allreduce/allreduce.py --sizes-mb 1,10 --nproc 2          (done in seconds)

The picture goes to results/01_allreduce.png. The JSON has a row per size, algorithm and world size,
with a time per call, that of the slowest rank, where later stages have [rank][step].

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009; bandwidths as nccl-tests defines them (doc/PERFORMANCE.md); Stanford CS336, assignment 2,
"Distributed communication".
"""

import itertools
import json
import os
import signal
import sys
import tempfile
import timeit
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported

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
    check_tensor(tensor)
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
    """The same ring, with chunks that travel in pieces: adding and sending overlap.

    While a piece is added, the next ones arrive and the last one is on its way out.
    """
    check_tensor(tensor)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    length = PIECE_BYTES // tensor.element_size()
    chunks = tensor.detach().view(-1).tensor_split(world_size)
    pieces = [chunk.split(length) for chunk in chunks]
    arriving = [(rank - step - 1) % world_size for step in range(2 * (world_size - 1))]  # chunks
    incoming = [piece for chunk in arriving for piece in pieces[chunk]]  # in this order
    to_add = sum(len(pieces[chunk]) for chunk in arriving[: world_size - 1])  # the first ones
    to_pass_on = len(incoming) - len(pieces[arriving[-1]])  # all but the last step's

    # A piece is received beside the tensor if it is to be added; else in its own place, which is
    # free by then, because what was there left this rank long ago, or its sum would not be back.
    buffers = chunks[0].new_empty(IN_FLIGHT, min(length, len(chunks[0])))
    targets = []
    for number, piece in enumerate(incoming):
        if number < to_add:
            targets.append(buffers[number % IN_FLIGHT][: len(piece)])
        else:
            targets.append(piece)

    receives = [dist.irecv(target, left) for target in targets[:IN_FLIGHT]]
    sends = [dist.isend(piece, right) for piece in pieces[rank]]
    for number, piece in enumerate(incoming):
        receives[number].wait()  # messages of two ranks arrive in the order in which they were sent
        if number < to_add:
            piece.add_(targets[number])
        if number + IN_FLIGHT < len(targets):  # into the buffer that is free now
            receives.append(dist.irecv(targets[number + IN_FLIGHT], left))
        if number < to_pass_on:  # with our part in it
            sends.append(dist.isend(piece, right))
    for work in sends:
        work.wait()


def check_tensor(tensor: torch.Tensor) -> None:
    """RuntimeError for what the rings cannot sum, before anything is sent: the next call works."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise RuntimeError("the ring needs a contiguous CPU tensor; .contiguous() makes one")


# ==================================================================================================
# Below this line: the demonstration, the benchmark, main.

RINGS = {"plain ring": plain_ring_all_reduce, "ring": ring_all_reduce}
LARGE = 2**29  # bytes: on a CPU three calls are counted from there on, after one, as they take long
HEADER = ["algorithm", "ranks", "MB", "count", "mean, ms", "p50", "p75", "p90", "p95"]
HEADER += ["algbw", "busbw", "ratio", "#wrong"]
WIDTHS = [10, 5, 6, 5, 8, 7, 7, 7, 7, 5, 5, 5, 6]
LEGEND = (
    "time: of the slowest rank, ms, mean and percentiles of the counted calls; count: calls that "
    "are counted + calls before them\nfor warming up, fewer of both where a call takes long; "
    "MB = 2^20 bytes, GB/s = 10^9 bytes per second; algbw = size / p50,\nbusbw = algbw · 2(n-1)/n, "
    "GB/s; ratio: busbw to the backend's own; #wrong: wrong elements, over all calls and ranks"
)


def on_rank(rank: int, world_size: int, backend: str, function: Callable, *arguments) -> None:
    """In a process of its own: join the other ranks, call function(device, *arguments), leave."""
    from common.setup import threads_per_rank, without_gloo_greeting

    os.environ["RANK"] = str(rank)  # say() and progress() go by it, as under torchrun
    torch.set_num_threads(threads_per_rank(world_size))
    device, device_id = torch.device("cpu"), None
    if backend == "nccl":
        device = device_id = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    with without_gloo_greeting():
        dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device_id)
    try:
        function(device, *arguments)
    finally:
        dist.destroy_process_group()


def demonstrate(device: torch.device, all_reduce: Callable = dist.all_reduce) -> None:
    """All-reduce three random integers of each rank, and print all, before and after."""
    from common.setup import say

    tensor = torch.randint(0, 10, (3,), generator=torch.Generator().manual_seed(dist.get_rank()))
    before = tensor.tolist()
    all_reduce(tensor)
    all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, (before, tensor.tolist()))
    for rank, (before, after) in enumerate(all_ranks):
        say(f"rank {rank}: before {before}, after {after}")
    expected = torch.tensor([before for before, _ in all_ranks]).sum(0).tolist()
    if any(after != expected for _, after in all_ranks):
        raise RuntimeError("demonstration FAILED: not every rank holds the sum")
    say("demonstration: passed, all ranks hold the sum, bitwise equal\n")


def benchmark(
    device: torch.device,
    sizes_bytes: list[int],
    steps: int,
    warmup: int,
    rows_file: str,
    others: dict[str, Callable] = RINGS,
) -> None:
    """Measure every size with every algorithm: the backend's and, over gloo, `others`.

    Rank 0 prints a row as soon as it has it, and appends it to rows_file as JSON, so that it is
    kept whatever happens next.
    """
    backend = dist.get_backend()
    algorithms = {backend: dist.all_reduce}
    if backend == "gloo":  # nccl, as far as we know, would wait: it runs sends and receives in turn
        algorithms |= others
    for size_bytes in sizes_bytes:
        tensor = torch.empty(size_bytes // 4, device=device)
        rows = measure(algorithms, tensor, steps, warmup)
        for row in rows:
            if dist.get_rank() == 0:
                with open(rows_file, "a") as file:
                    file.write(json.dumps(row) + "\n")
            print_measured(row, rows[0]["p50"])


def print_measured(row: dict, backend_p50: float) -> None:
    """A line of the table: one size with one algorithm."""
    from common.report import percentiles, print_row

    size, world_size, seconds = row["size_bytes"], row["world_size"], row["seconds"]
    algbw = size / row["p50"] / 1e9
    busbw = algbw * 2 * (world_size - 1) / world_size
    times = [sum(seconds) / len(seconds), *percentiles(seconds)]
    cells = [row["algorithm"], str(world_size), f"{size / 2**20:g}"]
    cells += [f"{len(seconds)}+{row['warmup']}", *[f"{1000 * time:.2f}" for time in times]]
    cells += [f"{algbw:.2f}", f"{busbw:.2f}", f"{backend_p50 / row['p50']:.2f}", str(row["wrong"])]
    print_row(cells, WIDTHS)


def measure(
    algorithms: dict[str, Callable], tensor: torch.Tensor, steps: int, warmup: int
) -> list[dict]:
    """Call the algorithms in turn (A B A B …), so that noise meets them alike, and check each call.

    Returns a row of each for the JSON, with the "seconds" of the slowest rank per counted call, the
    number of calls before them ("warmup"), and the "wrong" elements of all calls and ranks.
    """
    import numpy

    from common import report, timing

    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Small integers, of which every sum is exact. The period of the numbers is a prime, so that no
    # chunk looks like another one.
    pattern = torch.arange(1_000_003, device=tensor.device).remainder(1021).float()
    expected = world_size * pattern + world_size * (world_size - 1) / 2
    periods = tensor.split(len(pattern))
    watch = timing.Stopwatch(tensor.device)

    def fill() -> None:
        for period in periods:
            torch.add(pattern[: len(period)], rank, out=period)

    def timed(all_reduce: Callable) -> dict:
        watch.mark("start")
        all_reduce(tensor)
        watch.mark("end")
        wrong = sum((period != expected[: len(period)]).sum().item() for period in periods)
        fill()  # for the next call, before the barrier
        return {"seconds": watch.seconds("start", "end"), "wrong": wrong}

    fill()
    candidates = {name: partial(timed, algorithms[name]) for name in algorithms}
    if tensor.nbytes >= LARGE and tensor.device.type == "cpu":
        steps, warmup = min(steps, 3), 1
    samples = timing.measure(candidates, steps=warmup + steps, warmup=0)
    rows = []
    for name in algorithms:
        slowest = numpy.max(samples[name]["seconds"], axis=0)
        seconds = slowest[warmup:].tolist()
        row = {
            "algorithm": name,
            "world_size": world_size,
            "threads_per_rank": torch.get_num_threads(),
            "size_bytes": tensor.nbytes,
            "warmup": warmup,
            "seconds": seconds,
            "p50": report.percentiles(seconds)[0],
            "wrong": sum(map(sum, samples[name]["wrong"])),
        }
        rows.append(row)
    return rows


def copy_bandwidth() -> float:
    """Bytes per second at which one process, with all its threads, copies 256 MB: best of ten."""
    source, target = torch.ones(2, 2**26)
    times = timeit.repeat(lambda: target.copy_(source), number=1, repeat=10)
    return source.nbytes / min(times)


def run_grid(args, ranks_measure: Callable, rows_file: str) -> None:
    """Measure every backend with every world size, and say what this machine cannot run."""
    from common.spawn import run_ranks
    from common.report import print_row
    from common.setup import TORCH_BYTES, available_memory, progress

    print_row(HEADER, WIDTHS)
    sizes = [int(size * 2**18) * 4 for size in args.sizes_mb]  # whole float32s
    gpus = torch.cuda.device_count()
    for backend, world_size in itertools.product(args.backends, args.world_sizes):
        free = available_memory()
        possible = [size for size in sizes if world_size * (size + TORCH_BYTES) <= free]
        needed = world_size * (max(sizes) + TORCH_BYTES) / 1e9
        reason = f"not run: needs {needed:.1f} GB of memory, and {free / 1e9:.1f} are free"
        if backend == "nccl":
            possible = sizes if gpus >= world_size else []
            reason = f"not run: needs {world_size} GPUs, and torch finds {gpus}"
        if possible:
            progress(f"{backend}: {world_size} ranks are started")
            options = (possible, args.steps, args.warmup, rows_file)
            run_ranks(world_size, on_rank, world_size, backend, ranks_measure, *options)
        left_out = [f"{size / 2**20:g}" for size in sizes if size not in possible]
        if left_out:
            print_row([backend, str(world_size), ",".join(left_out), reason], [*WIDTHS[:3], 0])


def read_arguments(description: str, picture: str):
    """The command line, checked; `picture` is the file's name if no --plot names another."""
    from common import setup

    allowed = "a size in MB, of one float32 at least"
    size = setup.checked(float, lambda megabytes: 2**-18 <= megabytes < 2**40, allowed)
    backend = setup.checked(str, lambda name: name in ("gloo", "nccl"), "gloo or nccl")
    one = setup.whole_number(1)
    sizes, backends, ranks = map(setup.list_of, (size, backend, one))
    parser = setup.Parser(description)
    add = parser.add_argument
    add("--demo", action="store_true", help="measure nothing")
    add("--backends", "--backend", type=backends, default="gloo,nccl")
    add("--sizes-mb", "--tensor_size_mb", type=sizes, default="1,10,100,1000")
    add("--nproc", "--world_size", dest="world_sizes", type=ranks, default="2,4,6")
    add("--steps", "--iters", type=one, default=20, help="measured calls")
    add("--warmup", type=one, default=5, help="calls before them, not measured")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_plot_arguments(parser, picture)
    return parser.parse_args()


def begin(args, stage: str) -> dict:
    """The head of the JSON, with lists where later stages have one backend and world size."""
    from common import report

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    names = {"gloo": report.processor_name(), "nccl": gpu}
    return {
        "stage": stage,
        "torch": torch.__version__,
        "backend": args.backends,
        "device": [{"gloo": "cpu", "nccl": "cuda"}[backend] for backend in args.backends],
        "device_name": [names[backend] for backend in args.backends],
        "world_size": args.world_sizes,
        "threads_per_rank": None,  # in the rows
        "options": dict(vars(args)),
        "started": datetime.now(timezone.utc),
    }


def run(args, stage: str, ranks_show: Callable, ranks_measure: Callable) -> None:
    """All of a run: four ranks show it, the grid is measured, tables and files say what came out.

    What is measured before Ctrl-C or the end of a rank is kept.
    """
    from alpha_beta import draw, fit_all

    from common.spawn import run_ranks
    from common.report import write_json
    from common.setup import progress, say, threads_per_rank

    result = begin(args, stage)
    status = 0
    with tempfile.NamedTemporaryFile("r") as rows_file:
        try:
            progress("demonstration: 4 ranks are started")
            run_ranks(4, on_rank, 4, "gloo", ranks_show)
            if not args.demo:
                copy = result["copy_bytes_per_second"] = copy_bandwidth()
                world_sizes = ",".join(map(str, args.world_sizes))
                backends = " and ".join(args.backends)
                say(f"{stage}: torch {torch.__version__}, {backends} with {world_sizes} ranks")
                cores = threads_per_rank(1)
                say(f"{cores} cores shared by the ranks, memory copy {copy / 1e9:.2f} GB/s")
                run_grid(args, ranks_measure, rows_file.name)
        except KeyboardInterrupt:
            say("interrupted: what is measured so far follows")
            status = 130
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            progress()
            reason = str(error).strip().splitlines()[-1]
            print(f"{Path(sys.argv[0]).name}: error: a rank ended: {reason}", file=sys.stderr)
            status = 1
        whole_lines = rows_file.read().split("\n")[:-1]  # the last one may have been cut off
    rows = result["rows"] = [json.loads(line) for line in whole_lines]
    if rows:
        say(LEGEND)
        result["fits"] = fit_all(rows)
    write_json(args.json, result)
    if rows and args.plot:
        draw(args.plot, rows, copy)
    sys.exit(status)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import alpha_beta  # noqa: F401

        from common.setup import forget_launcher
    except ModuleNotFoundError as error:
        files = "the repository's folder common/, and alpha_beta.py"
        sys.exit(f"error: {error}: copy {files} beside this script")

    forget_launcher()
    run(read_arguments(__doc__, "01_allreduce.png"), folder.name, demonstrate, benchmark)


if __name__ == "__main__":
    main()
