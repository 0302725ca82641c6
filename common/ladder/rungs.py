r"""The rungs beside each other: stages 02 to 05 in one process group, step by step in turn.

Stages that run one after the other meet the machine in different moods, minutes apart. Here every
rung has a replica of its own, and all take turns (no sync, 02, 03, 04, 05, torch DDP, and again),
so that their steps can be compared with each other. Two models show what each idea is good for:
`tiny` has 27 large tensors, `deep` 195 small ones.

    make compare                                                        (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 common/ladder/rungs.py
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT), *(str(ROOT / stage) for stage in STAGES)]

import naive_ddp  # noqa: E402
from bucketed import BucketedDDP  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402

from common import report, setup  # noqa: E402
from common.ladder import draw_rungs  # noqa: E402

WRAPPERS = dict(zip(STAGES, [naive_ddp.NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP], strict=True))
REPLICAS = len(WRAPPERS) + 2  # no sync and torch DDP


def print_summary(by_size: dict[str, dict]) -> None:
    """A row per rung, with a pair of columns per model; `by_size` holds what `medians` returns."""
    header = ["step ÷ no sync"]
    for size in by_size:
        header += [size, "all-reduces"]
    rows = []
    for name in next(iter(by_size.values())):
        row = [name]
        for medians in by_size.values():
            row += [f"{medians[name]['step']:.3f}", str(medians[name]["collectives"])]
        rows.append(row)
    setup.say()
    report.print_table(header, rows)


def read_arguments():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    number = setup.whole_number
    names = ",".join(naive_ddp.SIZES)
    size = setup.checked(str, lambda name: name in naive_ddp.SIZES, f"one of {names}")
    sizes = {"type": setup.list_of(size), "default": "tiny,deep", "metavar": "SIZE,…"}
    add("--sizes", **sizes, help=f"of {names}")
    add("--batch-size", type=number(1), help="sequences per rank and step (default: the size's)")
    add("--context-length", type=number(1), help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--steps", type=number(1), default=12, help="steps that are measured")
    add("--warmup", type=number(0), default=5, help="steps before them")
    add("--seed", type=number(0), default=0)
    add("--network", metavar="TEXT", help="between the ranks; for the picture's title")
    setup.add_plot_arguments(parser, "compare.png")
    file = setup.ROOT / "results" / "compare.json"
    default = file if setup.can_be_written(file) else None
    raw = "everything measured, raw"
    add("--json", type=setup.output_file, default=default, metavar="FILE", help=raw)
    setup.add_process_group_arguments(parser)
    parser.set_defaults(no_baseline=False, gradient_as_bucket_view=False, trace=None)
    return parser.parse_args()


def remove_earlier(*paths: Path | None) -> None:
    """Results of an earlier run should not be taken for those of a run that has failed."""
    if dist.get_rank() == 0:
        for path in paths:
            if path and path.is_file():  # and not /dev/null
                path.resolve().unlink()


def main():
    args = read_arguments()

    with setup.process_group(args) as device:
        remove_earlier(args.json, args.plot)
        result = report.begin("rungs", args, device)
        result["network"] = args.network
        result["models"] = {}
        check_memory(args)
        for size in args.sizes:
            setup.say()
            args.size = size
            result["models"][size] = measure(args, device)
        by_size = {}
        for size, measured in result["models"].items():
            by_size[size] = draw_rungs.medians(measured)
        print_summary(by_size)
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            draw_rungs.draw_models(result, args.plot)


def check_memory(args) -> None:
    """End the run before anything is measured if one of the models does not fit."""
    if args.device != "cpu":  # a GPU says itself when it is full
        return
    for size in args.sizes:
        with torch.device("meta"):
            model = naive_ddp.LanguageModel(*naive_ddp.SIZES[size][:5])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        each = 5 * getattr(torch, args.dtype).itemsize
        what = f"{size}: {REPLICAS} replicas × {parameters / 1e6:.1f} million parameters × {each} B"
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        setup.check_memory(ranks, REPLICAS * parameters * each, what)


def measure(args, device) -> dict:
    """All rungs in turn, with one model: "model" and "candidates" of the JSON."""
    others = {"FlatDDP": FlatDDP, "OverlapDDP": OverlapDDP, "BucketedDDP": BucketedDDP}
    model = report.describe(naive_ddp.LanguageModel, naive_ddp.SIZES, args, REPLICAS)
    candidates = naive_ddp.benchmark(args, {}, device, model, others)
    return {"model": model, "candidates": candidates}


if __name__ == "__main__":
    main()
