"""06: what ranks hold in training, in parts, for this stage, ZeRO2 and FSDP."""

import gc
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from common import ladder, report, setup, timing


class Held(NamedTuple):
    """Bytes that a rank holds at the most, in parts."""

    weights: int
    gradients: int
    state: int  # the optimizer's
    in_flight: int  # everything else at the peak: buffers, whole weights of shards, activations


LEGEND = """\
MB: 2^20 bytes, of the rank that has most, with a batch of one sequence of 8 tokens; in flight:
everything else at the peak of two steps; sent: by rank 0 to its sockets in a step.
"""


def account(ways: dict[str, ladder.Way], train_step, args, device, result: dict) -> None:
    """Measure what a rank holds in each way of training, and print it; "memory" of the JSON."""
    memory = result["memory"] = []
    for name, way in ways.items():
        setup.progress(f"memory of {name}")
        held, sent_bytes = measure(way, train_step, args, device)
        of_ranks = [each._asdict() for each in timing.gather(held)]
        memory.append({"name": name, "held_bytes": of_ranks, "sent_bytes": sent_bytes})
    print_memory(memory)
    setup.say(LEGEND)


def measure(way: ladder.Way, train_step, args, device: torch.device) -> tuple[Held, float]:
    """Make a model and train it for two steps; return what this rank holds, and sends in a step."""
    kept = []

    def train() -> None:
        trainee = ladder.language_trainee(way, train_step, args, device)
        trainee.batch = trainee.batch[:, :1, :8]  # activations shall hardly count
        kept.append(kept_by(trainee))

    peaks = []
    for _ in range(2):
        peaks.append(peak_bytes(train, device))
        gc.collect()  # a trainee holds itself
    peak = min(peaks)  # on a busy machine gloo lags
    *parts, sent_bytes = kept[-1]
    return Held(*parts, peak - sum(parts)), sent_bytes


def kept_by(trainee: ladder.Trainee) -> tuple[int, int, int, float]:
    """Train for two steps; return bytes of weights, gradients and state, and those sent in one."""
    gradients = []
    step = trainee.optimizer.step

    def noting_step() -> None:
        parameters = [p for p in trainee.model.parameters() if p.grad is not None]
        gradients.append(held_bytes(parameter.grad for parameter in parameters))
        step()

    trainee.optimizer.step = noting_step
    trainee.step()
    before = written_bytes()
    trainee.step()
    sent = written_bytes() - before
    local = getattr(trainee.optimizer, "local", trainee.optimizer)  # a sharded one's own part
    local = getattr(local, "optim", local)  # ZeroRedundancyOptimizer's
    state = [tensor for values in local.state.values() for tensor in values.values()]
    return held_bytes(trainee.module.parameters()), gradients[-1], held_bytes(state), sent


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors on this rank: of a DTensor, those of its local part."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local)


def written_bytes() -> float:
    """Return the bytes that this process has written so far, usually to sockets; nan: unknown."""
    counters = Path("/proc/self/io")  # on Linux
    written = re.search(r"wchar: (\d+)", counters.read_text()) if counters.exists() else None
    return float(written[1]) if written else float("nan")


def print_memory(memory: list[dict]) -> None:
    """Print rows of "memory" of the JSON for the rank that has most, beside DDP if it is there."""
    most = {row["name"]: max(row["held_bytes"], key=total) for row in memory}
    header = ["MB", *[part.replace("_", " ") for part in Held._fields], "at most"]
    table = [[name, *map(megabytes, [*held.values(), total(held)])] for name, held in most.items()]
    if ladder.TORCH_DDP in most:
        header += [f"÷ {ladder.TORCH_DDP}", "sent"]
        for cells, row in zip(table, memory, strict=True):
            cells.append(f"{total(most[row['name']]) / total(most[ladder.TORCH_DDP]):.2f}")
            cells.append(megabytes(row["sent_bytes"]))
    report.print_table(header, table)


def megabytes(size_bytes: float) -> str:
    """Return bytes as a cell of a table in MB."""
    return f"{size_bytes / 2**20:,.1f}"


def total(held: dict[str, int]) -> int:
    """Return the bytes of all parts."""
    return sum(held.values())


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
