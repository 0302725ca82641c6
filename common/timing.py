"""A stopwatch for CPU and CUDA, and the loop that measures candidates side by side."""

import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from common.network import wire
from common.setup import progress, say

NO_COMMUNICATION = "no communication"  # the row of a step that sends nothing
MOST_DRIFT = 1.5  # of the machine's speed while it measures


def torch_ddp(args) -> dict[str, Callable]:
    """Return torch's own, by name, with buckets of the same size as ours."""
    options = {"bucket_cap_mb": args.bucket_size_mb, "gradient_as_bucket_view": True}
    return {"torch DDP": partial(DistributedDataParallel, **options)}


class Stopwatch:
    """Named points in time: `perf_counter` on CPU, CUDA events on a GPU, which wait for nothing."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.marks = {}

    def mark(self, name: str) -> None:
        """Remember the time now under this name; a second mark of the same name replaces it."""
        self.marks[name] = time.perf_counter()
        if self.on_cuda:
            self.marks[name] = torch.cuda.Event(enable_timing=True)
            self.marks[name].record()

    @contextmanager
    def phase(self, name: str):
        """Mark its start and its end; torch's profiler shows it under this name."""
        self.mark(f"{name} starts")
        with torch.profiler.record_function(name):
            yield
        self.mark(f"{name} ends")

    def mark_last_gradient(self, parameter: torch.nn.Parameter) -> None:
        """Mark when this one's gradient is there: with the first layer's all are."""
        parameter.register_post_accumulate_grad_hook(lambda _: self.mark("last gradient"))

    def times(self) -> dict[str, float]:
        """Return the seconds of a step with the phases forward, backward, sync and optimizer.

        Exposed communication: from the last gradient until all are averaged.
        """
        last = "last gradient" if "last gradient" in self.marks else "backward ends"
        return {
            "step_seconds": self.seconds("forward starts", "optimizer ends"),
            "exposed_comm_seconds": self.seconds(last, "sync ends"),
            "optimizer_seconds": self.seconds("optimizer starts", "optimizer ends"),
        }

    def seconds(self, start: str, end: str) -> float:
        """Return the seconds from one mark to another; on an emulated network, its own seconds.

        On CUDA it waits until the second mark has been reached.
        """
        if self.on_cuda:
            self.marks[end].synchronize()
            return self.marks[start].elapsed_time(self.marks[end]) / 1000
        return (self.marks[end] - self.marks[start]) / wire.stretch


def measure(candidates: dict[str, Callable[[], dict]], steps: int, warmup: int) -> dict[str, dict]:
    """Run the candidates step by step in turn (A B C A B C …): noise then meets them all alike.

    A candidate runs one step, after a barrier, and returns its times, {quantity: seconds}; or None
    on a rank that has no part in it. An emulated network is slow meanwhile, and keeps pace with
    the steps of `no communication`.
    Returns {candidate: {quantity: [rank][step]}}, on every rank, without the first `warmup` rounds.
    """
    local = {name: [] for name in candidates}
    for i in range(warmup + steps):
        for name, step in candidates.items():
            progress(f"step {i + 1} of {warmup + steps}: {name}")
            dist.barrier()
            launched = wire.network and dist.group.WORLD.collectives
            with wire:
                times = step()
            local[name].append(times)
            if wire.network and times is not None:
                times["collectives"] = dist.group.WORLD.collectives - launched
                times["stretch"] = wire.stretch
            # Only a step that sends nothing tells how fast this machine is.
            if wire.pace and name == NO_COMMUNICATION:
                wire.keep_pace(times["step_seconds"] * wire.stretch)
    all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, local)
    samples = {}
    for name in candidates:
        of_ranks = [of_rank[name] for of_rank in all_ranks if of_rank[name][0] is not None]
        counted = [steps_of_rank[warmup:] for steps_of_rank in of_ranks]
        samples[name] = {
            quantity: [[times[quantity] for times in of_rank] for of_rank in counted]
            for quantity in counted[0][0]
        }
    return samples


def pace_of(args) -> float:
    """Return --pace, or by default 0.4 s for `mini` with its own batch and dtype, and else 0."""
    if args.pace is not None:
        return args.pace
    is_mini = args.size == "mini" and args.dtype == "float32"
    return 0.4 if is_mini and not (args.batch_size or args.context_length) else 0.0


