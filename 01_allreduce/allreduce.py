"""01: all-reduce, shown, opened up and measured.

After an all-reduce every rank holds the sum of all ranks' tensors. This is the one operation that
data parallelism stands on. Here it is shown on four small tensors, written by hand as a ring of
sends and receives, and timed beside the backend's own and one through shared memory
(shared_memory.py) for sizes from 1 MB to 1 GB. Unlike the later stages this script starts its ranks
itself (spawn.py); alpha_beta.py says what the times mean.

    make 01_allreduce                                   (draws results/01_allreduce.png, too)
    python 01_allreduce/allreduce.py                    (the same; writes only what flags name)
    python 01_allreduce/allreduce.py --demo             (only the demonstration)
    python 01_allreduce/allreduce.py --sizes-mb 1,10 --world-sizes 2          (done in seconds)

The JSON has a row per size, algorithm and world size. Its "seconds" is a flat list, one time per
call, and not nested by rank as in the later stages: all ranks wait for the slowest one in every
call, and its time alone is kept.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 2009; bandwidths as nccl-tests defines them (doc/PERFORMANCE.md); Stanford CS336, assignment 2,
"Distributed communication".
"""

import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time
import timeit
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PIECE_BYTES = 2 * 2**20  # smaller: waking threads per message shows; larger: less of it overlaps
IN_FLIGHT = 3  # receives posted ahead, each into a buffer of one piece: few, to stay in the cache


