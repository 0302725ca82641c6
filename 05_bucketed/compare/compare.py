"""05: stages 02 to 05 beside each other, in one process group, step by step in turn.

Stages that run one after the other meet the machine in different moods, minutes apart. Here each
has a replica of its own, and all take turns (no communication, 02, 03, 04, 05, torch DDP as it is
and tuned, one process with the batch of all, and again), so that they can be compared.

    make compare                                                        (see also ARGS="--help")
    make compare NETWORK=1gbit,1ms                  (on an emulated network, as slow as you like)
    make compare MINE=my_ddp.py:MyDDP                              (and a class of your own)
    torchrun --standalone --nproc-per-node 2 05_bucketed/compare/compare.py

medians.py puts the results of several runs beside each other.
"""

import inspect
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT), str(FOLDER), *(str(ROOT / stage) for stage in STAGES)]

import medians  # noqa: E402
import naive_ddp  # noqa: E402
from bucketed import BucketedDDP  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402

from common import report, setup, timing  # noqa: E402


def read_arguments():
    parser = setup.Parser(__doc__)
    setup.add_training_arguments(parser, steps=6)
    setup.add_mine(parser)
    between = "what is between the ranks; for the table and the picture (default: the network)"
    parser.add_argument("--label", metavar="TEXT", help=between)
    setup.add_plot_arguments(parser, "compare.png")
    parser.set_defaults(warmup=2)
    args = parser.parse_args()
    args.json = args.json or setup.result_file("compare.json")
    return args


def tuned_torch_ddp(args) -> dict:
    """torch's DDP with options that save copies and calls, where every step is like the first."""
    options = {"gradient_as_bucket_view": True, "static_graph": True}
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        options["batched_grad_copy"] = True  # older torch lacks it
    return {"torch DDP, tuned": partial(timing.torch_ddp(args)["torch DDP"], **options)}


def no_communication(module: torch.nn.Module) -> torch.nn.Module:
    return module


def one_process(args, device, model: dict):
    """A step of rank 0 alone, with the batches of all ranks, while these wait: what DDP replaces.

    It has as many threads as a rank.
    """
    if dist.get_rank() > 0:
        return lambda: None
    whole_batch = model | {"batch_size": model["batch_size"] * dist.get_world_size()}
    return naive_ddp.make_step(no_communication, args, device, whole_batch)


def main():
    args = read_arguments()
    bucketed = partial(BucketedDDP, bucket_size_mb=args.bucket_size_mb)
    with setup.process_group(args) as device:
        wrappers = {"no communication": no_communication}
        wrappers |= {"NaiveDDP": naive_ddp.NaiveDDP, "FlatDDP": FlatDDP, "OverlapDDP": OverlapDDP}
        wrappers |= {"BucketedDDP": bucketed, **setup.users_class(args)}
        wrappers |= timing.torch_ddp(args) | tuned_torch_ddp(args)
        result = report.begin("05_bucketed/compare", args, device)
        model = result["model"] = report.describe(naive_ddp.LanguageModel, args, len(wrappers) + 1)
        steps = {}
        for name, wrap in wrappers.items():
            steps[name] = naive_ddp.make_step(wrap, args, device, model)
        steps["one process"] = one_process(args, device, model)
        result |= timing.benchmark(steps, args, device)
        report.print_steps(result)
        is_one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        label = "loopback" if is_one_host and args.backend == "gloo" else args.backend
        if args.network:
            label = report.in_words(args.network).replace(" and ", ", ")
        columns = {args.label or label: [medians.p50s(result)]}
        setup.say()
        medians.print_ratios(columns, "no communication")
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            medians.draw(columns, args.plot)


if __name__ == "__main__":
    main()
