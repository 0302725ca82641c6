"""A stopwatch for CPU and CUDA, and the loop that measures candidates side by side."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


class Stopwatch:
    """Named points in time: `perf_counter` on CPU, CUDA events on a GPU: they wait for nothing and leave the overlap be."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.marks = {}

    def mark(self, name: str) -> None:
        """Remember the time now under this name; a second mark of the same name replaces the first."""
        self.marks[name] = (
            torch.cuda.Event(enable_timing=True) if self.on_cuda else time.perf_counter()
        )
        if self.on_cuda:
            self.marks[name].record()

    def seconds(self, start: str, end: str) -> float:
        """Seconds from one mark to another. On CUDA waits until the second one has been reached."""
        if self.on_cuda:
            self.marks[end].synchronize()
            return self.marks[start].elapsed_time(self.marks[end]) / 1000
        return self.marks[end] - self.marks[start]


def measure(
    candidates: dict[str, Callable[[], dict]], steps: int, warmup: int
) -> dict[str, dict[str, list[float]]]:
    """Run all candidates step by step in turn (A B C A B C …), so that noise of the machine meets them all alike.

    Each candidate is a function that runs one step and returns its times, {quantity: seconds}. `warmup` rounds are not
    counted; a barrier precedes every step. Returns {candidate: {quantity: samples of all ranks}}, the same everywhere.
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
    return {
        name: {
            quantity: [times[quantity] for one in everyones for times in one[name]]
            for quantity in mine[name][0]
        }
        for name in candidates
    }
