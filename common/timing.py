"""A stopwatch for CPU and CUDA, and the loop that measures candidates side by side."""

import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from common.setup import progress, say, wire


def torch_ddp(args) -> dict[str, Callable]:
    """torch's own, by name, with buckets of the same size as ours."""
    size = min(args.bucket_size_mb, 1e6)  # torch cannot have infinite ones
    return {"torch DDP": partial(DistributedDataParallel, bucket_cap_mb=size)}


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
        """Of a step with the phases forward, backward, sync and optimizer, as the JSON has them.

        Exposed communication: from the last gradient until all are averaged.
        """
        last = "last gradient" if "last gradient" in self.marks else "backward ends"
        return {
            "step_seconds": self.seconds("forward starts", "optimizer ends"),
            "exposed_comm_seconds": self.seconds(last, "sync ends"),
            "optimizer_seconds": self.seconds("optimizer starts", "optimizer ends"),
        }

    def seconds(self, start: str, end: str) -> float:
        """Seconds from one mark to another. On CUDA waits until the second has been reached."""
        if self.on_cuda:
            self.marks[end].synchronize()
            return self.marks[start].elapsed_time(self.marks[end]) / 1000
        return self.marks[end] - self.marks[start]


def measure(
    candidates: dict[str, Callable[[], dict]], steps: int, warmup: int, wire=None
) -> dict[str, dict]:
    """Run the candidates step by step in turn (A B C A B C …): noise then meets them all alike.

    A candidate runs one step, after a barrier, and returns its times, {quantity: seconds}; or None
    on a rank that has no part in it. With the `wire` of an emulated network calls are slow
    meanwhile. Returns {candidate: {quantity: [rank][step]}}, on every rank, without the first
    `warmup` rounds.
    """
    local = {name: [] for name in candidates}
    with wire or nullcontext():
        for i in range(warmup + steps):
            for name, step in candidates.items():
                progress(f"step {i + 1} of {warmup + steps}: {name}")
                dist.barrier()
                local[name].append(step())
    all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, local)
    samples = {}
    for name in candidates:
        steps_of_ranks = [rank[name][warmup:] for rank in all_ranks if rank[name][0] is not None]
        samples[name] = {
            quantity: [[times[quantity] for times in steps] for steps in steps_of_ranks]
            for quantity in steps_of_ranks[0][0]
        }
    return samples


def all_reduce_costs(device: torch.device, wire=None) -> dict[str, float]:
    """What all-reduces cost alone, one after another: each `call_seconds` + bytes / w.

    "bytes_per_second": w. Both from small (4 kB) and large (8 MB) ones in turn.
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
    samples = measure(candidates, steps=7, warmup=2, wire=wire)
    call = numpy.median(samples["small"]["seconds"])
    transfer = numpy.median(samples["large"]["seconds"]) - call
    return {"call_seconds": call, "bytes_per_second": large.nbytes / max(transfer, 1e-9)}


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that start within it: it sees every operator that torch runs.

    An emulated network, written in Python, runs none, and counts by itself.
    """

    def __enter__(self):
        self.count = -getattr(dist.group.WORLD, "collectives", 0)
        return super().__enter__()

    def __exit__(self, *error):
        self.count += getattr(dist.group.WORLD, "collectives", 0)
        return super().__exit__(*error)

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
                with torch.profiler.record_function(name):
                    step()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(trace))
        say(f"written: {trace}")


def count_collectives(step: Callable[[], object]) -> int:
    """Collectives in one more step."""
    step()  # in its second step torch DDP arranges its buckets anew, with two broadcasts
    with CollectiveCounter() as counter:
        step()
    return counter.count


def benchmark(candidates: dict[str, Callable[[], dict]], args, device: torch.device) -> dict:
    """Measure candidates, as `measure` has them: "all_reduce" and "candidates" of the JSON."""
    costs = all_reduce_costs(device, wire())
    samples = measure(candidates, args.steps, args.warmup, wire())
    for name, step in candidates.items():
        samples[name]["collectives_per_step"] = count_collectives(step)
    measured = [{"name": name, **samples[name]} for name in samples]
    return {"all_reduce": costs, "candidates": measured}
