"""01: all-reduce, shown, opened up and measured.

After an all-reduce every rank holds the sum of all ranks' tensors. This is the one operation that
data parallelism stands on. Here it is shown on four small tensors, written by hand as a ring, once
plain and once in pieces, and timed beside the backend's own for sizes from 1 MB to 1 GB. Unlike the
later stages this script starts its ranks itself (spawn.py); alpha_beta.py says what the times mean.

    make 01_allreduce                       (all sizes, 2, 4 and 6 ranks: about four minutes)
    make 01_allreduce NPROC=4               (only 4 ranks)
    python 01_allreduce/allreduce.py --demo                             (only the demonstration)
    python 01_allreduce/allreduce.py --sizes-mb 1,10 --nproc 2          (done in seconds)

The picture goes to results/01_allreduce.png. The JSON has a row per size, algorithm and world size.
Its "seconds" is a flat list, one time per call, and not nested by rank as in the later stages: all
ranks wait for the slowest one in every call, and its time alone is kept.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009; bandwidths as nccl-tests defines them (doc/PERFORMANCE.md); Stanford CS336, assignment 2,
"Distributed communication".
"""

import itertools
import json
import math
import signal
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist


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
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    left = (rank - 1) % world_size
    right = (rank + 1) % world_size
    flat = tensor.detach().view(-1)
    chunks = flat.tensor_split(world_size)
    length = PIECE_BYTES // tensor.element_size()
    pieces_of = []
    for chunk in chunks:
        pieces_of.append([chunk[i : i + length] for i in range(0, len(chunk), length)])
    incoming = []
    outgoing = []
    to_add = 0  # so many pieces that arrive are added, the later ones replace
    for step in range(2 * (world_size - 1)):
        incoming += pieces_of[(rank - 1 - step) % world_size]
        outgoing += pieces_of[(rank - step) % world_size]  # what came in the step before
        if step < world_size - 1:
            to_add = len(incoming)

    # A piece is received beside the tensor if it is to be added; else in its own place, which is
    # free by then, because what was there left this rank long ago, or its sum would not be back.
    buffers = flat.new_empty(IN_FLIGHT, min(length, len(chunks[0])))
    targets = []
    for number, piece in enumerate(incoming):
        if number < to_add:
            targets.append(buffers[number % IN_FLIGHT][: len(piece)])
        else:
            targets.append(piece)

    own = len(pieces_of[rank])  # these need not wait for anything
    receives = [dist.irecv(target, left) for target in targets[:IN_FLIGHT]]
    sends = [dist.isend(piece, right) for piece in outgoing[:own]]
    for number, piece in enumerate(incoming):
        receives[number].wait()  # messages of two ranks arrive in the order in which they were sent
        if number < to_add:
            piece.add_(targets[number])
        if number + IN_FLIGHT < len(targets):  # into the buffer that is free now
            receives.append(dist.irecv(targets[number + IN_FLIGHT], left))
        if own + number < len(outgoing):  # this very piece, now with our part in it
            sends.append(dist.isend(outgoing[own + number], right))
    for work in sends:
        work.wait()


# ==================================================================================================
# Below this line: the demonstration, the benchmark, main.

RINGS = {"plain ring": plain_ring_all_reduce, "ring": ring_all_reduce}
ROW_SECONDS = 6.0  # where all calls of a row would take longer, fewer are made
HEADER = ["algorithm", "ranks", "MB", "count", "mean, ms", "p50", "p75", "p90", "p95"]
HEADER += ["algbw", "busbw", "ratio", "#wrong"]
WIDTHS = [10, 5, 6, 5, 8, 7, 7, 7, 7, 5, 5, 5, 6]
LEGEND = (
    "time: of the slowest rank, ms, mean and percentiles of the counted calls; count: calls that "
    "are counted + calls before them\nfor warming up, fewer of both where a call takes long; "
    "MB = 2^20 bytes, GB/s = 10^9 bytes per second; algbw = size / p50,\nbusbw = algbw · 2(n-1)/n, "
    "GB/s; ratio: busbw to the backend's own; #wrong: wrong elements, over all calls and ranks"
)


