"""The benchmark of 02 to 06: model sizes, flags, data to verify on, rows, and their table."""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from common import report, setup, timing


class Size(NamedTuple):
    """A language model, and its batch: sequences per rank and step, and tokens in each."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    vocabulary: int
    batch_size: int
    context_length: int


SIZES = {
    "nano": Size(64, 256, 2, 2, 1_000, 4, 64),
    "mini": Size(192, 768, 16, 6, 1_000, 10, 64),
    "small": Size(768, 3072, 12, 12, 10_000, 4, 128),
    "medium": Size(1024, 4096, 24, 16, 10_000, 4, 128),
    "large": Size(1280, 5120, 36, 20, 10_000, 4, 128),
    "xl": Size(1600, 6400, 48, 25, 10_000, 4, 128),
    "2.7b": Size(2560, 10_240, 32, 32, 10_000, 4, 128),
    "xl-2026": Size(2560, 10_240, 32, 32, 10_000, 4, 512),
    "10b": Size(4608, 12_288, 50, 36, 10_000, 4, 512),
    "0.5b": Size(1024, 4096, 24, 16, 50_000, 2, 512),
}


def add_training_arguments(parser: setup.Parser, steps: int) -> None:
    """Add the flags of scripts that train a language model; `steps` is --steps' default."""
    add = parser.add_argument
    one = setup.whole_number(1)
    add("--size", choices=SIZES, default="mini", help="CS336 2025: xl, 2.7b; 2026: xl-2026, 10b")
    add("--batch-size", type=one, help="sequences per rank and step (default: the size's)")
    add("--context-length", type=one, help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--steps", type=one, default=steps, help="steps that are measured")
    add("--warmup", type=setup.whole_number(0), default=5, help="steps before them")
    add("--seed", type=setup.whole_number(0), default=0)
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    pace = (
        "on an emulated network a step without communication counts as so many seconds; 0: as it is"
    )
    pace += " (default: 0.4 for mini with its own batch and dtype, else 0)"
    seconds = setup.checked(float, lambda n: 0 <= n <= 1e6, "a number from 0 to 1e6")
    add("--pace", type=seconds, help=pace)
    parser.set_defaults(bucket_size_mb=5.0)  # the flag of 05; torch's DDP has the same everywhere
    setup.add_process_group_arguments(parser)


def add_verify_arguments(parser: setup.Parser):
    """Add the flags of what verifies, then measures; return the group that excludes --no-verify."""
    add = parser.add_argument
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--no-verify", action="store_true", help="only measure")
    add("--no-baseline", action="store_true", help="measure this stage alone, to save memory")
    add("--data", metavar="DIR", help="verify on MNIST from this folder instead of the digits")
    add("--download", action="store_true", help="fetch MNIST into --data first")
    trace = "Chrome trace of three more steps of each row, on rank 0; in this machine's time"
    add("--trace", type=setup.output_file, metavar="FILE", help=trace)
    return either


def stage_parser(description: str, steps: int, **options) -> setup.Parser:
    """Return the command line of stages 02 to 06; `options` are more flags, numbers above 0."""
    parser = setup.Parser(description)
    add = parser.add_argument
    add_training_arguments(parser, steps)
    for name, default in options.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), type=setup.positive_number, default=default
        )
    either = add_verify_arguments(parser)
    every = "a line for so many batches while it trains; 0: none"
    add("--log-every", type=setup.whole_number(0), default=50, metavar="N", help=every)
    save = "save the verified model: the plain module's state_dict, of rank 0"
    either.add_argument("--save", type=setup.output_file, metavar="FILE", help=save)
    return parser


def pace_of(args) -> float:
    """Return --pace, or by default 0.4 s for `mini` with its own batch and dtype, and else 0."""
    if args.pace is not None:
        return args.pace
    is_mini = args.size == "mini" and args.dtype == "float32"
    return 0.4 if is_mini and not (args.batch_size or args.context_length) else 0.0


