"""06, FSDP: what ranks hold, measured and by a formula, and the harness's rows."""

import warnings
from functools import partial

import memory
import numpy
import torch
import torch.distributed as dist
from sharded_optimizer import ShardedOptimizer, of_adamw
from torch import nn

from common import ladder, report, setup


def fully_sharded(choose_units, model: nn.Module, **options) -> nn.Module:
    """Apply torch's fully_shard to the same units, each with these options of it."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # Nothing here writes into what a unit returns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    mesh = DeviceMesh.from_group(dist.group.WORLD, next(model.parameters()).device.type)
    for unit in choose_units(model):
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def torch_fsdp(choose_units) -> dict:
    """Return fully_shard as it comes, and with whole weights until backward (near ZeRO-2)."""
    shard = partial(fully_sharded, choose_units)
    return {
        "torch fully_shard": shard,
        "torch, no reshard": partial(shard, reshard_after_forward=False),
    }


def account(plot, ways: dict, args, device, result: dict) -> dict:
    """Measure what a rank holds, also with ZeRO's first stage, and draw it."""
    if not args.no_baseline:
        ddp = ways["torch DDP"]
        stage_1 = ddp._replace(optimizer=of_adamw(ShardedOptimizer))
        ways = {"torch DDP": ddp, "ShardedOptimizer": stage_1, **ways}
    memory.account(ways, args, device, result)
    if plot and setup.is_rank_0():
        draw(result["memory_bytes"], plot)
    return {}


def draw(memory_bytes: dict, path) -> None:
    """Draw a bar for each candidate, stacked of the parts."""
    most = {name: max(all_ranks, key=sum) for name, all_ranks in memory_bytes.items()}
    figure, axes = report.new_figure(9, 1.4 + 0.5 * len(most))
    axes.invert_yaxis()
    sizes = numpy.array(list(most.values())).T / 2**20  # [part][candidate]
    left = numpy.zeros(len(most))
    colors = "#56B4E9", "#E69F00", "#999999", "#D55E00"
    for part, color, widths in zip(memory.PARTS, colors, sizes, strict=True):
        bars = axes.barh(list(most), widths, left=left, color=color, label=part, height=0.75)
        left += widths
    totals = zip(left, widths, strict=True)
    ends = [f"{total:.1f} MB ({in_flight:.1f} in flight)" for total, in_flight in totals]
    axes.bar_label(bars, ends, padding=5, fontsize=9)
    axes.set_xlim(0, 1.25 * max(left))
    axes.set_xlabel("what a rank holds at most, MB")
    figure.legend(loc="outside lower center", ncols=len(memory.PARTS), frameon=False)
    report.save_figure(figure, path)


def by_formula(size: str, world_size: int) -> dict[str, list[float]]:
    """Return {candidate: bytes of each of PARTS}: 4, 4, 8 per parameter, ÷ ranks that share them.

    With FSDP three neighbours have memory in backward: one's gradients travel, and are sent and
    received; one computes, and has weights and gradients; one is gathered, by gloo into a copy.
    Then the shards of the gradients of the last two are not there yet. Without resharding all
    weights are whole until their own backward.
    """
    with torch.device("meta"):
        model = ladder.LanguageModel(*ladder.SIZES[size][:5])
    modules = [model.token_embedding, *model.layers.layers, model.head]
    units = [sum(p.nbytes for p in unit.parameters() if p.ndim >= 2) for unit in modules]
    whole = sum(p.nbytes for p in model.parameters())
    shards = [whole / world_size, whole / world_size, 2 * whole / world_size]
    resharded, whole_until_backward = [], []  # bytes in flight when a unit's gradients travel
    for last in range(2, len(units)):
        missing = sum(units[: last + 1]) / world_size
        resharded.append(2 * sum(units[last - 2 : last + 1]) - missing)
        in_backward = units[last - 1] + 2 * units[last]
        whole_until_backward.append(sum(units[:last]) + in_backward - missing)
    return {
        "DDP": [whole, whole, 2 * whole, 0],
        "ShardedOptimizer": [whole, whole, shards[2], 0],
        "torch, no reshard": [*shards, max(whole_until_backward)],
        "FSDP": [*shards, max(resharded)],
    }


def print_accounting(args) -> None:
    """Print what the formula says for each number of ranks."""
    held = {}
    for world_size in args.accounting:
        for name, parts in by_formula(args.size, world_size).items():
            held[f"{world_size} ranks, {name}"] = [parts]
    setup.say(f"{args.size} model, float32, AdamW; a rank by the formula, without activations")
    memory.print_memory(held, memory.PARTS)


def main(description: str, fsdp, choose_units) -> None:
    """Verify, measure what ranks hold and how long steps take; or print the formula's table."""
    parser = ladder.stage_parser(description, steps=5, warmup=2)  # seven rows within a minute
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    setup.add_plot_arguments(parser, "fsdp.png")
    numbers = {"type": setup.list_of(setup.whole_number(2)), "nargs": "?", "metavar": "N,N,…"}
    formula = "only what one of so many ranks would hold, by a formula (8,64,1024)"
    parser.add_argument("--accounting", **numbers, const=[8, 64, 1024], help=formula)
    args = parser.parse_args()
    if args.accounting:
        print_accounting(args)
        return
    ours = {"FSDP": fsdp, **ladder.users_rows(args)}
    others = {**torch_fsdp(choose_units), "FSDP, no prefetch": partial(fsdp, prefetch=False)}
    way = partial(ladder.Way, waits_anywhere=True)
    ours, others = [{name: way(wrap) for name, wrap in each.items()} for each in (ours, others)]
    others = ladder.torch_ddp(args) | others
    ladder.main(args, ours, others, "torch fully_shard", partial(account, args.plot))
