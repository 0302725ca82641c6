"""A stopwatch for CPU and CUDA, and the loop that measures rows side by side."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from common.setup import network, progress, say


class Stopwatch:
    """Named points in time: `perf_counter` on CPU, CUDA events on a GPU, which wait for nothing."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.marks = {}

    def mark(self, name: str, *_) -> None:
        """Remember the time now under this name; a second mark of the same name replaces it."""
        self.marks[name] = time.perf_counter()
        if self.on_cuda:
            self.marks[name] = torch.cuda.Event(enable_timing=True)
            self.marks[name].record()

    def marked(self, name: str, function: Callable) -> Callable:
        """Return the function with marks where it starts and ends; traces show it by this name."""

        def call(*arguments):
            self.mark(f"{name} starts")
            with torch.profiler.record_function(name):
                result = function(*arguments)
            self.mark(f"{name} ends")
            return result

        return call

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


def measure(rows: dict[str, Callable[[], dict]], steps: int, warmup: int) -> dict[str, dict]:
    """Run the rows step by step in turn (A B C A B C …): noise then meets them all alike.

    A row runs one step, after a barrier, and returns its times, {quantity: seconds}; or None on a
    rank that has no part in it.
    Returns {row: {quantity: [rank][step]}}, on every rank, without the first `warmup` rounds.
    """
    local = {name: [] for name in rows}
    for i in range(warmup + steps):
        for name, step in rows.items():
            progress(f"step {i + 1} of {warmup + steps}: {name}")
            dist.barrier()
            with network():
                local[name].append(step())
    all_ranks = gather({name: times[warmup:] for name, times in local.items()})
    samples = {}
    for name in rows:
        of_ranks = [of_rank[name] for of_rank in all_ranks if of_rank[name][0] is not None]
        samples[name] = {
            quantity: [[times[quantity] for times in of_rank] for of_rank in of_ranks]
            for quantity in of_ranks[0][0]
        }
    return samples


def profile(rows: dict[str, Callable[[], object]], trace: Path | None) -> None:
    """Write a Chrome trace of every rank, if there is a path: three more steps of each row.

    The files are `trace`.rank0, `trace`.rank1, …
    """
    if trace is None:
        return
    # acc_events: torch 2.12 warns that a profiler without it forgets earlier cycles.
    with torch.profiler.profile(acc_events=True) as profiler:
        for name, step in rows.items():
            for _ in range(3):
                dist.barrier()
                with torch.profiler.record_function(name), network():
                    step()
    profiler.export_chrome_trace(f"{trace}.rank{dist.get_rank()}")
    say(f"written: {trace}.rank0 and so on, one for each rank")
