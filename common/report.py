"""Percentiles, tables, the head of a result and the JSON file."""

import json
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from common.network import wire
from common.setup import FINISHES, SIZES, fail, is_rank_0, say


def percentiles(samples: list) -> list[float]:
    """Return the 50th, 75th, 90th and 95th percentile over all ranks, in the samples' unit."""
    return numpy.percentile(samples, (50, 75, 90, 95)).tolist()


def milliseconds(samples: list) -> list[str]:
    """Return the percentiles of samples in seconds, as four cells of a table in ms."""
    return [f"{1000 * value:.1f}" for value in percentiles(samples)]


def ratio(samples: list, others: list | None) -> str:
    """Return the ratio of two p50s as a cell of a table; "-" with nothing to compare with."""
    return f"{percentiles(samples)[0] / percentiles(others)[0]:.3f}" if others else "-"


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print rows under a header: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, *rows]:
        print_row(row, widths)


def print_row(cells: list[str], widths: list[int]) -> None:
    """Print a line of such a table, where the rows are known one by one."""
    line = cells[0].ljust(widths[0])
    for cell, width in zip(cells[1:], widths[1:], strict=True):
        line += "  " + cell.rjust(width)
    say(line.rstrip())


def describe(model_class, args) -> dict:
    """Print which model is measured, and how; return "model" of the JSON."""
    size = SIZES[args.size]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(*size[:5]).parameters())
    model = {
        "size": args.size,
        "parameters": parameters,
        "dtype": args.dtype,
        "batch_size": args.batch_size or size.batch_size,
        "context_length": args.context_length or size.context_length,
    }
    say(
        f"{args.size} model: {parameters / 1e6:.1f} million parameters, {args.dtype}, "
        f"{model['batch_size']} × {model['context_length']} tokens per rank; "
        f"{args.steps} steps are measured, after {args.warmup} to warm up"
    )
    return model


def require_memory(model: dict, copies: int) -> None:
    """End the run unless there is memory for so many tensors per weight on each rank of this host.

    A model in training holds four: weight, gradient and Adam's two moments; buckets are a fifth.
    """
    system = Path("/proc/meminfo")
    if torch.cuda.is_available() or not system.exists():  # a GPU says itself when it is full
        return
    found = re.search(r"MemAvailable: *(\d+)", system.read_text())
    available = 1024 * int(found[1]) if found else math.inf
    held = copies * model["parameters"] * getattr(torch, model["dtype"]).itemsize
    needed = int(os.environ["LOCAL_WORLD_SIZE"]) * held
    if needed > available:
        fail(
            f"argument --size: '{model['size']}' needs {needed / 1e9:.1f} GB of memory for all "
            f"ranks, and {available / 1e9:.1f} are available: use fewer ranks or a smaller size"
        )


