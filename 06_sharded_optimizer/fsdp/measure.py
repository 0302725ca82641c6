"""06, FSDP: what fsdp.py verifies and measures; what ranks hold, measured and by a formula."""

import sys
import warnings
from functools import partial

import numpy
import sharded_optimizer as stage
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_optimizer import ADAMW, Training
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import report, setup, timing


def fully_sharded(choose_units, model: nn.Module, **options) -> nn.Module:
    """torch's fully_shard with the same units, each with these options of it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # Nothing here writes into what a unit returns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = DeviceMesh.from_group(dist.group.WORLD, next(model.parameters()).device.type)
    for part in choose_units(model):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def torch_fsdp(choose_units) -> dict:
    """fully_shard as it comes, and with whole weights from forward to backward (near ZeRO-2)."""
    shard = partial(fully_sharded, choose_units)
    return {
        "torch fully_shard": shard,
        "torch, no reshard": partial(shard, reshard_after_forward=False),
    }


def finish(model: nn.Module) -> None:
    """Complete the gradients; a class of torch does it by itself."""
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


TOLERANCE = 1e-10  # of float64 weights after hundreds of steps; rounding alone stays far below
LEGEND = """\
Percentiles over all steps of all ranks; forward, backward with finish, optimizer: p50; sent: by
rank 0 to its sockets in a step; /fully_shard: ratio of the p50s, below 1 is faster."""


def verify(args, device, wrap) -> dict:
    """Train a classifier on shards, and a twin in one process on their union; compare weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *held_out = setup.load_equal_shares(args, device)
    twin = setup.classifier(args.seed, images)
    model = wrap(setup.classifier(args.seed + rank, images))  # rank 0's weights must win
    optimizer = torch.optim.Adam([*twin.parameters(), *model.parameters()], lr=1e-3)
    watch = timing.Stopwatch(device)
    shuffle = torch.Generator().manual_seed(args.seed)
    for epoch in (1, 2):
        order = torch.randperm(len(images), generator=shuffle)
        for step, union in enumerate(order.split(64 * world_size), 1):
            shard = union[rank::world_size]
            optimizer.zero_grad()
            F.cross_entropy(twin(images[union]), labels[union]).backward()
            watch.mark("start")
            loss = F.cross_entropy(model(images[shard]), labels[shard])
            loss.backward()
            model.finish_gradient_synchronization()
            watch.mark("synchronized")
            optimizer.step()
            seconds = watch.seconds("start", "synchronized")
            report.log_step(args, epoch, step, loss, {"gradients": seconds})
        accuracy = report.evaluate(epoch, model, *held_out)
    if not hasattr(model, "gather_full_params"):
        sys.exit("error: argument --mine: verify needs its gather_full_params(), or --no-verify")
    full = model.gather_full_params()
    expected = twin.state_dict()
    worst = stage.largest_distance(full, expected, TOLERANCE, "single-process training")
    setup.say(
        f"verify: passed, the shards of all ranks are together at most {worst:.1e} away from"
        f" single-process training (allowed: {TOLERANCE:.0e})\n"
    )
    return {"max_abs_diff": worst, "tolerance": TOLERANCE, "passed": True, "accuracy": accuracy}


def benchmark(args, device, model, wraps, choose_units) -> list[dict]:
    """Time steps of a language model: no communication, torch's DDP and fully_shard, FSDP."""
    if not args.no_baseline:
        baselines = {"no communication": None, "torch DDP": DistributedDataParallel}
        no_prefetch = {"FSDP, no prefetch": partial(wraps["FSDP"], prefetch=False)}
        wraps = baselines | torch_fsdp(choose_units) | no_prefetch | wraps
    batch_shape = model["batch_size"], model["context_length"]
    steps = {}
    for name, wrap in wraps.items():
        steps[name] = Training(args, device, batch_shape, ADAMW, wrap, finish).step
    samples = timing.measure(steps, args.steps, args.warmup, setup.wire())
    for name, step in steps.items():
        samples[name]["sent_bytes"] = stage.sent_bytes(step)
        samples[name]["collectives_per_step"] = timing.count_collectives(step)
    timing.profile(steps, args.trace)
    print_steps(samples, setup.wire().dilation if setup.wire() else 1.0)
    return [{"name": name, **times} for name, times in samples.items()]


