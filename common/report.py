"""Percentiles, tables and the JSON file."""

import json
import platform
import re
from pathlib import Path

import numpy
import torch
import torch.distributed as dist


def percentiles(samples: list[float]) -> list[float]:
    """The 50th, 75th, 90th and 95th percentile, in the unit of the samples."""
    return [float(value) for value in numpy.percentile(samples, (50, 75, 90, 95))]


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print rows under a header in columns: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for first, *others in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip(), flush=True)


def environment(device: torch.device) -> dict:
    """What a figure depends on: torch's version, backend, device, ranks and threads (the head of the JSON)."""
    return {
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else processor_name(),
        "world_size": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
    }


def processor_name() -> str:
    """The processor's model, where the system tells."""
    system = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", system.read_text()) if system.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def write_json(path: Path, content: dict) -> None:
    """Write a result as JSON; a file that stands there whole, or not at all."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)
