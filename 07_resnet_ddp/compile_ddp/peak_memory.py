"""07: how much memory the tensors of a training step take, on CUDA and on a CPU.

`bytes_held` is what stays from step to step, `peak_memory` the most that one call adds to it.
CUDA's allocator counts that itself; torch's allocator for CPUs does not. There the profiler is
asked: its trace has every block of memory that was taken or given back, with address and size.

    from peak_memory import peak_memory
    print(peak_memory(lambda: model(inputs).sum().backward(), torch.device("cpu")), "bytes")

compile_ddp.py uses it. It needs torch alone.
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves


def held_here(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: its shard if FSDP has split it, otherwise all."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def bytes_held(model: nn.Module, inputs: tuple, how: str) -> int:
    """What stays on this rank from step to step, apart from the gradients.

    That is parameters, buffers, inputs, and if `how` is "ddp" the buckets of DDP.
    """
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [leaf for leaf in tree_leaves(inputs) if torch.is_tensor(leaf)]
    if how == "ddp":  # its buckets have a place for each gradient
        tensors += [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(held_here(tensor).nbytes for tensor in tensors)


def peak_memory(function, device: torch.device) -> int:
    """Call a function: the most bytes of tensors that there were meanwhile, beyond those before.

    On a CPU all ranks of a process group must call it. The profiler may miss what a thread of gloo
    gives back, and then there is a tensor too many: the least of several calls is right.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    sizes = {}  # of the blocks that the function has taken and not given back, by address
    peak = 0
    for event in allocations(function):
        address = event["Addr"]
        if event["Bytes"] > 0:
            sizes[address] = event["Bytes"]
            peak = max(peak, sum(sizes.values()))
        else:
            # The size is not subtracted but forgotten: for a block from before the call the
            # profiler may say the size of an older one at that address.
            sizes.pop(address, None)
    return peak


def allocations(function) -> list[dict]:
    """Call a function: what torch's allocator for CPUs did meanwhile, in order.

    Every entry has "Addr" and "Bytes"; bytes below 0 are given back.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        options = {"profile_memory": True, "acc_events": True}
        with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
            function()
            if dist.is_initialized():
                dist.barrier()  # gloo's thread has given back what it worked on
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    events = [event for event in events if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return [event["args"] for event in events]