def print_steps(samples: dict[str, dict], dilation: float) -> None:
    """The table: a row per candidate; its times are ÷ dilation."""
    baseline = samples.get("torch fully_shard", {}).get("step_seconds")
    rows = []
    for name, times in samples.items():
        row = [name, *report.milliseconds(numpy.array(times["step_seconds"]) / dilation)]
        for part in ("forward", "backward", "optimizer"):
            p50 = report.percentiles(times[f"{part}_seconds"])[0]
            row.append(f"{1000 * p50 / dilation:.1f}")
        row.append("-" if times["sent_bytes"] is None else f"{times['sent_bytes'] / 2**20:.1f}")
        row.append(str(times["collectives_per_step"]))
        rows.append([*row, report.ratio(times["step_seconds"], baseline)])
    header = ["step, ms", "p50", "p75", "p90", "p95", "forward", "backward", "optimizer"]
    report.print_table([*header, "sent MB", "collectives", "/fully_shard"], rows)
    setup.say(LEGEND)


PARTS = "parameters", "gradients", "optimizer state", "in flight"
MEMORY_LEGEND = """\
MB: 2^20 bytes, of the rank that has most; batch: one sequence of 8 tokens;
in flight: the peak of everything else during forward and backward.
"""


def account(args, device, wrap, choose_units) -> dict:
    """{candidate: [rank][bytes of each of PARTS]}, for AdamW."""
    ddp = partial(DistributedDataParallel, gradient_as_bucket_view=True)
    candidates = {"unsharded": (ADAMW, ddp), "ShardedOptimizer": (stage.SHARDED_ADAMW, ddp)}
    candidates |= {name: (ADAMW, shard) for name, shard in torch_fsdp(choose_units).items()}
    candidates["FSDP"] = ADAMW, wrap
    memory = {}
    for name, (make_optimizer, wrapper) in candidates.items():
        if name == "FSDP" or not args.no_baseline:
            training = Training(args, device, (1, 8), make_optimizer, wrapper, finish)
            memory[name] = stage.gather_objects(held_bytes(training, device))
    return memory


def held_bytes(training: Training, device) -> list[int]:
    """What a rank keeps, and what it holds at most beside that in forward and backward.

    The batch is one short sequence, so that activations hardly count.
    """
    for _ in range(2):
        training.step()
    peaks = []  # the profiler may miss what gloo gives back, or gloo be quicker: the median
    for _ in range(3):
        training.optimizer.zero_grad()
        peaks.append(report.peak_bytes(training.compute_gradients, device))
    kept = training.held_parts()
    is_ddp = isinstance(training.model, DistributedDataParallel)  # its gradients stay in buckets
    return [*kept, sorted(peaks)[1] - (0 if is_ddp else kept[1])]


def print_memory(result, plot):
    """The table, and the picture if there is a path for it."""
    most = {name: max(all_ranks, key=sum) for name, all_ranks in result["memory_bytes"].items()}
    print_parts(most, "{:.1f}")
    setup.say(MEMORY_LEGEND)
    if plot and dist.get_rank() == 0:
        draw(result, most, plot)
        setup.say(f"written: {plot}")


def print_parts(held: dict[str, list[int]], number: str) -> None:
    rows = []
    for name, parts in held.items():
        rows.append([name, *[number.format(part / 2**20) for part in [*parts, sum(parts)]]])
    report.print_table(["MB", *PARTS, "at most"], rows)


