"""06, FSDP: what each rank keeps, unsharded and with every way of sharding, and holds at most.

fsdp.py uses it; it has no command line of its own.
"""

from functools import partial

import torch.distributed as dist
from measure import finish, fully_sharded
from sharded_optimizer import ADAMW, SHARDED_ADAMW, held_parts, of_all_ranks, training
from torch.nn.parallel import DistributedDataParallel

from common import report, setup

PARTS = {  # and their colours
    "parameters": "#56B4E9",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "in flight": "#D55E00",
}
LEGEND = """\
MB: 2^20 bytes, of the rank that has most; batch: one sequence of 8 tokens;
in flight: the most that there is beside the others at any time of forward and backward.
"""


def account(args, device, wrap, choose_units) -> dict:
    """{candidate: [rank][bytes of each of PARTS]}, for AdamW."""
    candidates = {}
    if not args.no_baseline:
        ddp = partial(DistributedDataParallel, gradient_as_bucket_view=True)
        candidates["unsharded"] = ADAMW, ddp
        candidates["ShardedOptimizer"] = SHARDED_ADAMW, ddp
        candidates["torch fully_shard"] = ADAMW, partial(fully_sharded, choose_units)
    candidates["FSDP"] = ADAMW, wrap
    memory = {}
    for name, how in candidates.items():
        setup.progress(f"memory: {name}")
        memory[name] = of_all_ranks(held_bytes(args, device, *how))
    return memory


def held_bytes(args, device, make_optimizer, wrap) -> list[int]:
    """What a rank keeps, and what it holds at most beside that in forward and backward.

    The batch is one short sequence, so that activations hardly count.
    """
    trained = training(args, device, (1, 8), make_optimizer, wrap, finish)
    model, optimizer, compute_gradients, step = trained
    for _ in range(2):
        step()
    peaks = []  # the least is right: the profiler may miss what a thread of gloo gives back
    for _ in range(3):
        optimizer.zero_grad()
        peaks.append(report.peak_bytes(compute_gradients, device))
    kept = held_parts(model, optimizer)
    in_buckets = isinstance(model, DistributedDataParallel)  # gradients that are not made anew
    return [*kept, min(peaks) - (0 if in_buckets else kept[1])]


def show(result, plot):
    """The table, and the picture if there is a path for it."""
    most = {name: max(of_ranks, key=sum) for name, of_ranks in result["memory_bytes"].items()}
    rows = []
    for name, parts in most.items():
        rows.append([name, *[f"{part / 2**20:.1f}" for part in [*parts, sum(parts)]]])
    report.print_table(["MB", *PARTS, "at most"], rows)
    setup.say(LEGEND)
    if plot and dist.get_rank() == 0:
        draw(result, most, plot)
        setup.say(f"written: {plot}")


def draw(result, most, path):
    """A bar for each candidate, stacked of the parts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.5 * len(most)), layout="constrained")
    axes = figure.subplots()
    axes.invert_yaxis()
    left = [0.0] * len(most)
    for number, (part, color) in enumerate(PARTS.items()):
        widths = [parts[number] / 2**20 for parts in most.values()]
        drawn = axes.barh(list(most), widths, left=left, color=color, label=part, height=0.75)
        numbers = [f"{width:.0f}" if width > 9 else "" for width in widths]
        axes.bar_label(drawn, numbers, label_type="center", fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.bar_label(drawn, [f"{total:.0f}" for total in left], padding=5)
    axes.set_xlabel("MB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
    model = result["model"]
    what = f"{model['size']} model, {model['parameters'] / 1e6:.1f} million parameters"
    ranks = f"{model['dtype']}, AdamW, {result['world_size']} ranks"
    figure.suptitle(f"What a rank holds at most: {what}, {ranks}", fontsize=11)
    figure.savefig(path, format="png", dpi=120)