def check_tensor(tensor: torch.Tensor) -> None:
    """RuntimeError for what the rings cannot sum, before anything is sent: the next call works."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise RuntimeError("the ring needs a contiguous CPU tensor; .contiguous() makes one")


def demonstrate(device: torch.device, backend: str, all_reduce: Callable = dist.all_reduce) -> None:
    """All-reduce one random integer tensor per rank and print all, before and after."""
    from common.setup import say

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    tensor = torch.randint(0, 10, (3,), generator=torch.Generator().manual_seed(rank))
    before = [torch.empty_like(tensor) for _ in range(world_size)]
    after = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(before, tensor)
    all_reduce(tensor)
    dist.all_gather(after, tensor)
    if rank == 0:
        for other in range(world_size):
            say(f"rank {other}: before {before[other].tolist()}, after {after[other].tolist()}")
        if not all(torch.equal(result, sum(before)) for result in after):
            sys.exit("demonstration FAILED: not every rank holds the sum")
        say("demonstration: passed, all ranks hold the sum, bitwise equal\n")


def differing_sums(
    all_reduce: Callable, lengths: list[int], dtypes: list[torch.dtype]
) -> list[tuple]:
    """Those (length, dtype) whose sum is not bitwise torch's: of integers, exact in any order."""
    differing = []
    for dtype in dtypes:
        for length in lengths:
            numbers = torch.Generator().manual_seed(1000 * length + dist.get_rank())
            tensor = torch.randint(0, 10, (length,), generator=numbers).to(dtype)
            expected = tensor.clone()
            all_reduce(tensor)
            dist.all_reduce(expected)
            if not torch.equal(tensor, expected):
                differing.append((length, dtype))
    return differing