def draw(result, most, path):
    """A bar for each candidate, stacked of the parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.5 * len(most)), layout="constrained")
    axes = figure.subplots()
    axes.invert_yaxis()
    left = [0.0] * len(most)
    colors = "#56B4E9", "#E69F00", "#999999", "#D55E00"
    for number, (part, color) in enumerate(zip(PARTS, colors, strict=True)):
        widths = [parts[number] / 2**20 for parts in most.values()]
        drawn = axes.barh(list(most), widths, left=left, color=color, label=part, height=0.75)
        numbers = [f"{width:.1f}" if number < 3 else "" for width in widths]
        axes.bar_label(drawn, numbers, label_type="center", fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    totals = zip(left, widths, strict=True)
    ends = [f"{total:.1f}, {in_flight:.1f} of them in flight" for total, in_flight in totals]
    axes.bar_label(drawn, ends, padding=5, fontsize=9)
    axes.set_xlim(0, 1.25 * max(left))
    axes.set_xlabel("MB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
    what = f"{result['model']['size']} model, AdamW, {result['world_size']} ranks"
    figure.suptitle(f"What a rank holds at most: {what}", fontsize=11)
    figure.savefig(path, format="png", dpi=120)


def by_formula(size: str, world_size: int) -> dict[str, list[float]]:
    """{candidate: bytes of each of PARTS}: 4, 4, 8 per parameter, divided by ranks that share them.

    With FSDP three neighbours have memory in backward: one's gradients travel, and are sent and
    received; one computes, and has weights and gradients; one is gathered, by gloo into a copy.
    Then the shards of the gradients of the last two are not there yet.
    """
    with torch.device("meta"):
        model = stage.LanguageModel(*setup.SIZES[size][:5])
    modules = [model.token_embedding, *model.layers.layers, model.head]
    units = [sum(p.nbytes for p in part.parameters() if p.ndim >= 2) for part in modules]
    whole = sum(p.nbytes for p in model.parameters())
    shards = [whole / world_size, whole / world_size, 2 * whole / world_size]
    moments = []
    for last in range(2, len(units)):
        moments.append(2 * sum(units[last - 2 : last + 1]) - sum(units[: last + 1]) / world_size)
    return {
        "DDP": [whole, whole, 2 * whole, 0],
        "ShardedOptimizer": [whole, whole, shards[2], 0],
        "fully_shard, no reshard": [*shards, whole],
        "FSDP": [*shards, max(moments)],
    }


def print_accounting(args) -> None:
    """A table of what the formula says, for each number of ranks."""
    held = {}
    for world_size in args.accounting:
        for name, parts in by_formula(args.size, world_size).items():
            held[f"{world_size} ranks, {name}"] = parts
    setup.say(f"{args.size} model, float32, AdamW; a rank by the formula, without activations")
    print_parts(held, "{:,.0f}")


def main(description: str, wrap, choose_units) -> None:
    """The script: verify, what ranks hold, the benchmark; or the formula's table alone."""
    parser = setup.Parser(description)
    setup.add_training_arguments(parser, steps=5)
    setup.add_verify_arguments(parser)
    setup.add_mine(parser)
    setup.add_plot_arguments(parser, "fsdp.png")
    parser.set_defaults(warmup=2)  # five candidates, and all within a minute
    numbers = {"type": setup.list_of(setup.whole_number(2)), "nargs": "?", "metavar": "N,N,…"}
    formula = "only what one of so many ranks would hold, by a formula (8,64,1024)"
    parser.add_argument("--accounting", **numbers, const=[8, 64, 1024], help=formula)
    args = parser.parse_args()
    if args.accounting:
        print_accounting(args)
        return
    with setup.process_group(args.device, args.backend, args.timeout, args.network) as device:
        result = report.begin("06_sharded_optimizer/fsdp", args, device)
        wraps = {"FSDP": wrap} | setup.users_class(args)
        replicas = len(wraps) if args.no_baseline else len(wraps) + 4
        model = result["model"] = report.describe(stage.LanguageModel, args, replicas)
        result["verify"] = None
        if not args.no_verify:
            for name in reversed(wraps):
                if args.mine:
                    setup.say(f"verify: {name}")
                result["verify"] = verify(args, device, wraps[name])
        result["memory_bytes"] = account(args, device, wrap, choose_units)
        print_memory(result, args.plot)
        result["candidates"] = benchmark(args, device, model, wraps, choose_units)
        report.write_json(args.json, result)