def ring_all_reduce(
    tensor: torch.Tensor, piece_bytes: int = PIECE_BYTES, in_flight: int = IN_FLIGHT
) -> None:
    """Sum a contiguous CPU tensor over all ranks, in place; for gloo.

    Any shape, length, dtype and world size. RuntimeError for a tensor that is not contiguous or
    not on the CPU, before anything is sent: the next call works. The other two arguments are for
    measuring (ring_profile.py).

    The tensor is cut into one chunk per rank. In every step each rank sends a chunk to its right
    neighbour and receives one from its left: always the chunk that it passes on in the next step.
    For the first n-1 steps what arrives is added (reduce-scatter: rank r ends up with the whole sum
    of chunk r+1), for the other n-1 steps it replaces what was there (all-gather).
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise RuntimeError("ring_all_reduce needs a contiguous CPU tensor; .contiguous() makes one")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left = (rank - 1) % world_size
    right = (rank + 1) % world_size
    flat = tensor.detach().view(-1)
    chunks = flat.tensor_split(world_size)  # lengths differ by one at most, and may be 0

    # A chunk travels in pieces: while one is added, the next arrive and the last is on its way out.
    length = piece_bytes // tensor.element_size()
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
    buffers = flat.new_empty(in_flight, min(length, len(chunks[0])))
    targets = []
    for number, piece in enumerate(incoming):
        if number < to_add:
            targets.append(buffers[number % in_flight][: len(piece)])
        else:
            targets.append(piece)

    own = len(pieces_of[rank])  # these need not wait for anything
    receives = [dist.irecv(target, left) for target in targets[:in_flight]]
    sends = [dist.isend(piece, right) for piece in outgoing[:own]]
    for number, piece in enumerate(incoming):
        receives[number].wait()  # messages of two ranks arrive in the order in which they were sent
        if number < to_add:
            piece.add_(targets[number])
        if number + in_flight < len(targets):  # into the buffer that is free now
            receives.append(dist.irecv(targets[number + in_flight], left))
        if own + number < len(outgoing):  # this very piece, now with our part in it
            sends.append(dist.isend(outgoing[own + number], right))
    for work in sends:
        work.wait()


def fit(
    sizes_bytes: list[float], seconds: list[float], world_size: int
) -> tuple[float, float, float]:
    """Fit t(S) = α + 2(n-1)/n · S/β to the times of calls of several sizes.

    Returns α in seconds, β in bytes per second, and the root mean square of the relative errors.
    Least squares of the relative errors, so that a small size counts as much as a large one; α is
    not let below 0. ValueError where there is nothing to fit: fewer than two different sizes, one
    rank, or times that do not grow.
    """
    if world_size < 2 or len(set(sizes_bytes)) < 2:
        raise ValueError("needs two ranks and two sizes")
    times = torch.tensor(seconds, dtype=torch.float64)
    traffic = 2 * (world_size - 1) / world_size * torch.tensor(sizes_bytes, dtype=torch.float64)
    # columns @ (α, 1/β) is to be 1 for every size.
    columns = torch.stack([1 / times, traffic / times], dim=1)
    target = torch.ones(len(times), 1, dtype=torch.float64)
    alpha, seconds_per_byte = torch.linalg.lstsq(columns, target).solution.flatten().tolist()
    if alpha < 0:
        alpha = 0.0
        seconds_per_byte = torch.linalg.lstsq(columns[:, 1:], target).solution.item()
    if seconds_per_byte <= 0:
        raise ValueError("the time does not grow with the size")
    errors = columns @ torch.tensor([[alpha], [seconds_per_byte]], dtype=torch.float64) - target
    return alpha, 1 / seconds_per_byte, errors.square().mean().sqrt().item()


# ==================================================================================================
# Below this line: the demonstration, the benchmark, main.

PROCESS_BYTES = 300 * 2**20  # of memory for a rank with nothing but torch in it
ROW = "{:<9} {:>5} {:>7} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6} {:>6} {:>7}"
FIGURES = ["mean, ms", "p50", "p75", "p90", "p95", "algbw", "busbw", "ratio", "#wrong"]
HEADER = ROW.format("algorithm", "ranks", "MB", "count", *FIGURES)
LEGEND = (
    "time: of the slowest rank, ms, mean and percentiles of the counted calls; count: calls that "
    "are counted + calls before them\nfor warming up, fewer of both where a call takes long; "
    "MB = 2^20 bytes, GB/s = 10^9 bytes per second; algbw = size / p50,\nbusbw = algbw · 2(n-1)/n, "
    "GB/s; ratio: busbw to the backend's own; #wrong: wrong elements, over all calls and ranks"
)


def demonstrate(device: torch.device, backend: str) -> None:
    """All-reduce one random integer tensor per rank and print all, before and after."""
    from common.setup import say

    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.randint(0, 10, (3,), generator=torch.Generator().manual_seed(rank))
    before = [torch.empty_like(tensor) for _ in range(world_size)]
    after = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(before, tensor)
    dist.all_reduce(tensor)
    dist.all_gather(after, tensor)
    if rank == 0:
        for r in range(world_size):
            say(f"rank {r}: before {before[r].tolist()}, after {after[r].tolist()}")
        if not all(torch.equal(one, sum(before)) for one in after):
            sys.exit("demonstration FAILED: not every rank holds the sum")
        say("demonstration: passed, all ranks hold the sum, bitwise equal\n")


def benchmark(
    device: torch.device,
    backend: str,
    sizes_bytes: list[int],
    steps: int,
    warmup: int,
    row_seconds: float,
    rows_file: str,
) -> None:
    """Measure every size with every algorithm.

    Rank 0 prints a row as soon as it has it, and appends it to rows_file as JSON, so that it is
    kept whatever happens next.
    """
    from alpha_beta import call_seconds
    from shared_memory import SharedMemoryAllReduce

    from common.report import percentiles

    algorithms = {backend: dist.all_reduce}
    if backend == "gloo":  # nccl would wait for ever: it runs a rank's sends and receives in turn
        algorithms |= {"ring": ring_all_reduce, "shared": SharedMemoryAllReduce()}
    latencies = {}
    for name, all_reduce in algorithms.items():
        latencies[name] = {"awake": call_seconds(all_reduce, device)}
        latencies[name]["asleep"] = call_seconds(all_reduce, device, pause=0.01)
    for size_bytes in sizes_bytes:
        tensor = torch.empty(size_bytes // 4, device=device)
        samples, warmups, wrong = measure(algorithms, tensor, steps, warmup, row_seconds)
        if dist.get_rank() != 0:
            continue
        p50_of_backend = percentiles(samples[backend])[0]
        for name, seconds in samples.items():
            row = {"algorithm": name, "world_size": dist.get_world_size()}
            row |= {"threads_per_rank": torch.get_num_threads(), "size_bytes": size_bytes}
            row |= {"warmup": warmups, "seconds": seconds}
            row |= {"mean": sum(seconds) / len(seconds), "p50": percentiles(seconds)[0]}
            row |= {"wrong": wrong[name], **latencies[name]}
            with open(rows_file, "a") as file:
                file.write(json.dumps(row) + "\n")
            print_row(row, p50_of_backend)


def print_row(row: dict, p50_of_backend: float) -> None:
    """A line of the table: one size with one algorithm."""
    from common.report import percentiles
    from common.setup import say

    size, n = row["size_bytes"], row["world_size"]
    algbw = size / row["p50"] / 1e9
    cells = [row["algorithm"], n, f"{size / 2**20:g}", f"{len(row['seconds'])}+{row['warmup']}"]
    cells += [f"{1000 * time:.2f}" for time in [row["mean"], *percentiles(row["seconds"])]]
    cells += [f"{algbw:.2f}", f"{algbw * 2 * (n - 1) / n:.2f}"]
    cells += [f"{p50_of_backend / row['p50']:.2f}", row["wrong"]]
    say(ROW.format(*cells))


def measure(
    algorithms: dict, tensor: torch.Tensor, steps: int, warmup: int, row_seconds: float
) -> tuple[dict, int, dict]:
    """Call the algorithms in turn (A B A B …), so that noise meets them alike, and check each call.

    Calls that together would take longer than row_seconds are left out, warm-ups and counted ones
    in proportion; four calls stay. Returns {algorithm: seconds of the slowest rank per counted
    call}, the number of warm-ups, {algorithm: wrong elements}.
    """
    from common.setup import progress
    from common.timing import Stopwatch

    rank, world_size = dist.get_rank(), dist.get_world_size()
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
        each = (time.perf_counter() - began) / max(1, done)
        left = f", {each * (calls - done):.0f} s left" if done else ""
        for name, all_reduce in algorithms.items():
            where = f"{world_size} ranks, {tensor.nbytes / 2**20:g} MB"
            progress(f"{where}: call {done + 1} of {math.ceil(calls)}{left}: {name}")
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
            longest = max(first for (first,) in seconds.values())
            calls = min(calls, max(4, row_seconds / longest))
    warmups = min(done - 1, math.ceil(done * warmup / (warmup + steps)))
    for name in algorithms:
        total = torch.tensor(wrong[name], device=tensor.device)
        dist.all_reduce(total)
        wrong[name] = total.item()
        seconds[name] = seconds[name][warmups:]
    return seconds, warmups, wrong


def why_not(backend: str, world_size: int, size_bytes: int) -> str | None:
    """Why this machine cannot run this combination; None if it can."""
    needed = size_bytes + PROCESS_BYTES
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < world_size:
        return f"needs {world_size} GPUs, and torch finds {gpus}"
    if backend == "gloo":
        needed *= world_size
        free = free_memory()
    else:  # the ranks of gloo-cuda share the GPUs, and nccl's have one each
        needed *= math.ceil(world_size / gpus)
        free = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(min(gpus, world_size)))
    if needed <= free:
        return None
    return f"needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free"


def free_memory() -> int:
    """Bytes that processes can still have: what Linux calls available, elsewhere all there is."""
    system = Path("/proc/meminfo")
    if system.exists():
        for line in system.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def copy_bandwidth() -> float:
    """Bytes per second at which one process, with all its threads, copies 256 MB: best of ten."""
    source, target = torch.ones(2, 2**26)
    return source.nbytes / min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=10))


def grid_of(args, has_gpu: bool) -> list[tuple[str, int]]:
    """Every backend with every world size; with a GPU gloo on it and one rank of nccl, too."""
    grid = list(itertools.product(args.backends, args.world_sizes))
    if has_gpu and "gloo" in args.backends:
        grid += itertools.product(["gloo-cuda"], args.world_sizes)
    if has_gpu and "nccl" in args.backends and ("nccl", 1) not in grid:
        grid.append(("nccl", 1))  # what a call costs where nothing has to be sent
    return grid


def run_grid(args, folder: str, rows_file: Path, skipped: list[dict]) -> None:
    """Measure every backend with every world size; what this machine cannot run goes to skipped."""
    from spawn import run_ranks

    from common import setup
    from common.setup import progress, say

    sizes = sizes_in_bytes(args.sizes_mb, setup)
    calls = (args.steps, args.warmup, args.row_seconds)
    for backend, world_size in grid_of(args, torch.cuda.is_available()):
        possible = []
        sizes_of_reason = {}
        for size in sizes:
            reason = why_not(backend, world_size, size)
            if reason is None:
                possible.append(size)
            else:
                sizes_of_reason.setdefault(reason, []).append(size)
        if possible:
            progress(f"{backend}: {world_size} ranks are started")
            run_ranks(world_size, folder, benchmark, backend, possible, *calls, str(rows_file))
        for reason, those in sizes_of_reason.items():
            one = {"algorithm": backend, "world_size": world_size}
            skipped.append(one | {"sizes_bytes": those, "reason": reason})
            names = ",".join(f"{size / 2**20:g}" for size in those)
            say(f"{backend:<9} {world_size:>5} {names:>7}   not run: {reason}")


def list_of(convert):
    """A type for argparse: words between commas, each converted."""
    return lambda text: [convert(word) for word in text.split(",")]


def sizes_in_bytes(sizes_mb: list[float], setup) -> list[int]:
    """The sizes of --sizes-mb in whole float32s."""
    for size in sizes_mb:
        if not 4 <= size * 2**20 < 2**60:
            limits = "is less than one float32, or more than any machine has"
            setup.fail(f"argument --sizes-mb: {size:g} MB {limits}")
    return [int(size * 2**18) * 4 for size in sizes_mb]


def read_arguments(setup):
    """The command line, checked."""
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    whole_number, positive_number = setup.whole_number, setup.positive_number
    add("--demo", action="store_true", help="only the demonstration")
    add("--backends", type=list_of(str), default="gloo,nccl", help="of them what there is here")
    add("--sizes-mb", type=list_of(positive_number), default="1,10,100,1000")
    add("--world-sizes", type=list_of(whole_number(1)), default="2,4,6", help="numbers of ranks")
    add("--steps", type=whole_number(1), default=20, old_names=["--iters"], help="measured calls")
    add("--warmup", type=whole_number(0), default=5, help="calls before them, not measured")
    fewer = "fewer calls where all would take longer than this; inf: always all"
    add("--row-seconds", type=positive_number, default=6.0, help=fewer)
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    add("--plot", type=setup.output_file, metavar="FILE", help="bandwidths and times, a PNG")
    args = parser.parse_args()
    for name in ("json", "plot"):
        if args.demo and getattr(args, name):
            setup.fail(f"argument --{name}: not with --demo, which measures nothing")
    for name in args.backends:
        if name not in ("gloo", "nccl"):
            setup.fail(f"argument --backends: {name!r} is neither gloo nor nccl")
    sizes_in_bytes(args.sizes_mb, setup)
    return args


def begin(stage: str, args) -> dict:
    """The head of the JSON, with the keys of report.begin, which needs a process group.

    Backends, their devices and world sizes are lists; how many threads a rank has is in its rows.
    """
    from common import report

    names = {"cpu": report.processor_name(), "cuda": None}
    if torch.cuda.is_available():
        names["cuda"] = torch.cuda.get_device_name()
    devices = ["cuda" if backend == "nccl" else "cpu" for backend in args.backends]
    result = {"stage": stage, "torch": torch.__version__, "backend": args.backends}
    result |= {"device": devices, "device_name": [names[device] for device in devices]}
    result |= {"world_size": args.world_sizes, "threads_per_rank": None}
    return result | {"options": dict(vars(args)), "started": datetime.now(timezone.utc)}


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from alpha_beta import draw, fit_all
        from spawn import run_ranks

        from common import report, setup
    except ModuleNotFoundError as error:
        beside = (
            "copy the repository's folder common/, alpha_beta.py and spawn.py beside this script"
        )
        sys.exit(f"error: {error}: {beside}")

    args = read_arguments(setup)
    result = begin(folder.name, args)
    result |= {"copy_bytes_per_second": None, "rows": [], "skipped": []}
    status = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    with tempfile.TemporaryDirectory() as temporary:
        rows_file = Path(temporary, "rows")
        rows_file.touch()
        try:
            setup.progress("demonstration: 4 ranks are started")
            run_ranks(4, temporary, demonstrate, "gloo")
            if args.demo:
                return
            setup.progress("memory copy")
            copy = result["copy_bytes_per_second"] = copy_bandwidth()
            cores = f"{setup.threads_per_rank(1)} cores shared by the ranks"
            where = f"{cores}, memory copy {copy / 1e9:.2f} GB/s"
            backends, sizes = ",".join(args.backends), ",".join(map(str, args.world_sizes))
            setup.say(f"{folder.name}: torch {torch.__version__}, {backends} with {sizes} ranks")
            setup.say(where)
            setup.say(HEADER)
            run_grid(args, temporary, rows_file, result["skipped"])
        except KeyboardInterrupt:
            setup.say("interrupted: what is measured so far follows")
            status = 130
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            reason = str(error).strip().splitlines()[-1]
            message = f"allreduce.py: error: a rank ended: {reason}"
            setup.progress()
            print(message, file=sys.stderr, flush=True)
            status = 1
        for line in rows_file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may have been cut off
                result["rows"].append(json.loads(line))

    rows = result["rows"]
    result["fits"] = []
    if rows:
        setup.say(LEGEND)
        result["fits"] = fit_all(rows, fit)
    report.write_json(args.json, result)
    if rows and args.plot:
        draw(args.plot, rows, result["fits"], result["copy_bytes_per_second"])
    sys.exit(status)


if __name__ == "__main__":
    main()
