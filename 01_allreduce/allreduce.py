"""01: all-reduce, shown, opened up and measured.

After an all-reduce every rank holds the sum of all ranks' tensors. This is the one operation that data parallelism
stands on. Here it is shown on four small tensors, written by hand as a ring of sends and receives, and timed beside the
backend's own for sizes from 1 MB to 1 GB. Unlike the later stages this script starts its ranks itself.

    make 01_allreduce                                                        (see also ARGS="--help")
    python 01_allreduce/allreduce.py                                         (the same)
    python 01_allreduce/allreduce.py --demo                                  (only the demonstration)
    python 01_allreduce/allreduce.py --sizes-mb 1,10 --world-sizes 2         (done in seconds)

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009; bandwidths
as nccl-tests defines them (doc/PERFORMANCE.md); Stanford CS336, assignment 2, "Distributed communication".
"""

import argparse
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import timeit
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PIECE_BYTES = 2 * 2**20  # smaller: Python's cost per message shows; larger: less of it overlaps
IN_FLIGHT = 4  # receives posted ahead, each into a buffer of one piece


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum a contiguous CPU tensor over all ranks, in place. Any shape, length, dtype and world size; for gloo.

    The tensor is cut into one chunk per rank. In every step each rank sends a chunk to its right neighbour and receives
    one from its left: always the chunk that it passes on in the next step. For the first n-1 steps what arrives is added
    (reduce-scatter: rank r ends up with the whole sum of chunk r+1), for the other n-1 steps it replaces what was
    there (all-gather). RuntimeError for a tensor that is not contiguous.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    flat = tensor.detach().view(-1)
    chunks = flat.tensor_split(world_size)  # lengths differ by one at most, and may be 0
    # A chunk travels in pieces: while one is being added, the next are arriving and the last is on its way out.
    length = PIECE_BYTES // tensor.element_size()
    pieces = [
        [chunk[start : start + length] for start in range(0, len(chunk), length)]
        for chunk in chunks
    ]

    added = [
        piece for step in range(world_size - 1) for piece in pieces[(rank - 1 - step) % world_size]
    ]
    replaced = [
        piece for step in range(world_size - 1) for piece in pieces[(rank - step) % world_size]
    ]
    incoming = added + replaced
    outgoing = [
        piece
        for step in range(2 * (world_size - 1))
        for piece in pieces[(rank - step) % world_size]
    ]

    buffers = flat.new_empty(IN_FLIGHT, min(length, len(chunks[0])))
    receives = []

    def receive_next():
        number = len(receives)
        if number < len(incoming):
            # A replaced piece is received where it belongs: it left this rank long ago, or its sum would not be back.
            target = (
                buffers[number % IN_FLIGHT][: len(incoming[number])]
                if number < len(added)
                else incoming[number]
            )
            receives.append((target, dist.irecv(target, left)))

    for _ in range(IN_FLIGHT):
        receive_next()
    own = len(pieces[rank])  # these need not wait for anything
    sends = [dist.isend(piece, right) for piece in outgoing[:own]]
    for number, piece in enumerate(incoming):
        arrived, work = receives[number]
        work.wait()  # messages between two ranks arrive in the order in which they were sent
        if number < len(added):
            torch.add(piece, arrived, out=piece)
        receive_next()
        if own + number < len(outgoing):
            sends.append(
                dist.isend(outgoing[own + number], right)
            )  # this very piece, now with our part in it
    for work in sends:
        work.wait()


