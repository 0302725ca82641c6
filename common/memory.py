"""How much memory tensors take: held by a rank, and at most during a call.

    from common.memory import held_bytes, peak_bytes
    print(held_bytes(model.parameters()), peak_bytes(step, torch.device("cpu")))

On a CPU it reads torch's profiler, which sees every block of memory come and go, gloo's and
compiled code's, too. torch's own MemTracker does not do: it measures compiled code as if it were
not, takes the gradients of DDP and of FSDP for temporary memory, and warns of what is no mistake.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import common.setup  # noqa: F401 (it keeps the profiler's own log off the screen)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors on this rank: of a DTensor, those of its shard."""
    held = 0
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        held += tensor.nbytes
    return held


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Call a function: the most bytes of tensors that there were meanwhile, beyond those before.

    On a CPU all ranks of a process group must call it. The profiler may miss what a thread of gloo
    gives back, and then there is a tensor too many: the least of several calls is right.
    """
    if device.type != "cuda":
        return sum(blocks_at_peak(function))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def blocks_at_peak(function: Callable[[], object]) -> list[int]:
    """Call a function on a CPU: the sizes of the new blocks that there were at the peak."""
    blocks = {}  # that the function has taken and not given back: address -> bytes
    total = 0
    peak = 0
    at_peak = []
    for event in allocations(function):
        address = event["Addr"]
        # What is given back is looked up here: for a block from before the call the profiler may
        # say the size of an older one at that address.
        total -= blocks.pop(address, 0)
        if event["Bytes"] > 0:
            blocks[address] = event["Bytes"]
            total += event["Bytes"]
            if total > peak:
                peak = total
                at_peak = list(blocks.values())
    return at_peak


def allocations(function: Callable[[], object]) -> list[dict]:
    """Call a function: what torch's allocator for CPUs did meanwhile, in order.

    Every entry has "Addr" and "Bytes"; bytes below 0 are given back.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        # acc_events: torch 2.12 warns that a profiler without it forgets earlier cycles.
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            function()
            if dist.is_initialized():
                dist.barrier()  # gloo's threads have given back what they worked on
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return [event["args"] for event in events]
