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
from sharded_optimizer import LanguageModel
from torch import nn

from common.setup import SIZES


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


def unsharded(device, model: nn.Module, **options) -> nn.Module:
    """torch's DDP."""
    devices = [device] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, devices, **options)


def finish(model: nn.Module) -> None:
    """Complete the gradients; a class of torch does it by itself."""
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


TOLERANCE = 1e-10  # of float64 weights after hundreds of steps; rounding alone stays far below
MIXED_STEPS = 20
MIXED_TOLERANCE = 1e-6  # of float32 weights: rounded alike and summed alike, they should be equal
LEGEND = """\
Percentiles over all steps of all ranks; forward, backward with finish, optimizer: p50;
exposed: forward and backward beyond those of no sync; sent: by rank 0 to its sockets in a
step; /fully_shard: ratio of the p50s, below 1 is faster."""


def verify(args, device, wrap):
    """Train a classifier on shards, and a twin in one process on their union; compare weights.

    Then a few steps with compute_dtype=bfloat16, beside the same rounding done by hand.
    """
    from common import report
    from common.setup import load_equal_shares, say
    from common.timing import Stopwatch

    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *held_out = load_equal_shares(args, device)

    def classifier(seed, dtype=torch.float64, bias=True):
        torch.manual_seed(seed)
        hidden = [nn.Linear(images.shape[1], 50, bias), nn.ReLU(), nn.Linear(50, 50, bias)]
        return nn.Sequential(*hidden, nn.ReLU(), nn.Linear(50, 10, bias)).to(device, dtype)

    def shards(generator):
        """Batches of 64 images for each rank, and what they are together."""
        for batch in torch.randperm(len(images), generator=generator).split(64 * world_size):
            yield [batch[start::world_size] for start in range(world_size)], batch

    twin = classifier(args.seed)
    model = wrap(classifier(args.seed + rank))  # rank 0's weights must win
    optimizer = torch.optim.Adam([*twin.parameters(), *model.parameters()], lr=1e-3)
    watch = Stopwatch(device)
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
    worst = difference(full, dict(twin.named_parameters()))
    if not worst <= TOLERANCE:
        sys.exit(f"verify: FAILED, a weight is {worst:.1e} away from single-process training")
    away = f"at most {worst:.1e} away from single-process training (allowed: {TOLERANCE:.0e})"
    say(f"verify: passed, the shards of all ranks are together {away}")
    report.save(args.save, full)
    result = {"max_abs_diff": worst, "tolerance": TOLERANCE, "passed": True, "accuracy": accuracy}
    if "compute_dtype" not in inspect.signature(wrap).parameters:  # of a class of the user's own
        return result

    model = wrap(classifier(args.seed, torch.float32, bias=False), compute_dtype=torch.bfloat16)
    weights = list(classifier(args.seed, torch.float32, bias=False).parameters())
    optimizer = torch.optim.SGD([*weights, *model.parameters()], lr=0.1, momentum=0.9)
    for _, (of_ranks, _) in zip(range(MIXED_STEPS), shards(shuffle), strict=False):
        optimizer.zero_grad()
        mine = of_ranks[rank]
        F.cross_entropy(model(images[mine].float()).float(), labels[mine]).backward()
        model.finish_gradient_synchronization()
        batches = [(images[shard].float(), labels[shard]) for shard in of_ranks]
        rounded_by_hand(weights, batches)
        optimizer.step()
    by_hand = {f"{2 * number}.weight": weight for number, weight in enumerate(weights)}
    mixed = difference(model.gather_full_params(), by_hand)
    what = f"after {MIXED_STEPS} steps at most {mixed:.1e} away from the same rounding by hand"
    if not mixed <= MIXED_TOLERANCE:
        sys.exit(f"verify: FAILED, with compute_dtype=bfloat16 a weight is {what}")
    say(f"verify: bfloat16 passed, {what} (allowed: {MIXED_TOLERANCE:.0e})\n")
    return result | {"bfloat16_max_abs_diff": mixed, "bfloat16_tolerance": MIXED_TOLERANCE}


def rounded_by_hand(weights, batches):
    """The mean gradient over the ranks' batches: bfloat16 weights and gradients, float32 sums."""
    gradients = []
    for images, labels in batches:
        rounded = [weight.detach().bfloat16().requires_grad_() for weight in weights]
        x = images.bfloat16()
        for weight in rounded[:-1]:
            x = F.linear(x, weight).relu()
        loss = F.cross_entropy(F.linear(x, rounded[-1]).float(), labels)
        gradients.append(torch.autograd.grad(loss, rounded))
    for weight, *of_ranks in zip(weights, *gradients, strict=True):
        weight.grad = torch.stack(of_ranks).mean(0, dtype=torch.float32)