def fit(
    sizes_bytes: list[float], seconds: list[float], world_size: int
) -> tuple[float, float, float]:
    """Fit t(S) = α + 2(n-1)/n · S/β: α in seconds, β in bytes per second, root mean square of the relative errors.

    Least squares of the relative errors, so that a small size counts as much as a large one; α is not let below 0.
    ValueError where there is nothing to fit: less than two different sizes, one rank, or times that do not grow.
    """
    if world_size < 2 or len(set(sizes_bytes)) < 2:
        raise ValueError("needs two ranks and two sizes")
    times = torch.tensor(seconds, dtype=torch.float64)
    traffic = 2 * (world_size - 1) / world_size * torch.tensor(sizes_bytes, dtype=torch.float64)
    columns = torch.stack(
        [1 / times, traffic / times], dim=1
    )  # columns @ (α, 1/β) is to be 1 for every size
    target = torch.ones(len(times), 1, dtype=torch.float64)
    alpha, seconds_per_byte = torch.linalg.lstsq(columns, target).solution.flatten().tolist()
    if alpha < 0:
        alpha, seconds_per_byte = 0.0, torch.linalg.lstsq(columns[:, 1:], target).solution.item()
    if seconds_per_byte <= 0:
        raise ValueError("the time does not grow with the size")
    errors = columns @ torch.tensor([[alpha], [seconds_per_byte]], dtype=torch.float64) - target
    return alpha, 1 / seconds_per_byte, errors.square().mean().sqrt().item()


# ======================================================================================================================
# Below this line: the demonstration, the benchmark, the picture, main.

PROCESS_BYTES = 300 * 2**20  # of memory for a rank with nothing but torch in it
ROW = "{:<9} {:>5} {:>7} {:>6} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6} {:>6} {:>7}"
HEADER = ROW.format(
    "algorithm",
    "ranks",
    "MB",
    "count",
    "p50, ms",
    "p75",
    "p90",
    "p95",
    "algbw",
    "busbw",
    "ratio",
    "#wrong",
)
LEGEND = """\
time: of the slowest rank, ms, percentiles over the counted calls; count: calls that are counted + calls before them for
warming up, fewer of both where a call takes long; MB = 2^20 bytes, GB/s = 10^9 bytes per second; algbw = size / p50, busbw
= algbw · 2(n-1)/n, GB/s; ratio: busbw to the backend's own; #wrong: wrong elements, over all calls and ranks"""


def run_ranks(world_size: int, folder: str, function, backend: str, *arguments) -> None:
    """Run function(device, backend, *arguments) on world_size ranks; none is left when this returns or raises."""
    store = tempfile.mkstemp(dir=folder)[
        1
    ]  # the ranks meet in a file: no port that two runs could fight for
    signals, received = {signal.SIGINT, signal.SIGTERM}, []
    for (
        number
    ) in signals:  # only noted: an exception while a rank is half started would leave it behind
        signal.signal(number, lambda number, _: received.append(number))
    signal.pthread_sigmask(
        signal.SIG_BLOCK, signals
    )  # inherited, so that no rank greets Ctrl-C with a traceback
    ranks = mp.spawn(
        start_rank,
        (world_size, store, function, backend, *arguments),
        nprocs=world_size,
        join=False,
    )
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        for number in signals:
            signal.signal(number, signal.default_int_handler)  # KeyboardInterrupt, for both
        if received:
            raise KeyboardInterrupt
        while not ranks.join():
            pass
    finally:
        for process, file in zip(ranks.processes, ranks.error_files, strict=True):
            process.kill()
            process.join()
            Path(file).unlink(
                missing_ok=True
            )  # torch's temporary file, in which the rank leaves its traceback


def start_rank(rank: int, world_size: int, store: str, function, backend: str, *arguments) -> None:
    """Join the process group, call the function, leave. A spawned process sees its arguments and nothing else of main."""
    from common.setup import threads_per_rank

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    torch.set_num_threads(threads_per_rank(world_size))
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        device_id=device if backend == "nccl" else None,
    )
    try:
        function(device, backend, *arguments)
    finally:
        dist.destroy_process_group()


