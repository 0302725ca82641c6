r"""06, memory: what the sharded optimizer saves, accounted for around one optimizer step.

Every rank holds parameters, gradients and optimizer state. This script trains a language model for
two steps with AdamW and with ShardedOptimizer, counts the bytes of each part, measures the peak,
and draws both: sharded over N ranks, the state is an N-th, and the peak falls by as much.

    make 06_sharded_optimizer/memory NPROC=2                              (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 06_sharded_optimizer/memory.py             (one host)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        06_sharded_optimizer/memory.py                                  (two hosts; R is 0 on HOST0)

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, section 3.1; Stanford CS336, assignment 2, "Optimizer state sharding accounting".
"""

import os
import resource
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

MOMENTS = ["model built", "before the step", "after the step"]
PARTS = {  # and their colours
    "parameters": "#56B4E9",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "rest": "#CCCCCC",
}


def peak_bytes(device):
    """The most memory since the last call, of CUDA's allocator or resident in this process.

    Where the resident size cannot be reset (not Linux), it is the most so far.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    if os.access("/proc/self/clear_refs", os.W_OK):
        words = Path("/proc/self/status").read_text().split()
        peak = int(words[words.index("VmHWM:") + 1]) * 1024
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def account(stage, args, device, batch_shape, make_optimizer):
    """Memory around the second optimizer step (the first one makes the state), in bytes.

    Returns {moment: [rank][parameters, gradients, optimizer state, rest]}. The rest is the peak
    less the other three.
    """
    moments = {}

    def snapshot(moment):
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        parts = [
            sum(parameter.nbytes for parameter in parameters),
            sum(gradient.nbytes for gradient in gradients),
            stage.state_bytes(optimizer)[dist.get_rank()],
        ]
        parts.append(peak_bytes(device) - sum(parts))
        moments[moment] = [None] * dist.get_world_size()
        dist.all_gather_object(moments[moment], parts)

    def compute_gradients():
        logits = model(tokens).flatten(0, 1).float()
        F.cross_entropy(logits, targets.flatten()).backward()
        stage.average_gradients(model)

    shape = stage.SIZES[args.size][:5]
    torch.manual_seed(args.seed)
    peak_bytes(device)
    with device:
        model = stage.LanguageModel(*shape).to(getattr(torch, args.dtype))
    torch.manual_seed(args.seed + dist.get_rank())
    tokens, targets = torch.randint(shape[-1], (2, *batch_shape), device=device)
    optimizer = make_optimizer(model.parameters(), lr=1e-4, fused=True)
    snapshot("model built")
    compute_gradients()
    optimizer.step()
    optimizer.zero_grad()
    compute_gradients()
    snapshot("before the step")
    optimizer.step()
    snapshot("after the step")
    return moments


def print_memory(memory, device):
    """The table: a row for each candidate, moment and rank."""
    from common import report
    from common.setup import say

    rows = []
    for name, moments in memory.items():
        for moment, ranks in moments.items():
            for rank, parts in enumerate(ranks):
                megabytes = [f"{part / 2**20:.1f}" for part in [*parts, sum(parts)]]
                rows.append([f"{name}, {moment}", str(rank), *megabytes])
    report.print_table(["MB", "rank", *PARTS, "peak"], rows)
    source = "resident size, with the interpreter and its libraries"
    if device.type == "cuda":
        source = "of CUDA's allocator"
    say(f"MB: 2^20 bytes; peak since the moment before: {source};")
    say("rest: peak less the three before it.")


def draw(memory, what, path):
    """A panel for each moment, in it a bar for each candidate and rank, stacked of the parts."""
    from matplotlib.figure import Figure

    bars = []
    for name in reversed(memory):  # drawn from the bottom up
        for rank in reversed(range(dist.get_world_size())):
            bars.append((name, rank))
    labels = [f"{name}, rank {rank}" for name, rank in bars]

    figure = Figure(figsize=(10, 2 + 0.4 * len(bars)), layout="constrained")
    panels = figure.subplots(1, len(MOMENTS), sharex=True, sharey=True)
    for panel, moment in zip(panels, MOMENTS, strict=True):
        left = [0.0] * len(bars)
        for part, (label, color) in enumerate(PARTS.items()):
            widths = [memory[name][moment][rank][part] / 2**20 for name, rank in bars]
            drawn = panel.barh(labels, widths, left=left, color=color, label=label)
            numbers = [f"{width:.0f}" if width > 0 else "" for width in widths]
            panel.bar_label(drawn, numbers, label_type="center", fontsize=8)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        panel.set(title=moment, xlabel="MB")
    legend = panels[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=len(PARTS), frameon=False)
    figure.suptitle(f"Peak memory of each rank, AdamW\n{what}", fontsize=11)
    figure.savefig(path, format="png", dpi=150)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import sharded_optimizer as stage

        from common import report, setup
    except ModuleNotFoundError as error:
        needed = "copy the repository's folder common/ and sharded_optimizer.py beside this script"
        sys.exit(f"error: {error}: {needed}")

    parser = setup.Parser(__doc__)
    add = parser.add_argument
    one = setup.whole_number(1)
    add("--size", choices=stage.SIZES, default="tiny", help="of the language model")
    add("--batch-size", type=one, help="sequences per rank and step (default: the size's)")
    add("--context-length", type=one, help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--seed", type=setup.whole_number(0), default=0)
    add("--no-baseline", action="store_true", help="without the unsharded AdamW, to save memory")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    add("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    setup.add_process_group_arguments(parser)
    parser.set_defaults(steps=2, warmup=0)
    args = parser.parse_args()

    with setup.process_group(args) as device:
        result = report.begin(f"{folder.name}/memory", args, device)
        model = report.describe(stage.LanguageModel, stage.SIZES, args, replicas=1)
        batch_shape = model["batch_size"], model["context_length"]
        # Sharded first: it needs less, so the other's peak stands out even where no peak is reset.
        sharded = partial(stage.ShardedOptimizer, optimizer_cls=torch.optim.AdamW)
        memory = {"sharded": account(stage, args, device, batch_shape, sharded)}
        if not args.no_baseline:
            unsharded = account(stage, args, device, batch_shape, torch.optim.AdamW)
            memory = {"unsharded": unsharded, **memory}
        print_memory(memory, device)
        if args.plot and dist.get_rank() == 0:
            ranks = f"{result['world_size']} ranks, {result['backend']} on {result['device']}"
            millions = f"{model['parameters'] / 1e6:.1f} million parameters"
            draw(memory, f"{args.size} model, {millions}, {args.dtype}, {ranks}", args.plot)
            setup.say(f"written: {args.plot}")
        report.write_json(args.json, result | {"model": model, "memory_bytes": memory})


if __name__ == "__main__":
    main()
