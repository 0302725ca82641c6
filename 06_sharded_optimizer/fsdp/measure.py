"""06, FSDP: what fsdp.py verifies and measures.

fsdp.py uses it; it has no command line of its own.
"""

import inspect
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_optimizer import ADAMW, check_weights, classifier, training
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import report, setup, timing


def fully_sharded(choose_units, model: nn.Module, process_group=None) -> nn.Module:
    """torch's fully_shard with the same units."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # Nothing here writes into what a unit returns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    device = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(process_group or dist.group.WORLD, device)
    for part in choose_units(model):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def finish(model: nn.Module) -> None:
    """Complete the gradients; a class of torch does it by itself."""
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


TOLERANCE = 1e-10  # of float64 weights after hundreds of steps; rounding alone stays far below
MIXED_STEPS = 20
MIXED_TOLERANCE = 1e-6  # of float32 weights: rounded alike and summed alike, they should be equal
LEGEND = """\
Percentiles over all steps of all ranks; forward, backward with finish, optimizer: p50;
beyond no sync: forward and backward together, less its; sent: by rank 0 to its sockets in a
step; /fully_shard: ratio of the p50s, below 1 is faster."""


def verify(args, device, wrap) -> dict:
    """Train a classifier on shards, and a twin in one process on their union; compare weights.

    Then a few steps with compute_dtype=bfloat16, beside the same rounding done by hand.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *held_out = setup.load_equal_shares(args, device)

    def shards(generator):
        """Batches of 64 images for each rank, and what they are together."""
        for batch in torch.randperm(len(images), generator=generator).split(64 * world_size):
            yield [batch[start::world_size] for start in range(world_size)], batch

    twin = classifier(images, args.seed)
    model = wrap(classifier(images, args.seed + rank))  # rank 0's weights must win
    optimizer = torch.optim.Adam([*twin.parameters(), *model.parameters()], lr=1e-3)
    watch = timing.Stopwatch(device)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in (1, 2):
        for step, (of_ranks, batch) in enumerate(shards(shuffle), 1):
            optimizer.zero_grad()
            F.cross_entropy(twin(images[batch]), labels[batch]).backward()
            mine = of_ranks[rank]
            watch.mark("start")
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            model.finish_gradient_synchronization()
            watch.mark("synchronized")
            optimizer.step()
            times = {"gradients": watch.seconds("start", "synchronized")}
            report.log_step(args, epoch, step, loss, times)
        accuracy = report.evaluate(epoch, model, *held_out)
    if not hasattr(model, "gather_full_params"):
        sys.exit("error: argument --mine: verify needs its gather_full_params(), or --no-verify")
    full = model.gather_full_params()
    ours = "passed, the shards of all ranks are together"
    alone = "single-process training"
    worst = check_weights(full, twin.state_dict(), TOLERANCE, ours, alone)
    report.save(args.save, full)
    result = {"max_abs_diff": worst, "tolerance": TOLERANCE, "passed": True, "accuracy": accuracy}
    if "compute_dtype" not in inspect.signature(wrap).parameters:  # of a class of the user's own
        return result

    images = images.float()
    twin = classifier(images, args.seed, bias=False)
    model = wrap(classifier(images, args.seed, bias=False), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([*twin.parameters(), *model.parameters()], lr=0.1, momentum=0.9)
    for _, (of_ranks, _) in zip(range(MIXED_STEPS), shards(shuffle), strict=False):
        optimizer.zero_grad()
        mine = of_ranks[rank]
        F.cross_entropy(model(images[mine]).float(), labels[mine]).backward()
        model.finish_gradient_synchronization()
        for shard in of_ranks:
            F.cross_entropy(rounded(twin, images[shard]), labels[shard]).backward()
        for weight in twin.parameters():
            weight.grad /= world_size
        optimizer.step()
    full = model.gather_full_params()
    ours = f"bfloat16 passed, after {MIXED_STEPS} steps"
    by_hand = "the same rounding by hand"
    mixed = check_weights(full, twin.state_dict(), MIXED_TOLERANCE, ours, by_hand)
    setup.say()
    return result | {"bfloat16_max_abs_diff": mixed, "bfloat16_tolerance": MIXED_TOLERANCE}


def rounded(twin: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What it gives with weights and inputs in bfloat16; gradients add up in the weights' dtype."""
    weights = {name: weight.bfloat16() for name, weight in twin.named_parameters()}
    return torch.func.functional_call(twin, weights, x.bfloat16()).float()


def sent_bytes(step) -> int | None:
    """What this rank writes in one more step, to sockets too; None where the system is silent."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return None
    written = []
    for call in (dist.barrier, step):
        call()
        written.append(int(counters.read_text().partition("wchar: ")[2].split()[0]))
    return written[1] - written[0]


def benchmark(args, device, batch_shape, wrap, choose_units) -> list[dict]:
    """Time steps of a language model: no sync, torch DDP, torch fully_shard, FSDP."""
    torch_fully_shard = partial(fully_sharded, choose_units)
    wraps = {"FSDP": wrap} | setup.users_wrapper(args)
    if not args.no_baseline:
        of_torch = {"torch DDP": DistributedDataParallel, "torch fully_shard": torch_fully_shard}
        no_prefetch = {"FSDP, no prefetch": partial(wrap, prefetch=False)}
        wraps = {"no sync": None, **of_torch, **no_prefetch, **wraps}
    if args.backend == "shared" and not args.no_baseline:  # what gloo makes of the same
        with setup.without_gloo_greeting():
            gloo = dist.new_group(backend="gloo")
        wraps["fully_shard over gloo"] = partial(torch_fully_shard, process_group=gloo)
        wraps["FSDP over gloo"] = partial(wrap, process_group=gloo)
    steps = {}
    for name, how in wraps.items():
        *_, steps[name] = training(args, device, batch_shape, ADAMW, how, finish)
    samples = timing.measure(steps, args.steps, args.warmup)
    for name, step in steps.items():
        samples[name]["sent_bytes"] = sent_bytes(step)
        trace = args.trace if name == "FSDP" else None
        samples[name]["collectives_per_step"] = timing.count_collectives(step, trace)
    print_steps(samples)
    return [{"name": name, **times} for name, times in samples.items()]


def print_steps(samples: dict[str, dict]) -> None:
    """The table: a row per candidate."""

    def p50s(name):
        """Of the step's parts, in ms."""
        parts = [samples[name][f"{part}_seconds"] for part in ("forward", "backward", "optimizer")]
        return [1000 * report.percentiles(seconds)[0] for seconds in parts]

    rows = []
    for name, times in samples.items():
        parts = p50s(name)
        row = [name, *report.milliseconds(times["step_seconds"])]
        row += [f"{part:.1f}" for part in parts]
        beyond = "-"
        if "no sync" in samples:
            beyond = f"{sum(parts[:2]) - sum(p50s('no sync')[:2]):.1f}"
        sent = times["sent_bytes"]
        row += [beyond, "-" if sent is None else f"{sent / 2**20:.1f}"]
        row += [str(times["collectives_per_step"])]
        baseline = samples.get("torch fully_shard", {})
        rows.append([*row, report.ratio(times["step_seconds"], baseline.get("step_seconds"))])
    header = ["step, ms", "p50", "p75", "p90", "p95", "forward", "backward", "optimizer"]
    report.print_table([*header, "beyond no sync", "sent MB", "collectives", "/fully_shard"], rows)
    setup.say(LEGEND)
