"""06, FSDP: verify it, and account for what ranks hold, measured and by a formula, and for time."""

import sys
import warnings
from functools import partial

import numpy
import sharded_optimizer as stage
import torch
import torch.distributed as dist
from sharded_optimizer import ADAMW, Trainee
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import ladder, report, setup
from common.timing import NO_COMMUNICATION, gather


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


def finish(model: nn.Module) -> None:
    """Complete the gradients; a class of torch does it by itself."""
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


TOLERANCE = 1e-10  # of float64 weights after hundreds of steps; rounding alone stays far below
PARTS = ["parameters", "gradients", "optimizer state", "in flight"]
MEMORY_LEGEND = """\
MB: 2^20 bytes, of the rank that has most; batch: one sequence of 8 tokens;
in flight: the peak of everything else during forward and backward.
"""
BEYOND = """\
− no comm.: p50 of how much longer it takes than the same round's step without communication,
because these rows wait within forward and backward; optimizer: p50 of step();"""


def verify(name, wrap, args, device) -> dict:
    """Train a classifier on shards, and a twin that every rank has whole; compare their weights."""
    setup.say(f"verify: {name}")
    data = ladder.load_equal_shares(args, device)
    model = wrap(ladder.classifier(args.seed + dist.get_rank(), data[0]))  # rank 0's has to win
    twin = ladder.classifier(args.seed, data[0])
    twins = []
    for each, average in ((model, finish), (twin, stage.average_gradients)):
        twins.append((each, torch.optim.Adam(each.parameters(), lr=1e-3), average))
    stage.train_twins(twins, data, args.seed)
    if not hasattr(model, "gather_full_params"):
        sys.exit("error: argument --mine: verify needs its gather_full_params(), or --no-verify")
    theirs = "training with whole weights"
    return stage.compare(model.gather_full_params(), twin.state_dict(), TOLERANCE, theirs)


def benchmark(args, device, model, wraps, choose_units) -> list[dict]:
    """Time steps of a language model: no communication, torch's DDP and fully_shard, FSDP."""
    if not args.no_baseline:
        baselines = {NO_COMMUNICATION: None, **ladder.torch_ddp(args)}
        no_prefetch = {"FSDP, no prefetch": partial(wraps["FSDP"], prefetch=False)}
        wraps = baselines | torch_fsdp(choose_units) | no_prefetch | wraps
    batch_shape = model["batch_size"], model["context_length"]
    candidates = {}
    for name, wrap in wraps.items():
        candidates[name] = Trainee(args, device, batch_shape, ADAMW, wrap, finish)
    samples = stage.measure_steps(candidates, args)
    note_beyond_floor(samples)
    return stage.print_steps(samples, "torch fully_shard", "− no comm.", BEYOND)


def note_beyond_floor(samples: dict[str, dict]) -> None:
    """Set what is exposed to the step's length beyond the same round's without communication.

    FSDP waits within forward and backward, where no mark tells. It is nan without such a row.
    """
    floor = numpy.nan
    if NO_COMMUNICATION in samples:
        floor = numpy.array(samples[NO_COMMUNICATION]["step_seconds"])
    for times in samples.values():
        times["exposed_comm_seconds"] = (numpy.array(times["step_seconds"]) - floor).tolist()


def measure_memory(args, device, wrap, choose_units) -> dict:
    """Return {candidate: [rank][bytes of each of PARTS]}, for AdamW."""
    ddp = partial(DistributedDataParallel, gradient_as_bucket_view=True)
    candidates = {"unsharded": (ADAMW, ddp), "ShardedOptimizer": (stage.SHARDED_ADAMW, ddp)}
    candidates |= {name: (ADAMW, shard) for name, shard in torch_fsdp(choose_units).items()}
    candidates["FSDP"] = ADAMW, wrap
    memory = {}
    for name, (make_optimizer, wrapper) in candidates.items():
        if name == "FSDP" or not args.no_baseline:
            trainee = Trainee(args, device, (1, 8), make_optimizer, wrapper, finish)
            memory[name] = gather(kept_and_in_flight(trainee, device))
    return memory


