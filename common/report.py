"""Percentiles, tables, the head of a result and the JSON file."""

import json
import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from common.setup import is_rank_0, network, say


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


def begin(stage: str, args, device: torch.device) -> dict:
    """Print what runs and where; return the head of the JSON."""
    world_size, threads = dist.get_world_size(), torch.get_num_threads()
    where = f"{dist.get_backend()} on {device.type}"
    if network().text:
        where += f" behind an emulated network of {network().text}"
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}, threads per rank: {threads}"
    say(f"{stage}: torch {torch.__version__}, {where}, {ranks}")
    result = head(stage, args, dist.get_backend(), device.type, world_size, threads)
    say(f"CUDA {result['cuda']}, GPUs of this host: {', '.join(result['gpus']) or 'none'}")
    return result


def head(stage: str, args, backend, device, world_size, threads: int | None) -> dict:
    """Return what the JSON of every script begins with."""
    return {
        "stage": stage,
        "torch": torch.__version__,
        "backend": backend,
        "network": network().text,
        "device": device,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "device_name": torch.cuda.get_device_name() if "cuda" in device else processor_name(),
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
    result["stretch"] = [network().lowest_stretch, network().highest_stretch]
    result["seconds"] = (datetime.now(timezone.utc) - result["started"]).total_seconds()
    text = json.dumps(result, default=lambda value: getattr(value, "item", value.__str__)())
    finite = json.loads(text, parse_constant=lambda _: None)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(finite, indent=1) + "\n")
    beside.replace(path)