def torch_ddp(args) -> dict[str, Callable]:
    """Return torch's own, by name, with buckets of the same size as ours."""
    options = {"bucket_cap_mb": args.bucket_size_mb, "gradient_as_bucket_view": True}
    return {"torch DDP": partial(DistributedDataParallel, **options)}


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
    setup.say(
        f"{args.size} model: {parameters / 1e6:.1f} million parameters, {args.dtype}, "
        f"{model['batch_size']} × {model['context_length']} tokens per rank; "
        f"{args.steps} steps are measured, after {args.warmup} to warm up"
    )
    return model


def load_images(data: str | None, download: bool) -> list[torch.Tensor]:
    """Return images float64 [n, pixels] and labels int64 [n] to train on, and those to test on.

    MNIST from the folder `data`, or else our 1,797 digits: 297 held out, the others ten times.
    """
    if data is None:
        images, labels = setup.load_digits()
        images = images.double().flatten(1) - 8
        return [images[297:].repeat(10, 1), labels[297:].repeat(10), images[:297], labels[:297]]
    try:
        from torchvision.datasets import MNIST

        if download and os.environ["LOCAL_RANK"] == "0":  # on each host
            MNIST(data, download=True)
        dist.barrier()
        splits = MNIST(data, train=True), MNIST(data, train=False)
    except Exception as error:  # torchvision has many kinds: files missing, cut short, not MNIST
        setup.fail(f"argument --data: {data!r} holds no readable MNIST ({error!r}): see --download")
    tensors = []
    for split in splits:
        tensors += [split.data.double().flatten(1) / 255, split.targets]
    return tensors


def load_equal_shares(args: argparse.Namespace, device: torch.device) -> list[torch.Tensor]:
    """load_images on this device; with as many training images as all ranks can share."""
    tensors = load_images(args.data, args.download)
    images, labels, *held_out = [tensor.to(device) for tensor in tensors]
    used = len(images) - len(images) % dist.get_world_size()
    return [images[:used], labels[:used], *held_out]


def classifier(seed: int, images: torch.Tensor) -> nn.Module:
    """Return the model that verify trains, for images of this size, dtype and device."""
    torch.manual_seed(seed)
    first = nn.Linear(images.shape[1], 50)
    layers = first, nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)
    return nn.Sequential(*layers).to(images)


class TrainingLog:
    """Prints a line for every so many batches: their mean loss, and how long a step takes."""

    def __init__(self, every: int, samples: int, batch_size: int):
        self.every = every  # 0: it is silent
        self.batches = 0  # so far
        self.sums = torch.zeros(3, dtype=torch.float64)  # loss, seconds, exposed seconds
        ranks = dist.get_world_size()
        if every:
            setup.say(
                f"verify: {ranks} ranks train on {samples // ranks} samples each, in batches of "
                f"{batch_size}, together {ranks * batch_size}"
            )

    def add(self, loss: torch.Tensor, times: dict[str, float]) -> None:
        """Count a batch: its loss, and the seconds of its step. All ranks must call."""
        if not self.every:
            return
        of_batch = [loss.item(), times["step_seconds"], times["exposed_comm_seconds"]]
        self.sums += torch.tensor(of_batch, dtype=torch.float64)
        self.batches += 1
        if self.batches % self.every == 0:
            means = timing.gather(self.sums.tolist())
            loss, step, exposed = numpy.mean(means, axis=0) / self.every
            setup.say(
                f"verify: batch {self.batches}, loss {loss:.4f}, {1000 * step:.1f} ms a step, "
                f"{1000 * exposed:.1f} of these in communication"
            )
            self.sums.zero_()


