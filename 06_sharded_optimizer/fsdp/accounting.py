"""06, FSDP: compared with torch's; what ranks hold, measured and by a formula."""

import warnings
from functools import partial

import memory
import numpy
import timeline
import torch
import torch.distributed as dist
from sharded_optimizer import ShardedOptimizer, of_adamw
from torch import nn
from users_class import users_rows

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


def torch_fsdp(choose_units) -> dict[str, ladder.Way]:
    """Return fully_shard as it comes, and with whole weights until backward (near ZeRO-2)."""
    shards = partial(ladder.Way, waits_noted=timeline.waits_noted)
    as_it_comes = partial(fully_sharded, choose_units)
    return {
        "torch fully_shard": shards(as_it_comes),
        "torch, no reshard": shards(partial(as_it_comes, reshard_after_forward=False)),
    }


def account(plot, ways: dict, train_step, args, device, result: dict) -> None:
    """Measure what a rank holds, also with ZeRO's first stage, and draw it."""
    ddp = ways.get(ladder.TORCH_DDP)
    if ddp:
        stage_1 = ddp._replace(optimizer=of_adamw(ShardedOptimizer))
        ways = {ladder.TORCH_DDP: ddp, "ShardedOptimizer": stage_1, **ways}
    memory.account(ways, train_step, args, device, result)
    if plot and setup.is_rank_0():
        draw(result["memory"], plot)


def draw(measured: list[dict], path) -> None:
    """Draw a bar for each row, stacked of the parts, of the rank that has most."""
    most = {row["name"]: max(row["held_bytes"], key=memory.total) for row in measured}
    figure, axes = report.new_figure(9, 1.4 + 0.5 * len(most))
    axes.invert_yaxis()
    left = numpy.zeros(len(most))
    colors = "#56B4E9", "#E69F00", "#999999", "#D55E00"
    for part, color in zip(memory.Held._fields, colors, strict=True):
        widths = numpy.array([held[part] for held in most.values()]) / 2**20
        label = part.replace("_", " ")
        bars = axes.barh(list(most), widths, left=left, color=color, label=label, height=0.75)
        left += widths
    totals = zip(left, widths, strict=True)
    ends = [f"{total:.1f} MB ({in_flight:.1f} in flight)" for total, in_flight in totals]
    axes.bar_label(bars, ends, padding=5, fontsize=9)
    axes.set_xlim(0, 1.25 * max(left))
    axes.set_xlabel("what a rank holds at most, MB")
    figure.legend(loc="outside lower center", ncols=len(colors), frameon=False)
    report.save_figure(figure, path)


def by_formula(size: str, world_size: int) -> dict[str, memory.Held]:
    """Return, for each row, the bytes that a rank holds.

    A parameter has 4 bytes of weight, 4 of gradient and 8 of AdamW's state, divided by the ranks
    that share them. With FSDP three neighbours have memory in backward: one's gradients travel,
    and are sent and received; one computes, and has weights and gradients; one is gathered, by
    gloo into a copy. Then the shards of the gradients of the last two are not there yet. Without
    resharding all weights are whole until their own backward.
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
        "DDP": memory.Held(whole, whole, 2 * whole, 0),
        "ShardedOptimizer": memory.Held(whole, whole, shards[2], 0),
        "torch, no reshard": memory.Held(*shards, max(whole_until_backward)),
        "FSDP": memory.Held(*shards, max(resharded)),
    }


def print_accounting(args) -> None:
    """Print what the formula says for each number of ranks."""
    rows = []
    for world_size in args.accounting:
        for name, held in by_formula(args.size, world_size).items():
            rows.append({"name": f"{world_size} ranks, {name}", "held_bytes": [held._asdict()]})
    setup.say(f"{args.size} model, float32, AdamW; a rank by the formula, without activations")
    memory.print_memory(rows)


def main(description: str, fsdp, choose_units, train_step) -> None:
    """Verify, measure what ranks hold and how long steps take; or print the formula's table."""
    parser = ladder.stage_parser(description, steps=5, warmup=2)  # seven rows within a minute
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    setup.add_plot_arguments(parser, "fsdp.png")
    timeline.add_argument(parser)
    numbers = {"type": setup.list_of(setup.whole_number(2)), "nargs": "?", "metavar": "N,N,…"}
    formula = "only what one of so many ranks would hold, by a formula (8,64,1024)"
    parser.add_argument("--accounting", **numbers, const=[8, 64, 1024], help=formula)
    args = parser.parse_args()
    shards = partial(ladder.Way, waits_noted=timeline.waits_noted)
    without_prefetch = {"FSDP, no prefetch": shards(partial(fsdp, prefetch=False))}
    if args.accounting:
        print_accounting(args)
    elif args.timeline:
        ways = {**without_prefetch, "FSDP": shards(fsdp)}
        timeline.draw_ways(args, train_step, ways, "Prefetching hides most of what FSDP waits for")
    else:
        mine = users_rows(args.mine)
        ours = {name: shards(wrap) for name, wrap in {"FSDP": fsdp, **mine}.items()}
        others = ladder.torch_ddp() | torch_fsdp(choose_units) | without_prefetch
        ladder.main(args, train_step, ours, others, partial(account, args.plot))