def evaluate(epoch: int, model, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Print loss and accuracy of a classifier after an epoch; returns its accuracy."""
    with torch.no_grad():
        logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    say(f"verify: epoch {epoch}, held-out loss {loss:.4f}, accuracy {100 * accuracy:.2f} %")
    return accuracy


def compare_weights(module: torch.nn.Module, twin: torch.nn.Module) -> dict:
    """End the run unless all ranks hold the same weights, and those of the twin; float64."""
    tolerance = 1e-10  # after hundreds of steps; rounding alone stays far below
    local = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    replicas = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, local)
    if not all(torch.equal(replica, local) for replica in replicas):
        sys.exit("verify: FAILED, the ranks hold different weights")
    worst = (local - torch.nn.utils.parameters_to_vector(twin.parameters())).abs().max().item()
    if not worst <= tolerance:
        sys.exit(f"verify: FAILED, a weight is {worst:.1e} away from single-process training")
    say(
        f"verify: passed, the ranks are bitwise equal and at most {worst:.1e} away from "
        f"single-process training (allowed: {tolerance:.0e})\n"
    )
    return {"max_abs_diff": worst, "tolerance": tolerance, "passed": True}


STEPS_LEGEND = """\
Percentiles over all steps of all ranks; tokens/s of all ranks; exposed: ms from the last
gradient until all are averaged; share: exposed in per cent of the step; alone: ms that the
all-reduces take back to back, with nothing else running: all-reduces · o + bytes / w, with
o = {:.2f} ms a call and w = {:.3f} GB/s from this run; /torch DDP: below 1 is faster (p50)."""


def print_steps(result: dict) -> None:
    """Print the table of stages 02 to 05, a row per candidate of the JSON."""
    model, costs = result["model"], result["all_reduce"]
    size_bytes = model["parameters"] * getattr(torch, model["dtype"]).itemsize
    tokens = model["batch_size"] * model["context_length"] * result["world_size"]
    of_torch = [one for one in result["candidates"] if one["name"] == "torch DDP"]
    rows = []
    for times in result["candidates"]:
        step = percentiles(times["step_seconds"])[0]
        exposed = percentiles(times["exposed_comm_seconds"])[0]
        calls = times["collectives_per_step"]
        alone = calls * costs["call_seconds"] + size_bytes / costs["bytes_per_second"]
        row = [times["name"], *milliseconds(times["step_seconds"]), f"{tokens / step:.0f}"]
        row += [f"{1000 * exposed:.1f}", f"{100 * exposed / step:.0f} %"]
        row += [f"{1000 * alone if calls else 0:.1f}", str(calls)]
        row.append(ratio(times["step_seconds"], of_torch and of_torch[0]["step_seconds"]))
        rows.append(row)
    header = ["step, ms", "p50", "p75", "p90", "p95", "tokens/s"]
    print_table([*header, "exposed", "share", "alone", "all-reduces", "/torch DDP"], rows)
    for times in result["candidates"]:
        if not times["collectives_per_step"] and times["name"].endswith("(mine)"):
            say(f"{times['name']} made no collective: its finish may be {', '.join(FINISHES)}")
    say(STEPS_LEGEND.format(1000 * costs["call_seconds"], costs["bytes_per_second"] / 1e9))


def begin(stage: str, args, device: torch.device) -> dict:
    """Print what runs and where; return the head of the JSON, as common/README.md lists it."""
    world_size, threads = dist.get_world_size(), torch.get_num_threads()
    where = f"{dist.get_backend()} on {device.type}"
    if args.network:
        where += f" behind an emulated network of {args.network}"
    ranks = f"{world_size} ranks, threads per rank: {threads}"
    say(f"{stage}: torch {torch.__version__}, {where}, {ranks}")
    return head(stage, args, dist.get_backend(), device.type, world_size, threads)


def head(stage: str, args, backend, device, world_size, threads: int | None) -> dict:
    """Return the head of the JSON, as common/README.md lists it."""
    on_gpu = "cuda" in device  # a name, or 01's list of names
    return {
        "stage": stage,
        "torch": torch.__version__,
        "backend": backend,
        "network": getattr(args, "network", None),
        "stretch": wire.stretch,  # at first; candidates have that of each sample
        "device": device,
        "device_name": torch.cuda.get_device_name() if on_gpu else processor_name(),
        "world_size": world_size,
        "threads_per_rank": threads,
        "options": dict(vars(args)),
        "started": datetime.now(timezone.utc),
    }


def processor_name() -> str:
    """Return the processor's model, where Linux tells; elsewhere its architecture."""
    system = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", system.read_text()) if system.exists() else None
    return found[1] if found else platform.machine()


def write_json(path: Path | None, result: dict) -> None:
    """Write a result where rank 0 has a path; null for infinity and nan.

    It is written beside the file and renamed, so that there is a whole one at any time.
    """
    if path is None or not is_rank_0():
        return
    result["seconds"] = (datetime.now(timezone.utc) - result["started"]).total_seconds()
    finite = json.loads(json.dumps(result, default=str), parse_constant=lambda _: None)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(finite, indent=1) + "\n")
    beside.replace(path)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors on this rank: of a DTensor, those of its local part."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local)


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
