"""06, FSDP: what each rank holds, part by part, unsharded and with every way of sharding.

At three moments of a step the tensors are counted. In between, during forward and backward, the
most is measured: by CUDA's allocator, on a CPU by torch's profiler, which sees every block of
memory come and go. The batch is one short sequence, so that activations hardly count.

fsdp.py uses it; it has no command line of its own.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import fully_sharded
from sharded_optimizer import LanguageModel, ShardedOptimizer
from torch import nn

from common.setup import SIZES

PARTS = {  # and their colours
    "parameters": "#56B4E9",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "in flight": "#D55E00",
    "rest": "#CCCCCC",
}
PEAK = "forward and backward"  # the moment at which a rank holds most


def most_bytes(function, device, whole_sizes: set) -> tuple[int, int]:
    """Call a function: the most bytes that there were beyond those before, and how many of them
    in blocks as large as a whole weight (on CUDA unknown: 0).
    """
    from common.memory import blocks_at_peak, peak_bytes

    if device.type == "cuda":
        return peak_bytes(function, device), 0
    blocks = blocks_at_peak(function)
    return sum(blocks), sum(size for size in blocks if size in whole_sizes)


def account(args, device, wrap) -> dict:
    """{candidate: {moment: [rank][bytes of each of PARTS]}}, for AdamW."""
    from common.setup import progress

    def unsharded(model):
        devices = [device] if device.type == "cuda" else None
        view = {"gradient_as_bucket_view": True}
        return nn.parallel.DistributedDataParallel(model, devices, **view)

    def sharded_adamw(parameters, **options):
        return ShardedOptimizer(parameters, torch.optim.AdamW, **options)

    candidates = {"FSDP": (wrap, torch.optim.AdamW)}
    if not args.no_baseline:
        candidates = {
            "unsharded": (unsharded, torch.optim.AdamW),
            "ShardedOptimizer": (unsharded, sharded_adamw),
            "torch fully_shard": (fully_sharded, torch.optim.AdamW),
        } | candidates
    memory = {}
    for name, how in candidates.items():
        progress(f"memory: {name}")
        memory[name] = account_for(args, device, *how)
    return memory


def account_for(args, device, wrap, make_optimizer) -> dict:
    """{moment: [rank][bytes of each of PARTS]} of one candidate."""
    from common.memory import held_bytes

    shape = SIZES[args.size][:5]
    torch.manual_seed(args.seed)
    with device:
        model = LanguageModel(*shape).to(getattr(torch, args.dtype))
    whole_sizes = {parameter.nbytes for parameter in model.parameters() if parameter.ndim == 2}
    model = wrap(model)
    optimizer = make_optimizer(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(shape[-1], (1, 8), device=device)
    moments = {}

    def note(moment, in_flight=0, rest=0):
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        local = getattr(optimizer, "local", optimizer)  # where ShardedOptimizer keeps its part
        state = [value for values in local.state.values() for value in values.values()]
        parts = [held_bytes(parameters), held_bytes(gradients), held_bytes(state), in_flight, rest]
        moments[moment] = [None] * dist.get_world_size()
        dist.all_gather_object(moments[moment], parts)

    def compute_gradients():
        logits = model(tokens).flatten(0, 1).float()
        F.cross_entropy(logits, tokens.flatten()).backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()

    note("model built")
    for _ in range(2):
        compute_gradients()
        optimizer.step()
        optimizer.zero_grad()
    measured = []
    for _ in range(3):
        optimizer.zero_grad()
        measured.append(most_bytes(compute_gradients, device, whole_sizes))
    # The least is right: the profiler may miss what a thread of gloo gives back.
    total, in_flight = min(measured)
    made = 0  # of the gradients, in the call that was measured
    if not isinstance(model, nn.parallel.DistributedDataParallel):  # there they stay, in buckets
        gradients = [parameter.grad for parameter in model.parameters()]
        made = held_bytes(gradient for gradient in gradients if gradient is not None)
    in_flight = min(in_flight, total - made)  # a gradient may be as large as some whole weight
    if device.type == "cuda":
        in_flight = total - made
    note(PEAK, in_flight, total - in_flight - made)
    note("before the step")
    optimizer.step()
    note("after the step")
    return moments


def theory(result) -> dict:
    """{candidate: bytes of each rank's parameters, gradients, state, and of what is in flight}."""
    itemsize = getattr(torch, result["model"]["dtype"]).itemsize
    with torch.device("meta"):
        weights = LanguageModel(*SIZES[result["model"]["size"]][:5]).parameters()
    sizes = [itemsize * weight.numel() for weight in weights]
    everything = sum(sizes)
    # At the end of backward, when all gradients are there: the last one, sent and received. In a
    # language model it is the embedding's, and the largest.
    last_gradient = 2 * max(sizes)
    ranks = result["world_size"]
    return {
        "unsharded": 4 * everything,
        "ShardedOptimizer": 2 * everything + 2 * everything / ranks,
        "torch fully_shard": 4 * everything / ranks + last_gradient,
        "FSDP": 4 * everything / ranks + last_gradient,
    }


def show(result, plot):
    """The table, and the picture if there is a path for it."""
    from common import report
    from common.setup import say

    expected = theory(result)
    rows = []
    for name, moments in result["memory_bytes"].items():
        for moment, ranks in moments.items():
            parts = max(ranks, key=sum)
            row = [f"{name}, {moment}", *[f"{part / 2**20:.1f}" for part in [*parts, sum(parts)]]]
            row += ["", ""]
            if moment == PEAK:
                without_rest = sum(parts[:-1])
                row[-2:] = [f"{expected[name] / 2**20:.1f}", f"{without_rest / expected[name]:.3f}"]
            rows.append(row)
    report.print_table(["MB", *PARTS, "all", "theory", "all but rest /theory"], rows)
    say("MB: 2^20 bytes, of the rank that has most; batch: one sequence of 8 tokens;")
    say("forward and backward: the most at any time, with the gradients that are there at the end;")
    say("in flight: blocks of a whole weight's size (gathered, its gradient, what is received);")
    say("theory: 4, 4 and 8 bytes per parameter, each divided by the ranks that share it; with")
    say("fully_shard and FSDP the largest gradient in addition, sent and received.\n")
    if plot and dist.get_rank() == 0:
        draw(result, plot)
        say(f"written: {plot}")


def draw(result, path):
    """A bar for each candidate at its peak, stacked of the parts, of the rank that has most."""
    from matplotlib.figure import Figure

    memory = result["memory_bytes"]
    figure = Figure(figsize=(9, 1.4 + 0.5 * len(memory)), layout="constrained")
    axes = figure.subplots()
    names = list(reversed(memory))
    left = [0.0] * len(names)
    for number, (part, color) in enumerate(PARTS.items()):
        widths = [max(memory[name][PEAK], key=sum)[number] / 2**20 for name in names]
        drawn = axes.barh(names, widths, left=left, color=color, label=part, height=0.75)
        numbers = [f"{width:.0f}" if width > 9 else "" for width in widths]
        axes.bar_label(drawn, numbers, label_type="center", fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for name, total in enumerate(left):
        axes.annotate(
            f"{total:.0f}", (total, name), (5, 0), textcoords="offset points", va="center"
        )
    axes.set_xlabel("MB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
    model = result["model"]
    what = f"{model['size']} model, {model['parameters'] / 1e6:.1f} million parameters"
    ranks = f"{model['dtype']}, AdamW, {result['world_size']} ranks"
    figure.suptitle(f"What a rank holds at its peak: {what}, {ranks}", fontsize=11)
    figure.savefig(path, format="png", dpi=120)