def kept_and_in_flight(trainee: Trainee, device) -> list[int]:
    """Return what a rank keeps, and what it holds at most beside that in forward and backward.

    The batch is one short sequence, so that activations hardly count.
    """
    for _ in range(2):
        trainee.step()
    peaks = []
    for _ in range(3):
        trainee.optimizer.zero_grad()
        peaks.append(report.peak_bytes(trainee.compute_gradients, device))
    kept = trainee.held_parts()
    is_ddp = isinstance(trainee.model, DistributedDataParallel)  # its gradients stay in buckets
    return [*kept, min(peaks) - (0 if is_ddp else kept[1])]  # on a busy machine gloo lags


def draw(result: dict, path) -> None:
    """Draw a bar for each candidate, stacked of the parts."""
    most = {name: max(all_ranks, key=sum) for name, all_ranks in result["memory_bytes"].items()}
    figure, axes = report.new_figure(9, 1.4 + 0.5 * len(most))
    axes.invert_yaxis()
    sizes = numpy.array(list(most.values())).T / 2**20  # [part][candidate]
    left = numpy.zeros(len(most))
    colors = "#56B4E9", "#E69F00", "#999999", "#D55E00"
    for part, color, widths in zip(PARTS, colors, sizes, strict=True):
        bars = axes.barh(list(most), widths, left=left, color=color, label=part, height=0.75)
        left += widths
    totals = zip(left, widths, strict=True)
    ends = [f"{total:.1f} MB ({in_flight:.1f} in flight)" for total, in_flight in totals]
    axes.bar_label(bars, ends, padding=5, fontsize=9)
    axes.set_xlim(0, 1.25 * max(left))
    axes.set_xlabel("what a rank holds at most, MB")
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
    report.save_figure(figure, path)


def by_formula(size: str, world_size: int) -> dict[str, list[float]]:
    """Return {candidate: bytes of each of PARTS}: 4, 4, 8 per parameter, ÷ ranks that share them.

    With FSDP three neighbours have memory in backward: one's gradients travel, and are sent and
    received; one computes, and has weights and gradients; one is gathered, by gloo into a copy.
    Then the shards of the gradients of the last two are not there yet. Without resharding all
    weights are whole until their own backward.
    """
    with torch.device("meta"):
        model = stage.LanguageModel(*ladder.SIZES[size][:5])
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
    stage.print_memory(held, PARTS)


def main(description: str, wrap, choose_units) -> None:
    """Verify, measure what ranks hold and how long steps take; or print the formula's table."""
    parser = setup.Parser(description)
    ladder.add_training_arguments(parser, steps=5)
    ladder.add_verify_arguments(parser)
    parser.add_argument("--mine", metavar="FILE.py:NAME", help="measure your own class, too")
    setup.add_plot_arguments(parser, "fsdp.png")
    parser.set_defaults(warmup=2)  # six candidates, and all within a minute
    numbers = {"type": setup.list_of(setup.whole_number(2)), "nargs": "?", "metavar": "N,N,…"}
    formula = "only what one of so many ranks would hold, by a formula (8,64,1024)"
    parser.add_argument("--accounting", **numbers, const=[8, 64, 1024], help=formula)
    args = parser.parse_args()
    if args.accounting:
        print_accounting(args)
        return
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        result = report.begin("06_sharded_optimizer/fsdp", args, device)
        wraps = {"FSDP": wrap}
        if args.mine:
            sys.path.append(str(setup.ROOT / "05_bucketed" / "compare"))
            from users_class import users_rows

            wraps |= users_rows(args.mine)
        model = result["model"] = ladder.describe(stage.LanguageModel, args)
        result["verify"] = {}
        if not args.no_verify:
            for name, each in wraps.items():
                result["verify"][name] = verify(name, each, args, device)
        result["memory_bytes"] = measure_memory(args, device, wrap, choose_units)
        stage.print_memory(result["memory_bytes"], PARTS)
        setup.say(MEMORY_LEGEND)
        if args.plot and dist.get_rank() == 0:
            draw(result, args.plot)
            setup.say(f"written: {args.plot}")
        result["candidates"] = benchmark(args, device, model, wraps, choose_units)
        report.write_json(args.json, result)