def demonstrate(device: torch.device, backend: str) -> None:
    """All-reduce one random integer tensor per rank and print all, before and after."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.randint(0, 10, (3,), generator=torch.Generator().manual_seed(rank))
    before, after = ([torch.empty_like(tensor) for _ in range(world_size)] for _ in range(2))
    dist.all_gather(before, tensor)
    dist.all_reduce(tensor)
    dist.all_gather(after, tensor)
    if rank == 0:
        for r in range(world_size):
            print(f"rank {r}: before {before[r].tolist()}, after {after[r].tolist()}")
        if not all(torch.equal(one, sum(before)) for one in after):
            sys.exit("demonstration FAILED: not every rank holds the sum")
        print("demonstration: passed, all ranks hold the sum, bitwise equal\n", flush=True)


def benchmark(
    device: torch.device,
    backend: str,
    sizes_bytes: list[int],
    iters: int,
    warmup: int,
    row_seconds: float,
    rows_file: str,
) -> None:
    """Measure every size; rank 0 prints a row per algorithm as soon as it has it, and appends it to rows_file as JSON."""
    from common.report import environment, percentiles

    world_size = dist.get_world_size()
    algorithms = {backend: dist.all_reduce}
    if (
        backend == "gloo"
    ):  # nccl would wait for ever: it runs single sends and receives one after the other
        algorithms["ring"] = ring_all_reduce
    for size_bytes in sizes_bytes:
        tensor = torch.empty(size_bytes // 4, device=device)
        samples, warmups, wrong = measure(algorithms, tensor, iters, warmup, row_seconds)
        for name, seconds in samples.items() if dist.get_rank() == 0 else ():
            times = percentiles(seconds)
            row = {
                "algorithm": name,
                "size_bytes": size_bytes,
                "warmup": warmups,
                "seconds": seconds,
                "p50": times[0],
                "wrong": wrong[name],
            }
            algbw, ratio = size_bytes / times[0] / 1e9, percentiles(samples[backend])[0] / times[0]
            with open(rows_file, "a") as file:
                file.write(json.dumps(environment(device) | row) + "\n")
            print(
                ROW.format(
                    name,
                    world_size,
                    f"{size_bytes / 2**20:g}",
                    f"{len(seconds)}+{warmups}",
                    *(f"{1000 * t:.2f}" for t in times),
                    f"{algbw:.2f}",
                    f"{algbw * 2 * (world_size - 1) / world_size:.2f}",
                    f"{ratio:.2f}",
                    wrong[name],
                ),
                flush=True,
            )


def measure(
    algorithms: dict, tensor: torch.Tensor, iters: int, warmup: int, row_seconds: float
) -> tuple[dict, int, dict]:
    """Call the algorithms in turn (A B A B …), so that noise meets them alike, and check the result of every call.

    Calls that together would take longer than row_seconds are left out, warm-ups and counted ones in proportion; four
    calls stay. Returns {algorithm: seconds of the slowest rank per counted call}, warm-ups, {algorithm: wrong elements}.
    """
    from common.timing import Stopwatch

    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Small integers, of which every sum is exact. The period is a prime, so that no chunk looks like another one.
    pattern = torch.arange(1_000_003, device=tensor.device).remainder(1021).float()
    expected = world_size * pattern + world_size * (world_size - 1) / 2
    watch = Stopwatch(tensor.device)
    seconds = {name: [] for name in algorithms}
    wrong = {name: torch.zeros((), dtype=torch.int64, device=tensor.device) for name in algorithms}
    calls, done = warmup + iters, 0  # the same on all ranks, as they agree on every time
    while done < calls:
        for name, all_reduce in algorithms.items():
            for part in tensor.split(len(pattern)):
                torch.add(pattern[: len(part)], rank, out=part)
            dist.barrier()
            watch.mark("start")
            all_reduce(tensor)
            watch.mark("end")
            slowest = torch.tensor(
                watch.seconds("start", "end"), dtype=torch.float64, device=tensor.device
            )
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
            wrong[name] += sum(
                (part != expected[: len(part)]).sum() for part in tensor.split(len(pattern))
            )
        done += 1
        if done == 1:
            calls = min(calls, max(4, row_seconds / max(first for (first,) in seconds.values())))
    warmups = min(done - 1, math.ceil(done * warmup / (warmup + iters)))
    for count in wrong.values():
        dist.all_reduce(count)
    return (
        {name: times[warmups:] for name, times in seconds.items()},
        warmups,
        {name: count.item() for name, count in wrong.items()},
    )


def why_not(backend: str, world_size: int, size_bytes: int) -> str | None:
    """Why this machine cannot run this combination; None if it can."""
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        if gpus < world_size:
            return f"needs {world_size} GPUs, and torch finds {gpus}"
        needed, free = (
            size_bytes + PROCESS_BYTES,
            min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(world_size)),
        )
    else:
        needed, free = world_size * (size_bytes + PROCESS_BYTES), free_memory()
    return (
        f"needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free"
        if needed > free
        else None
    )


def free_memory() -> int:
    """Bytes that processes can still have: what Linux says is available, elsewhere all that the machine has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def copy_bandwidth() -> float:
    """Bytes per second at which one process, with all its threads, copies 256 MB within memory: the best of ten."""
    source, target = torch.ones(2, 2**26)
    return source.nbytes / min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=10))


