"""Percentiles, tables, the head of a result and the JSON file."""

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


def milliseconds(samples: list[float]) -> list[str]:
    """The percentiles of samples in seconds, as four cells of a table in ms."""
    return [f"{1000 * value:.1f}" for value in percentiles(samples)]


def ratio(samples: list[float], others: list[float] | None) -> str:
    """The ratio of two p50s as a cell of a table; "-" where there is nothing to compare with."""
    if others is None:
        return "-"
    return f"{percentiles(samples)[0] / percentiles(others)[0]:.3f}"


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print rows under a header: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for first, *others in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip(), flush=True)


def describe(model_class, size: tuple, args) -> dict:
    """Print what a benchmark of stages 02 to 05 runs; returns "model" of the JSON."""
    *shape, batch_size, context_length = size
    model = {"size": args.size, "dtype": args.dtype, "batch_size": args.batch_size or batch_size}
    model["context_length"] = args.context_length or context_length
    with torch.device("meta"):
        model["parameters"] = sum(p.numel() for p in model_class(*shape).parameters())
    if dist.get_rank() == 0:
        line = (
            "benchmark: {size} model, {millions:.1f} million parameters, {dtype}, {batch_size} × "
        )
        line += "{context_length} tokens per rank; {steps} steps, {warmup} before them to warm up"
        more = {"millions": model["parameters"] / 1e6, "steps": args.steps, "warmup": args.warmup}
        print(line.format(**model, **more), flush=True)
    return model


def print_steps(samples: dict[str, dict], tokens: int) -> None:
    """The table of stages 02 to 05: a row per candidate. `tokens`: of all ranks in a step."""
    bar = samples.get("torch DDP", {}).get("step_seconds")
    rows = []
    for name, times in samples.items():
        step = percentiles(times["step_seconds"])[0]
        exposed = percentiles(times["exposed_comm_seconds"])[0]
        row = [name, *milliseconds(times["step_seconds"]), f"{tokens / step:.0f}"]
        row += [f"{1000 * exposed:.1f}", f"{100 * exposed / step:.1f} %"]
        row += [str(times["collectives_per_step"]), ratio(times["step_seconds"], bar)]
        rows.append(row)
    header = ["step, ms", "p50", "p75", "p90", "p95", "tokens/s"]
    print_table([*header, "exposed", "share", "all-reduces", "/torch DDP"], rows)
    legend = (
        "Percentiles over all steps of all ranks; tokens/s of all ranks; exposed: communication "
    )
    legend += (
        "that is not hidden\nunder backward, ms and share of the step (p50); /torch DDP: ratio "
    )
    print(legend + "of the p50s, below 1 is faster.", flush=True)


def environment(device: torch.device) -> dict:
    """What a figure depends on: versions, device, ranks and threads (the head of the JSON)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    head = {"torch": torch.__version__, "backend": dist.get_backend(), "device": device.type}
    ranks = {"world_size": dist.get_world_size(), "threads_per_rank": torch.get_num_threads()}
    return {**head, "device_name": name, **ranks}


def begin(stage: str, device: torch.device) -> dict:
    """Print on rank 0 what runs and where; returns the head of the JSON."""
    result = {"stage": stage, **environment(device)}
    if dist.get_rank() == 0:
        line = "{stage}: torch {torch}, {backend} on {device}, {world_size} ranks, "
        line += "{threads_per_rank} threads per rank"
        print(line.format(**result), flush=True)
    return result


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
