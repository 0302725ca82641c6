"""The memory that tensors take: what a rank holds, and the most at any time."""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors on this rank: of a DTensor, those of its shard."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local)


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Call a function: the most bytes of tensors that there were meanwhile, beyond those before.

    On a CPU all ranks of a process group must call it. The profiler may miss what a thread of gloo
    gives back, and then there is a tensor too many: the least of several calls is right.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # torch's profiler sees what gloo and compiled code take, too. (torch's MemTracker does not, and
    # takes the gradients of DDP and FSDP for temporary memory.)
    # acc_events: torch 2.12 warns that a profiler without it forgets earlier cycles.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        function()
        if dist.is_initialized():
            dist.barrier()  # gloo's threads have given back what they worked on
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    blocks = {}  # that the function has taken and not given back: address -> bytes
    total = 0
    peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]  # below 0: given back
        # What is given back is looked up here: for a block from before the call the profiler may
        # say the size of an older one at that address.
        total -= blocks.pop(address, 0)
        if size > 0:
            blocks[address] = size
            total += size
            peak = max(peak, total)
    return peak
