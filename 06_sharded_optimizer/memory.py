"""06: what ranks hold, in parts, and the most bytes of tensors that a function takes."""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common import report, setup
from common.ladder import NO_COMMUNICATION, Trainee, Way, language_trainee
from common.timing import gather

PARTS = ["parameters", "gradients", "optimizer state", "in flight"]
LEGEND = """\
MB: 2^20 bytes, of the rank that has most; batch: one sequence of 8 tokens;
in flight: the peak of everything else during forward and backward.
"""


def account(ways: dict[str, Way], args, device: torch.device, result: dict) -> dict:
    """Measure what a rank holds in training, and print it; "memory_bytes" of the JSON.

    Returns no columns for the table of steps.
    """
    memory = result["memory_bytes"] = {}
    for name, way in ways.items():
        if name != NO_COMMUNICATION:
            setup.progress(f"memory of {name}")
            memory[name] = gather(kept_and_in_flight(language_trainee(way, args, device, (1, 8))))
    print_memory(memory, PARTS)
    setup.say(LEGEND)
    return {}


def print_memory(memory: dict[str, list], parts: list[str]) -> None:
    """Print {candidate: [rank][bytes of each part]}, of the rank that has most."""
    rows = []
    for name, all_ranks in memory.items():
        most = max(all_ranks, key=sum)
        rows.append([name, *[f"{part / 2**20:,.1f}" for part in [*most, sum(most)]]])
    report.print_table(["MB", *parts, "at most"], rows)


def kept_and_in_flight(trainee: Trainee) -> list[int]:
    """Return what a rank keeps, and what it holds at most beside that in forward and backward.

    The batch is one short sequence, so that activations hardly count.
    """
    for _ in range(2):
        trainee.step()
    peaks = []
    for _ in range(3):  # on a busy machine gloo lags, so the least counts
        trainee.optimizer.zero_grad()
        compute = partial(trainee.compute_gradients, *trainee.batch)
        peaks.append(peak_bytes(compute, trainee.watch.device))
    parameters = list(trainee.model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = getattr(trainee.optimizer, "local", trainee.optimizer)  # a sharded one's own part
    local = getattr(local, "optim", local)  # ZeroRedundancyOptimizer's
    state = [tensor for values in local.state.values() for tensor in values.values()]
    kept = [report.held_bytes(part) for part in (parameters, gradients, state)]
    is_ddp = isinstance(trainee.model, DistributedDataParallel)  # its gradients stay in buckets
    return [*kept, min(peaks) - (0 if is_ddp else kept[1])]


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Call a function, and return the most bytes of tensors that there were beyond those before.

    On a CPU all ranks must call it, and the least of several calls is right: the profiler may miss
    what a thread of gloo gives back.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    # torch's profiler sees what gloo and compiled code take, too; its MemTracker does not.
    # acc_events: torch 2.12 warns that a profiler without it forgets earlier cycles.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        function()
        dist.barrier()  # gloo's threads have given back what they worked on
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    blocks = {}  # address: bytes of a block that the function took, 0 once it is given back
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], max(0, event["args"]["Bytes"])  # below 0: given back
        held += size - blocks.get(address, 0)
        blocks[address] = size
        peak = max(peak, held)
    return peak
