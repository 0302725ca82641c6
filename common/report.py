"""Percentiles, tables, the head of a result and the JSON file."""

import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from common.setup import is_rank_0, say, wire


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


COLORS = {  # one for one thing in all pictures; those of the stages: 05_bucketed/compare
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "exposed communication": "#F0E442",
    "optimizer": "#999999",
    "pack, unpack": "#009E73",
    "all-reduce": "#D55E00",
    "all-gather": "#009E73",
    "reduce-scatter": "#D55E00",
}


def new_figure(width: float, height: float):
    """Return a figure of this size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure, path: Path) -> None:
    figure.savefig(path, format="png")
    say(f"written: {path}")


def save_movie(figure, show: Callable[[float], None], moments: list[float], path: Path) -> None:
    """Save what show(moment) makes of a figure as a GIF, in few colors: it stays small.

    The last moment stays for three seconds; without motion it has to say everything.
    """
    from matplotlib.animation import FuncAnimation, PillowWriter
    from PIL import Image, ImageSequence

    FuncAnimation(figure, show, moments).save(path, writer=PillowWriter(), dpi=94)
    with Image.open(path) as movie:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(movie)]
    colors = "#000000#444444#888888#CCCCCC#FFFFFF#EBAF80#80CFB9" + "".join(COLORS.values())
    palette = Image.new("P", (1, 1))
    palette.putpalette(bytes.fromhex(colors.replace("#", "")))
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [150] * (len(frames) - 1) + [3000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)
    say(f"written: {path}")


def begin(stage: str, args, device: torch.device) -> dict:
    """Print what runs and where; return the head of the JSON."""
    world_size, threads = dist.get_world_size(), torch.get_num_threads()
    where = f"{dist.get_backend()} on {device.type}"
    if wire().text:
        where += f" behind an emulated network of {wire().text}"
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}, threads per rank: {threads}"
    say(f"{stage}: torch {torch.__version__}, {where}, {ranks}")
    gpus = ", ".join(gpus_of_this_host()) or "none"
    say(f"CUDA {torch.version.cuda}, GPUs of this host: {gpus}")
    return head(stage, args, dist.get_backend(), device.type, world_size, threads)


def head(stage: str, args, backend, device, world_size, threads: int | None) -> dict:
    """Return what the JSON of every script begins with."""
    on_gpu = "cuda" in device  # a name, or 01's list of names
    return {
        "stage": stage,
        "torch": torch.__version__,
        "backend": backend,
        "network": wire().text,
        "stretch": wire().stretch,  # at first; candidates have that of each sample
        "device": device,
        "cuda": torch.version.cuda,
        "gpus": gpus_of_this_host(),
        "device_name": torch.cuda.get_device_name() if on_gpu else processor_name(),
        "world_size": world_size,
        "threads_per_rank": threads,
        "options": dict(vars(args)),
        "started": datetime.now(timezone.utc),
    }


def gpus_of_this_host() -> list[str]:
    """Return the names of the GPUs that torch can use here."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def processor_name() -> str:
    """Return the processor's model, where Linux tells; elsewhere its architecture."""
    system = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", system.read_text()) if system.exists() else None
    return found[1] if found else platform.machine()


def as_json(value) -> float | str:
    """Return what JSON has no form for: a number of numpy's as a number, a path, a time as text."""
    return value.item() if isinstance(value, numpy.generic) else str(value)


def write_json(path: Path | None, result: dict) -> None:
    """Write a result where rank 0 has a path; null for infinity and nan.

    It is written beside the file and renamed, so that there is a whole one at any time.
    """
    if path is None or not is_rank_0():
        return
    result["seconds"] = (datetime.now(timezone.utc) - result["started"]).total_seconds()
    finite = json.loads(json.dumps(result, default=as_json), parse_constant=lambda _: None)
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
