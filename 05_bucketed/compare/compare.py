"""05: stages 02 to 05 beside each other, in one process group, step by step in turn.

Stages that run one after the other meet the machine in different moods, minutes apart. Here each
has a replica of its own, and all take turns (no sync, 02, 03, 04, 05, torch DDP, one process with
the batch of all, and again), so that their steps can be compared with each other. Two models show
what each idea is good for: `tiny` has 27 large tensors, `deep` 195 small ones.

    make compare                                                        (see also ARGS="--help")
    make compare NETWORK=1gbit,1ms                  (on an emulated network, as slow as you like)
    make compare MINE=my_ddp.py:MyDDP                              (and a class of your own)
    torchrun --standalone --nproc-per-node 2 05_bucketed/compare/compare.py

medians.py puts the results of several runs beside each other.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT), str(FOLDER), *(str(ROOT / stage) for stage in STAGES)]

import medians  # noqa: E402
import naive_ddp  # noqa: E402
from bucketed import BucketedDDP  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402

from common import report, setup  # noqa: E402
from common.timing import Stopwatch  # noqa: E402

WRAPPERS = dict(zip(STAGES, [naive_ddp.NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP], strict=True))


def read_arguments():
    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, steps=6)
    setup.add_mine(parser)
    between = "what is between the ranks; for the picture (default: the network or backend)"
    parser.add_argument("--label", metavar="TEXT", help=between)
    setup.add_plot_arguments(parser, "compare.png")
    file = setup.ROOT / "results" / "compare.json"
    if setup.can_be_written(file):
        parser.set_defaults(json=file)
    parser.set_defaults(size="mini", warmup=2)  # these two models, one after the other
    parser.set_defaults(no_baseline=False, trace=None)  # what a stage has besides
    return parser.parse_args()


def one_process(args, device, model: dict):
    """A step of rank 0 alone, with the batches of all ranks, while these wait: what DDP replaces.

    It has as many threads as a rank.
    """
    if dist.get_rank() > 0:
        return lambda: None
    shape = setup.SIZES[args.size][:5]
    with device:
        network = naive_ddp.LanguageModel(*shape).to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    batch_shape = model["batch_size"] * dist.get_world_size(), model["context_length"]
    batch = torch.randint(shape[-1], (2, *batch_shape), device=device)
    watch = Stopwatch(device)
    return lambda: naive_ddp.train_step(network, optimizer, watch, *batch)[1]


def main():
    args = read_arguments()
    wrappers = {wrapper.__name__: wrapper for wrapper in WRAPPERS.values()}
    with setup.process_group(args) as device:
        wrappers |= setup.users_wrapper(args)
        result = report.begin("05_bucketed/compare", args, device)
        result["models"] = {}
        for size in args.size.split(","):
            setup.say()
            args.size = size
            replicas = len(wrappers) + 4  # no sync, torch DDP as it is and tuned, one process
            model = report.describe(naive_ddp.LanguageModel, args, replicas)
            alone = {"one process": one_process(args, device, model)}
            candidates = naive_ddp.benchmark(wrappers, args, device, model, alone)
            result["models"][size] = {"model": model, "candidates": candidates}
        runs = {size: [medians.p50s(of_size)] for size, of_size in result["models"].items()}
        medians.print_ratios("", runs, "no sync")
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            label = args.label or args.network or args.backend
            medians.draw({size: {label: run} for size, run in runs.items()}, args.plot)


if __name__ == "__main__":
    main()