def difference(full: dict, expected: dict) -> float:
    """The largest deviation of any weight, on any rank."""
    of_weights = [(full[name] - weight).abs().max() for name, weight in expected.items()]
    worst = torch.stack(of_weights).max().detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def sent_bytes() -> int | None:
    """What this process has written so far, to sockets too; None where the system does not say."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return None
    return int(counters.read_text().partition("wchar: ")[2].split()[0])


def bytes_of_a_step(step) -> int | None:
    """What this rank sends in one more step."""
    dist.barrier()
    before = sent_bytes()
    step()
    dist.barrier()
    return None if before is None else sent_bytes() - before


def benchmark(args, device, batch_shape, wrap, choose_units):
    """Time steps of a language model: no sync, torch DDP, torch fully_shard, FSDP."""
    from common import setup, timing

    torch_fully_shard = partial(fully_sharded, choose_units)
    wraps = {}
    if not args.no_baseline:
        wraps = {"no sync": lambda model: model, "torch DDP": partial(unsharded, device)}
        wraps |= {"torch fully_shard": torch_fully_shard}
        wraps |= {"FSDP, no prefetch": partial(wrap, prefetch=False)}
    wraps |= {"FSDP": wrap} | setup.users_wrapper(args)
    if args.backend == "shared" and not args.no_baseline:  # what gloo makes of the same
        with setup.without_gloo_greeting():
            gloo = dist.new_group(backend="gloo")
        wraps["fully_shard over gloo"] = partial(torch_fully_shard, process_group=gloo)
        wraps["FSDP over gloo"] = partial(wrap, process_group=gloo)
    shape = SIZES[args.size][:5]
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(shape[-1], (2, *batch_shape), device=device)

    def candidate(wrap):
        """A model of its own, and the function that trains it for a step and returns its times."""
        torch.manual_seed(args.seed)
        with device:
            model = wrap(LanguageModel(*shape).to(getattr(torch, args.dtype)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        watch = timing.Stopwatch(device)
        span = torch.profiler.record_function

        def step():
            watch.mark("start")
            with span("forward"):
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
            watch.mark("loss")
            with span("backward"):
                loss.backward()
            with span("sync"):
                finish(model)
            watch.mark("synchronized")
            with span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            watch.mark("end")
            return {
                "step_seconds": watch.seconds("start", "end"),
                "forward_seconds": watch.seconds("start", "loss"),
                "backward_seconds": watch.seconds("loss", "synchronized"),
                "optimizer_seconds": watch.seconds("synchronized", "end"),
            }

        return step

    candidates = {name: candidate(wrap) for name, wrap in wraps.items()}
    samples = timing.measure(candidates, args.steps, args.warmup)
    for name, step in candidates.items():
        samples[name]["sent_bytes"] = bytes_of_a_step(step)
        trace = args.trace if name == "FSDP" else None
        samples[name]["collectives_per_step"] = timing.count_collectives(step, trace)
    print_steps(samples)
    return [{"name": name, **times} for name, times in samples.items()]


def print_steps(samples):
    """The table: a row per candidate."""
    from common import report
    from common.setup import say

    def middle(name, quantity):
        return report.percentiles(samples[name][f"{quantity}_seconds"])[0]

    rows = []
    for name, times in samples.items():
        row = [name, *report.milliseconds(times["step_seconds"])]
        parts = [middle(name, part) for part in ("forward", "backward", "optimizer")]
        row += [f"{1000 * part:.1f}" for part in parts]
        exposed = "-"
        if "no sync" in samples:
            computed = middle("no sync", "forward") + middle("no sync", "backward")
            exposed = f"{1000 * (parts[0] + parts[1] - computed):.1f}"
        sent = times["sent_bytes"]
        row += [exposed, "-" if sent is None else f"{sent / 2**20:.1f}"]
        row += [str(times["collectives_per_step"])]
        baseline = samples.get("torch fully_shard", {})
        rows.append([*row, report.ratio(times["step_seconds"], baseline.get("step_seconds"))])
    header = ["step, ms", "p50", "p75", "p90", "p95", "forward", "backward", "optimizer"]
    report.print_table([*header, "exposed", "sent MB", "collectives", "/fully_shard"], rows)
    say(LEGEND)