def evaluate(epoch: int, model, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Print loss and accuracy of a classifier after an epoch; returns its accuracy."""
    with torch.no_grad():
        logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    setup.say(f"verify: epoch {epoch}, held-out loss {loss:.4f}, accuracy {100 * accuracy:.2f} %")
    return accuracy


def compare_weights(module: nn.Module, twin: nn.Module) -> dict:
    """End the run unless all ranks hold the same weights, and those of the twin; float64."""
    tolerance = 1e-10  # after hundreds of steps; rounding alone stays far below
    local = nn.utils.parameters_to_vector(module.parameters()).detach()
    replicas = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, local)
    if not all(torch.equal(replica, local) for replica in replicas):
        sys.exit("verify: FAILED, the ranks hold different weights")
    worst = (local - nn.utils.parameters_to_vector(twin.parameters())).abs().max().item()
    if not worst <= tolerance:
        sys.exit(f"verify: FAILED, a weight is {worst:.1e} away from single-process training")
    setup.say(
        f"verify: passed, the ranks are bitwise equal and at most {worst:.1e} away from "
        f"single-process training (allowed: {tolerance:.0e})\n"
    )
    return {"max_abs_diff": worst, "tolerance": tolerance, "passed": True}


def all_reduce_costs(device: torch.device) -> dict[str, float]:
    """Measure what all-reduces cost back to back: each takes "call_seconds" + bytes / w.

    "bytes_per_second" is w. Both come from small (4 kB) and large (8 MB) ones in turn.
    """
    watch = timing.Stopwatch(device)

    def all_reduces(count: int, tensor: torch.Tensor) -> dict[str, float]:
        watch.mark("start")
        for _ in range(count):
            dist.all_reduce(tensor)
        watch.mark("end")
        return {"seconds": watch.seconds("start", "end") / count}

    small, large = torch.zeros(2**10, device=device), torch.zeros(2**21, device=device)
    candidates = {"small": partial(all_reduces, 10, small), "large": partial(all_reduces, 1, large)}
    samples = timing.measure(candidates, steps=7, warmup=2)
    call = numpy.median(samples["small"]["seconds"])
    transfer = numpy.median(samples["large"]["seconds"]) - call
    return {"call_seconds": call, "bytes_per_second": large.nbytes / max(transfer, 1e-9)}


def count_collectives(step: Callable[[], object]) -> int:
    """Return how many collectives one more step makes."""
    step()  # in its second step torch DDP arranges its buckets anew, with two broadcasts
    with CommDebugMode() as counter:
        step()
    return counter.get_total_counts()


def benchmark(candidates: dict[str, Callable[[], dict]], args, device: torch.device) -> dict:
    """Measure candidates, as `measure` has them: "all_reduce" and "candidates" of the JSON."""
    samples = timing.measure(candidates, args.steps, args.warmup, pace_of(args))
    measured = []
    for name, of_candidate in samples.items():
        if "collectives" in of_candidate:
            calls = of_candidate.pop("collectives")[0][-1]
        else:
            calls = count_collectives(candidates[name])
        measured.append({"name": name, **of_candidate, "collectives_per_step": calls})
    return {"all_reduce": all_reduce_costs(device), "candidates": measured}


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
        step = report.percentiles(times["step_seconds"])[0]
        exposed = report.percentiles(times["exposed_comm_seconds"])[0]
        calls = times["collectives_per_step"]
        alone = calls * costs["call_seconds"] + size_bytes / costs["bytes_per_second"]
        row = [times["name"], *report.milliseconds(times["step_seconds"]), f"{tokens / step:.0f}"]
        row += [f"{1000 * exposed:.1f}", f"{100 * exposed / step:.0f} %"]
        row += [f"{1000 * alone if calls else 0:.1f}", str(calls)]
        row.append(report.ratio(times["step_seconds"], of_torch and of_torch[0]["step_seconds"]))
        rows.append(row)
    header = ["step, ms", "p50", "p75", "p90", "p95", "tokens/s"]
    report.print_table([*header, "exposed", "share", "alone", "all-reduces", "/torch DDP"], rows)
    setup.say(STEPS_LEGEND.format(1000 * costs["call_seconds"], costs["bytes_per_second"] / 1e9))
