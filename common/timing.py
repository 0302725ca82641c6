"""A stopwatch for CPU and CUDA, and the loop that measures candidates side by side."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from common.setup import network, progress, say


class Stopwatch:
    """Named points in time: `perf_counter` on CPU, CUDA events on a GPU, which wait for nothing."""

    def __init__(self, device: torch.device):
        self.device, self.on_cuda = device, device.type == "cuda"
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

    def seconds(self, start: str, end: str) -> float:
        """Return the seconds from one mark to another; on an emulated network, its own seconds.

        On CUDA it waits until the second mark has been reached.
        """
        if self.on_cuda:
            self.marks[end].synchronize()
            return self.marks[start].elapsed_time(self.marks[end]) / 1000
        return (self.marks[end] - self.marks[start]) / network().stretch


def gather(value) -> list:
    """Return what all ranks have, any Python object, by rank. All ranks must call it."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def measure(candidates: dict, steps: int, warmup: int) -> dict[str, dict]:
    """Run the candidates step by step in turn (A B C A B C …): noise then meets them all alike.

    A candidate runs one step, after a barrier, and returns its times, {quantity: seconds}; or None
    on a rank that has no part in it.
    Returns {candidate: {quantity: [rank][step]}}, on every rank, without the first `warmup` rounds.
    """
    local = {name: [] for name in candidates}
    for i in range(warmup + steps):
        for name, step in candidates.items():
            progress(f"step {i + 1} of {warmup + steps}: {name}")
            dist.barrier()
            with network():
                local[name].append(step())
    all_ranks = gather({name: times[warmup:] for name, times in local.items()})
    samples = {}
    for name in candidates:
        counted = [of_rank[name] for of_rank in all_ranks if of_rank[name][0] is not None]
        samples[name] = {
            quantity: [[times[quantity] for times in of_rank] for of_rank in counted]
            for quantity in counted[0][0]
        }
    return samples


def profile(candidates: dict[str, Callable[[], object]], trace: Path | None) -> None:
    """Write a Chrome trace of rank 0, if there is a path: three more steps of each, by its name."""
    if trace is None:
        return
    # acc_events: torch 2.12 warns that a profiler without it forgets earlier cycles.
    with torch.profiler.profile(acc_events=True) as profiler:
        for name, step in candidates.items():
            for _ in range(3):
                dist.barrier()
                with torch.profiler.record_function(name), network():
                    step()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(trace))
        say(f"written: {trace}")
