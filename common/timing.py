"""A stopwatch for CPU and CUDA, and the loop that measures candidates side by side."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


class Stopwatch:
    """Named points in time: `perf_counter` on CPU, CUDA events on a GPU, which wait for nothing."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.marks = {}

    def mark(self, name: str) -> None:
        """Remember the time now under this name; a second mark of the same name replaces it."""
        if self.on_cuda:
            self.marks[name] = torch.cuda.Event(enable_timing=True)
            self.marks[name].record()
        else:
            self.marks[name] = time.perf_counter()

    def seconds(self, start: str, end: str) -> float:
        """Seconds from one mark to another. On CUDA waits until the second has been reached."""
        if self.on_cuda:
            self.marks[end].synchronize()
            return self.marks[start].elapsed_time(self.marks[end]) / 1000
        return self.marks[end] - self.marks[start]


def measure(candidates: dict[str, Callable[[], dict]], steps: int, warmup: int) -> dict[str, dict]:
    """Run the candidates step by step in turn (A B C A B C …): noise then meets them all alike.

    A candidate is a function that runs one step and returns its times, {quantity: seconds}. A
    barrier precedes every step; the first `warmup` rounds are not counted. Returns {candidate:
    {quantity: samples of all ranks}}, the same on every rank.
    """
    mine = {name: [] for name in candidates}
    for i in range(warmup + steps):
        for name, step in candidates.items():
            dist.barrier()
            times = step()
            if i >= warmup:
                mine[name].append(times)
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    samples = {}
    for name in candidates:
        of_all_ranks = [times for one in everyones for times in one[name]]
        samples[name] = {key: [times[key] for times in of_all_ranks] for key in of_all_ranks[0]}
    return samples


def count_collectives(step: Callable[[], object], trace: Path | None = None) -> int:
    """All-reduces and broadcasts in a step, counted by the profiler over three steps.

    Call it when all is measured. `trace`: a file for these steps, in Chrome's format.
    """
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            step()
    if trace:
        profiler.export_chrome_trace(str(trace))
    kinds = ("c10d::allreduce_", "c10d::broadcast_")
    return sum(event.count for event in profiler.key_averages() if event.key in kinds) // 3