def lines_of(rows: list[dict]) -> dict:
    """The rows by (algorithm, world size): what the model is fitted to, and a line of the picture."""
    lines = {}
    for row in rows:
        lines.setdefault((row["algorithm"], row["world_size"]), []).append(row)
    return lines


def fit_all(rows: list[dict]) -> list[dict]:
    """Fit the model to each algorithm and world size, and print the table."""
    from common.report import print_table

    fits, table = [], []
    for (name, world_size), line in lines_of(rows).items():
        try:
            alpha, beta, error = fit(
                [row["size_bytes"] for row in line], [row["p50"] for row in line], world_size
            )
            fits.append(
                {
                    "algorithm": name,
                    "world_size": world_size,
                    "alpha": alpha,
                    "beta": beta,
                    "error": error,
                }
            )
            table.append(
                [
                    name,
                    str(world_size),
                    f"{1e6 * alpha:.0f}",
                    f"{beta / 1e9:.2f}",
                    f"{100 * error:.1f} %",
                ]
            )
        except ValueError as reason:
            table.append([name, str(world_size), "-", "-", f"no fit: {reason}"])
    print("\nmodel: t(S) = α + 2(n-1)/n · S/β, fitted to the p50s")
    print_table(["algorithm", "ranks", "α, µs", "β, GB/s", "error (rms)"], table)
    return fits