def keep_pace(candidates: dict[str, Callable[[], dict]], args) -> None:
    """Let an emulated network follow the speed of this machine, and say how fast that is now.

    A step of `no communication` counts as `pace_of(args)` seconds; with 0 the stretch stays.
    """
    pace = pace_of(args)
    if not wire.network:
        return
    if pace == 0 or NO_COMMUNICATION not in candidates:
        say(f"No pace: a second of the network takes {wire.stretch:g} s here")
        return
    wire.pace = pace
    measure({NO_COMMUNICATION: candidates[NO_COMMUNICATION]}, steps=4, warmup=0)
    if wire.stretch < 1 and calls_cost_more():
        wire.least_stretch = wire.stretch = 1.0
        say(
            f"No pace: this machine is so fast that at {pace:g} s for a step calls would cost over "
            "15 % more than requested"
        )
        return
    say(
        f"One pace: a step of {args.size} without communication counts as {pace:g} s; here it takes"
        f" {wire.stretch * pace:.2f} s, so a second of the network takes {wire.stretch:.2f} s"
    )


def calls_cost_more() -> bool:
    """Tell whether a small call costs over 1.15 times what was requested, in the network's time."""
    world_size = dist.get_world_size()
    requested = sum(wire.cost("allreduce", 4096, world_size)) / wire.stretch
    return all_reduce_costs(torch.device("cpu"))["call_seconds"] > 1.15 * requested


def all_reduce_costs(device: torch.device) -> dict[str, float]:
    """Measure what all-reduces cost back to back: each takes "call_seconds" + bytes / w.

    "bytes_per_second" is w. Both come from small (4 kB) and large (8 MB) ones in turn.
    """
    watch = Stopwatch(device)

    def all_reduces(count: int, tensor: torch.Tensor) -> dict[str, float]:
        watch.mark("start")
        for _ in range(count):
            dist.all_reduce(tensor)
        watch.mark("end")
        return {"seconds": watch.seconds("start", "end") / count}

    small, large = torch.zeros(2**10, device=device), torch.zeros(2**21, device=device)
    candidates = {"small": partial(all_reduces, 10, small), "large": partial(all_reduces, 1, large)}
    samples = measure(candidates, steps=7, warmup=2)
    call = numpy.median(samples["small"]["seconds"])
    transfer = numpy.median(samples["large"]["seconds"]) - call
    return {"call_seconds": call, "bytes_per_second": large.nbytes / max(transfer, 1e-9)}


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that start within it: it sees every operator that torch runs.

    An emulated network, written in Python, runs none of these, and counts by itself.
    """

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace in ("c10d", "_c10d_functional"):
            self.count += "wait" not in operator.name()
        return operator(*args, **(kwargs or {}))


def profile(candidates: dict[str, Callable[[], object]], trace: Path | None) -> None:
    """Write a Chrome trace of rank 0, if there is a path: three more steps of each, by its name."""
    if trace is None:
        return
    # acc_events: torch 2.12 warns that a profiler without it forgets earlier cycles.
    with torch.profiler.profile(acc_events=True) as profiler:
        for name, step in candidates.items():
            for _ in range(3):
                dist.barrier()
                with torch.profiler.record_function(name), wire:
                    step()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(trace))
        say(f"written: {trace}")


def count_collectives(step: Callable[[], object]) -> int:
    """Return how many collectives one more step makes."""
    step()  # in its second step torch DDP arranges its buckets anew, with two broadcasts
    with CollectiveCounter() as counter:
        step()
    return counter.count


def benchmark(candidates: dict[str, Callable[[], dict]], args, device: torch.device) -> dict:
    """Measure candidates, as `measure` has them: "all_reduce" and "candidates" of the JSON."""
    keep_pace(candidates, args)
    costs = all_reduce_costs(device)
    samples = measure(candidates, args.steps, args.warmup)
    measured = []
    for name, of_candidate in samples.items():
        if wire.network:
            calls = of_candidate.pop("collectives")[0][-1]
        else:
            calls = count_collectives(candidates[name])
        measured.append({"name": name, **of_candidate, "collectives_per_step": calls})
    warn_of_drift(samples)
    return {"all_reduce": costs, "candidates": measured}


def warn_of_drift(samples: dict[str, dict]) -> None:
    """Say so if the machine's speed has changed by too much while these were measured."""
    low, high = drift(samples.values())
    if high > MOST_DRIFT * low:
        say(
            f"warning: a second of the network took {low:.2f} to {high:.2f} s here: leave the "
            "machine alone, and run again"
        )


def drift(candidates: Iterable[dict]) -> tuple[float, float]:
    """Return the lowest and the highest stretch under which these were measured; 1 without one."""
    of_ranks = [rank for one in candidates for rank in one.get("stretch", [])]
    stretches = [stretch for rank in of_ranks for stretch in rank] or [1.0]
    return min(stretches), max(stretches)