def benchmark(
    device: torch.device,
    backend: str,
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
    from alpha_beta import call_seconds

    from common.report import percentiles

    algorithms = {backend: dist.all_reduce}
    if backend == "gloo":  # nccl, as far as we know, would wait: it runs sends and receives in turn
        algorithms |= others
    latencies = {}
    for name, all_reduce in algorithms.items():
        awake = call_seconds(all_reduce, device)
        asleep = call_seconds(all_reduce, device, pause=0.01)
        latencies[name] = {"awake": awake, "asleep": asleep}
    for size_bytes in sizes_bytes:
        tensor = torch.empty(size_bytes // 4, device=device)
        samples, warmups, wrong = measure(algorithms, tensor, steps, warmup)
        if dist.get_rank() != 0:
            continue
        p50_of_backend = percentiles(samples[backend])[0]
        for name, seconds in samples.items():
            row = {
                "algorithm": name,
                "world_size": dist.get_world_size(),
                "threads_per_rank": torch.get_num_threads(),
                "size_bytes": size_bytes,
                "warmup": warmups,
                "seconds": seconds,
                "mean": sum(seconds) / len(seconds),
                "p50": percentiles(seconds)[0],
                "wrong": wrong[name],
                **latencies[name],
            }
            with open(rows_file, "a") as file:
                file.write(json.dumps(row) + "\n")
            print_measured(row, p50_of_backend)


def print_measured(row: dict, p50_of_backend: float) -> None:
    """A line of the table: one size with one algorithm."""
    from common.report import percentiles, print_row

    size = row["size_bytes"]
    world_size = row["world_size"]
    algbw = size / row["p50"] / 1e9
    busbw = algbw * 2 * (world_size - 1) / world_size
    cells = [row["algorithm"], str(world_size), f"{size / 2**20:g}"]
    cells.append(f"{len(row['seconds'])}+{row['warmup']}")
    for seconds in [row["mean"], *percentiles(row["seconds"])]:
        cells.append(f"{1000 * seconds:.2f}")
    cells += [f"{algbw:.2f}", f"{busbw:.2f}", f"{p50_of_backend / row['p50']:.2f}"]
    cells.append(str(row["wrong"]))
    print_row(cells, WIDTHS)


def measure(
    algorithms: dict[str, Callable], tensor: torch.Tensor, steps: int, warmup: int
) -> tuple[dict, int, dict]:
    """Call the algorithms in turn (A B A B …), so that noise meets them alike, and check each call.

    Calls that together would take longer than ROW_SECONDS are left out, warm-ups and counted ones
    in proportion; four calls stay. Returns {algorithm: seconds of the slowest rank per counted
    call}, the number of warm-ups, {algorithm: wrong elements}.
    """
    from common.setup import progress, time_left
    from common.timing import Stopwatch

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    # Small integers, of which every sum is exact. The period of the numbers is a prime, so that no
    # chunk looks like another one.
    pattern = torch.arange(1_000_003, device=tensor.device).remainder(1021).float()
    expected = world_size * pattern + world_size * (world_size - 1) / 2
    parts = tensor.split(len(pattern))
    watch = Stopwatch(tensor.device)
    seconds = {name: [] for name in algorithms}
    wrong = {name: 0 for name in algorithms}
    calls = warmup + steps
    done = 0
    began = time.perf_counter()
    while done < calls:
        left = time_left(began, done, calls)
        for name, all_reduce in algorithms.items():
            where = f"{world_size} ranks, {tensor.nbytes / 2**20:g} MB"
            progress(f"{where}: call {done + 1} of {calls}{left}: {name}")
            for part in parts:
                torch.add(pattern[: len(part)], rank, out=part)
            dist.barrier()
            watch.mark("start")
            all_reduce(tensor)
            watch.mark("end")
            mine = watch.seconds("start", "end")
            slowest = torch.tensor(mine, dtype=torch.float64, device=tensor.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.item())
            for part in parts:
                wrong[name] += (part != expected[: len(part)]).sum().item()
        done += 1
        if done == 1:  # all ranks agree on every time, so they agree on the number of calls
            longest = max(times[0] for times in seconds.values())
            calls = min(calls, max(4, math.ceil(ROW_SECONDS / longest)))
    warmups = min(done - 1, math.ceil(done * warmup / (warmup + steps)))
    for name in algorithms:
        total = torch.tensor(wrong[name], device=tensor.device)
        dist.all_reduce(total)
        wrong[name] = total.item()
        seconds[name] = seconds[name][warmups:]
    return seconds, warmups, wrong


def why_not(backend: str, world_size: int, size_bytes: int) -> str | None:
    """Why this machine cannot run this combination; None if it can."""
    from common.setup import TORCH_BYTES, available_memory

    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < world_size:
        return f"needs {world_size} GPUs, and torch finds {gpus}"
    needed = world_size * (size_bytes + TORCH_BYTES)
    free = available_memory()
    if backend == "gloo" and needed > free:
        return f"needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free"
    return None


def copy_bandwidth() -> float:
    """Bytes per second at which one process, with all its threads, copies 256 MB: best of ten."""
    source, target = torch.ones(2, 2**26)
    times = timeit.repeat(lambda: target.copy_(source), number=1, repeat=10)
    return source.nbytes / min(times)


def grid_of(args, has_gpu: bool) -> list[tuple[str, int]]:
    """Every backend with every world size; with a GPU gloo on it and one rank of nccl, too.

    Of them those on --device, if that names one.
    """
    grid = list(itertools.product(args.backends, args.world_sizes))
    if has_gpu and "gloo" in args.backends:
        grid += itertools.product(["gloo-cuda"], args.world_sizes)
    if has_gpu and "nccl" in args.backends and ("nccl", 1) not in grid:
        grid.append(("nccl", 1))  # what a call costs where nothing has to be sent
    devices = {"gloo": "cpu", "gloo-cuda": "cuda", "nccl": "cuda"}
    return [place for place in grid if args.device in ("auto", devices[place[0]])]


def run_grid(args, result: dict, ranks_measure: Callable, rows_file: Path) -> None:
    """Measure every backend with every world size, and say what this machine cannot run."""
    from spawn import run_ranks

    from common.report import print_row
    from common.setup import progress, say, threads_per_rank

    backends = ",".join(args.backends)
    world_sizes = ",".join(map(str, args.world_sizes))
    copy = result["copy_bytes_per_second"] / 1e9
    say(f"{result['stage']}: torch {torch.__version__}, {backends} with {world_sizes} ranks")
    say(f"{threads_per_rank(1)} cores shared by the ranks, memory copy {copy:.2f} GB/s")
    print_row(HEADER, WIDTHS)
    for backend, world_size in grid_of(args, torch.cuda.is_available()):
        possible = []
        sizes_of_reason = {}
        for size in sizes_in_bytes(args.sizes_mb):
            reason = why_not(backend, world_size, size)
            if reason is None:
                possible.append(size)
            else:
                sizes_of_reason.setdefault(reason, []).append(size)
        if possible:
            progress(f"{backend}: {world_size} ranks are started")
            options = (possible, args.steps, args.warmup, str(rows_file))
            run_ranks(world_size, ranks_measure, backend, *options)
        for reason, sizes in sizes_of_reason.items():
            names = ",".join(f"{size / 2**20:g}" for size in sizes)
            cells = [backend, str(world_size), names, f"not run: {reason}"]
            print_row(cells, [*WIDTHS[:3], 0])


def sizes_in_bytes(sizes_mb: list[float]) -> list[int]:
    """The sizes of --sizes-mb in whole float32s."""
    return [int(size * 2**18) * 4 for size in sizes_mb]


def add_grid_arguments(parser, sizes_mb: str) -> None:
    """Sizes, numbers of ranks and calls; `sizes_mb` is the default of --sizes-mb."""
    from common.setup import checked, list_of, whole_number

    def is_possible(megabytes: float) -> bool:
        return 2**-18 <= megabytes < 2**40

    size = checked(float, is_possible, "a size in MB, of one float32 at least")
    numbers = list_of(whole_number(1))
    add = parser.add_argument
    add("--sizes-mb", type=list_of(size), default=sizes_mb, old_names=["--tensor_size_mb"])
    ranks = {"dest": "world_sizes", "default": "2,4,6", "help": "numbers of ranks"}
    add("--nproc", type=numbers, **ranks, old_names=["--world_size"])
    add("--steps", type=whole_number(1), default=20, old_names=["--iters"], help="measured calls")
    add("--warmup", type=whole_number(0), default=5, help="calls before them, not measured")


def read_arguments(description: str, picture: str):
    """The command line, checked; `picture` is the file's name if no --plot names another."""
    from common import setup

    backend = setup.checked(str, lambda name: name in ("gloo", "nccl"), "gloo or nccl")
    backends = {"type": setup.list_of(backend), "default": "gloo,nccl"}
    parser = setup.Parser(description)
    add = parser.add_argument
    add("--demo", action="store_true", help="measure nothing")
    add("--backends", **backends, help="of them what is here", old_names=["--backend"])
    devices = ["auto", "cpu", "cuda"]
    add("--device", choices=devices, default="auto", help="of the tensors; auto: all that is here")
    add_grid_arguments(parser, "1,10,100,1000")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_plot_arguments(parser, picture)
    args = parser.parse_args()
    if not grid_of(args, torch.cuda.is_available()):
        without = f"leaves nothing of --backends {','.join(args.backends)}"
        parser.error(f"argument --device: '{args.device}' {without}; allowed are auto, cpu, cuda")
    return args


def begin(stage: str, args) -> dict:
    """The head of the JSON, with the keys of report.begin, which needs a process group.

    Backends, their devices and world sizes are lists; how many threads a rank has is in its rows.
    """
    from common import report

    devices = {"gloo": "cpu", "nccl": "cuda"}
    names = {"gloo": report.processor_name(), "nccl": None}
    if torch.cuda.is_available():
        names["nccl"] = torch.cuda.get_device_name()
    return {
        "stage": stage,
        "torch": torch.__version__,
        "backend": args.backends,
        "device": [devices[backend] for backend in args.backends],
        "device_name": [names[backend] for backend in args.backends],
        "world_size": args.world_sizes,
        "threads_per_rank": None,
        "options": dict(vars(args)),
        "started": datetime.now(timezone.utc),
    }


def run(args, stage: str, ranks_show: Callable, ranks_measure: Callable) -> None:
    """All of a run: four ranks show it, the grid is measured, tables and files say what came out.

    What is measured before Ctrl-C or the end of a rank is kept.
    """
    from alpha_beta import draw, fit_all
    from spawn import run_ranks

    from common import report, setup

    result = begin(stage, args)
    result |= {"copy_bytes_per_second": None, "rows": [], "fits": []}
    status = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    with tempfile.TemporaryDirectory() as temporary:
        rows_file = Path(temporary, "rows")
        rows_file.touch()
        try:
            setup.progress("demonstration: 4 ranks are started")
            run_ranks(4, ranks_show, "gloo")
            if not args.demo:
                result["copy_bytes_per_second"] = copy_bandwidth()
                run_grid(args, result, ranks_measure, rows_file)
        except KeyboardInterrupt:
            setup.say("interrupted: what is measured so far follows")
            status = 130
        except RuntimeError as error:
            setup.progress()
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
            status = 1
        for line in rows_file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may have been cut off
                result["rows"].append(json.loads(line))

    rows = result["rows"]
    if rows:
        setup.say(LEGEND)
        result["fits"] = fit_all(rows)
    report.write_json(args.json, result)
    if rows and args.plot:
        draw(args.plot, rows, result["fits"], result["copy_bytes_per_second"])
    sys.exit(status)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import alpha_beta  # noqa: F401
        import spawn  # noqa: F401

        import common.setup  # noqa: F401
    except ModuleNotFoundError as error:
        files = "the repository's folder common/, alpha_beta.py and spawn.py"
        sys.exit(f"error: {error}: copy {files} beside this script")

    run(read_arguments(__doc__, "01_allreduce.png"), folder.name, demonstrate, benchmark)


if __name__ == "__main__":
    main()