def plot(path: Path, rows: list[dict], fits: list[dict], copy: float) -> None:
    """Draw busbw over size and, beside it, time over size with the fitted model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    bandwidth, time = figure.subplots(1, 2)
    colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"]
    world_sizes = sorted({row["world_size"] for row in rows})
    for (name, n), line in lines_of(rows).items():
        color = colors[world_sizes.index(n) % len(colors)]
        style = (
            {"color": color, "marker": "s", "mfc": "none"}
            if name == "ring"
            else {"color": color, "marker": "o"}
        )
        sizes = [row["size_bytes"] / 2**20 for row in line]
        busbw = [2 * (n - 1) / n * row["size_bytes"] / row["p50"] / 1e9 for row in line]
        bandwidth.plot(
            sizes, busbw, "--" if name == "ring" else "-", label=f"{name}, {n} ranks", **style
        )
        time.plot(sizes, [1000 * row["p50"] for row in line], linestyle="none", **style)
        for one in fits:
            if (one["algorithm"], one["world_size"]) == (name, n):
                x = torch.logspace(math.log10(min(sizes)), math.log10(max(sizes)), 50)
                model = 1000 * (one["alpha"] + 2 * (n - 1) / n * x * 2**20 / one["beta"])
                time.plot(x, model, "--" if name == "ring" else "-", color=color, linewidth=1)
    bandwidth.axhline(copy / 1e9, color="black", linestyle=":", label="memory copy, one process")
    bandwidth.set(
        xscale="log",
        yscale="log",
        xlabel="tensor size, MB",
        ylabel="busbw, GB/s",
        title="Bus bandwidth",
    )
    time.set(
        xscale="log",
        yscale="log",
        xlabel="tensor size, MB",
        ylabel="time of the slowest rank, ms",
        title="Time: measured (marks) and fitted model (lines)",
    )
    for axes in (bandwidth, time):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(*bandwidth.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle("All-reduce of float32 tensors on one machine, p50")
    figure.savefig(path, dpi=150, format="png")


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common.report import write_json
        from common.setup import (
            Parser,
            fail,
            output_file,
            positive_number,
            threads_per_rank,
            whole_number,
        )
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    def list_of(convert):
        return lambda text: [convert(word) for word in text.split(",")]

    picture = folder.parent / "results" / "01_allreduce.png"
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--demo", action="store_true", help="only the demonstration")
    parser.add_argument(
        "--backends", type=list_of(str), default="gloo,nccl", help="default: gloo,nccl"
    )
    parser.add_argument(
        "--sizes-mb",
        type=list_of(positive_number),
        default="1,10,100,1000",
        help="default: 1,10,100,1000",
    )
    parser.add_argument(
        "--world-sizes", type=list_of(whole_number(1)), default="2,4,6", help="default: 2,4,6"
    )
    parser.add_argument(
        "--iters", type=whole_number(1), default=20, help="counted calls (default: 20)"
    )
    parser.add_argument(
        "--warmup", type=whole_number(0), default=5, help="calls before them (default: 5)"
    )
    parser.add_argument(
        "--row-seconds",
        type=positive_number,
        default=6.0,
        help="fewer calls where all would take longer than this; inf: always all (default: 6)",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="everything measured, raw")
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help=f"the picture, PNG (default: {picture})"
    )
    args = parser.parse_args()
    for name in args.backends:
        if name not in ("gloo", "nccl"):
            fail(f"argument --backends: {name!r} is neither gloo nor nccl")
    for size in args.sizes_mb:
        if not 4 <= size * 2**20 < 2**60:
            fail(
                f"argument --sizes-mb: {size:g} MB is less than one float32, or more than any machine has"
            )
    if args.plot is None:
        picture.parent.mkdir(exist_ok=True)
        args.plot = picture

    sizes = [int(size * 2**18) * 4 for size in args.sizes_mb]
    skipped, copy, status = [], None, 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    with tempfile.TemporaryDirectory() as temporary:
        rows_file = Path(temporary, "rows")
        rows_file.touch()
        try:
            run_ranks(4, temporary, demonstrate, "gloo")
            if args.demo:
                return
            copy = copy_bandwidth()
            print(
                f"benchmark: torch {torch.__version__}, {threads_per_rank(1)} cores shared by the ranks, memory copy "
                f"{copy / 1e9:.2f} GB/s\n{HEADER}",
                flush=True,
            )
            for backend, world_size in itertools.product(args.backends, args.world_sizes):
                reasons = {size: why_not(backend, world_size, size) for size in sizes}
                if possible := [size for size in sizes if reasons[size] is None]:
                    run_ranks(
                        world_size,
                        temporary,
                        benchmark,
                        backend,
                        possible,
                        args.iters,
                        args.warmup,
                        args.row_seconds,
                        str(rows_file),
                    )
                for reason in dict.fromkeys(filter(None, reasons.values())):
                    those = [size for size in sizes if reasons[size] == reason]
                    skipped.append(
                        {
                            "algorithm": backend,
                            "world_size": world_size,
                            "sizes_bytes": those,
                            "reason": reason,
                        }
                    )
                    print(
                        f"{backend:<9} {world_size:>5} {','.join(f'{size / 2**20:g}' for size in those):>7}   "
                        f"not run: {reason}",
                        flush=True,
                    )
        except KeyboardInterrupt:
            print("interrupted: what is measured so far follows", flush=True)
            status = 130
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(
                f"allreduce.py: error: a rank ended: {str(error).strip().splitlines()[-1]}",
                file=sys.stderr,
                flush=True,
            )
            status = 1
        rows = [
            json.loads(line)
            for line in rows_file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    if rows:
        print(LEGEND, flush=True)
    fits = fit_all(rows) if rows else []
    if args.json:
        write_json(
            args.json,
            {
                "stage": folder.name,
                "copy_bytes_per_second": copy,
                "rows": rows,
                "skipped": skipped,
                "fits": fits,
            },
        )
    if rows:
        plot(args.plot, rows, fits, copy)
        print(f"\npicture: {os.path.relpath(args.plot)}", flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
