r"""The rungs beside each other: stages 02 to 05 in one process group, step by step in turn.

Stages that run one after the other meet the machine in different moods, minutes apart. Here every
rung has a replica of its own, and all take turns (no sync, 02, 03, 04, 05, torch DDP, and again),
so that their steps can be compared with each other. Two models show what each idea is good for:
`tiny` has 27 large tensors, `deep` 195 small ones.

    make compare                                                        (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 common/ladder/rungs.py --plot results/compare.png
"""

import os
import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT), *(str(ROOT / stage) for stage in STAGES)]

import naive_ddp  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bucketed import BucketedDDP  # noqa: E402
from flat_ddp import FlatDDP  # noqa: E402
from overlap_ddp import OverlapDDP  # noqa: E402

from common import report, setup  # noqa: E402

NO_SYNC = "no sync"
LABELS = {
    NO_SYNC: "no sync",
    "NaiveDDP": "02\nnaive",
    "FlatDDP": "03\nflat",
    "OverlapDDP": "04\noverlap",
    "BucketedDDP": "05\nbucketed",
    "torch DDP": "torch\nDDP",
}
COLORS = {"compute": "#56B4E9", "exposed communication": "#D55E00", "optimizer": "#009E73"}


def medians(result: dict) -> dict[str, dict]:
    """By candidate the medians of a step and its parts, in units of the step of `no sync`."""
    floor = None
    rows = {}
    for one in result["candidates"]:
        step = report.percentiles(one["step_seconds"])[0]
        if one["name"] == NO_SYNC:
            floor = step
        exposed = report.percentiles(one["exposed_comm_seconds"])[0]
        optimizer = report.percentiles(one["optimizer_seconds"])[0]
        rows[one["name"]] = {
            "compute": (step - exposed - optimizer) / floor,
            "exposed communication": exposed / floor,
            "optimizer": optimizer / floor,
            "step": step / floor,
            "collectives": one["collectives_per_step"],
        }
    return rows


def print_summary(by_size: dict[str, dict]) -> None:
    """A row per rung, with a pair of columns per model."""
    header = ["step ÷ no sync"]
    for size in by_size:
        header += [size, "all-reduces"]
    rows = []
    for name in next(iter(by_size.values())):
        row = [name]
        for of_size in by_size.values():
            row += [f"{of_size[name]['step']:.3f}", str(of_size[name]["collectives"])]
        rows.append(row)
    setup.say()
    report.print_table(header, rows)


def draw_panel(panel, rows: dict[str, dict]) -> None:
    """Stacked bars of where each rung's median step goes; `rows` is what `medians` returns."""
    labels = [LABELS[name] for name in rows]
    bottom = [0.0] * len(rows)
    for part, color in COLORS.items():
        heights = [row[part] for row in rows.values()]
        bars = panel.bar(labels, heights, bottom=bottom, color=color, width=0.65, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    totals = [f"{row['step']:.2f}" for row in rows.values()]
    panel.bar_label(bars, totals, padding=2, fontsize=10)
    panel.axhline(1, color="black", linestyle=":", linewidth=1)
    panel.margins(y=0.12)


def describe(size: str, result: dict) -> str:
    """A model in words."""
    of_size = result["models"][size]
    naive = next(one for one in of_size["candidates"] if one["name"] == "NaiveDDP")
    tensors = naive["collectives_per_step"]  # one all-reduce for each
    return (
        f"{size}: {tensors} tensors, {of_size['model']['parameters'] / 1e6:.1f} million parameters"
    )


def finish_figure(figure, panel, caption: str, path: Path) -> None:
    """Legend and title; write the file."""
    handles = panel.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")


def draw(result: dict, path: Path) -> None:
    """A panel per model."""
    figure = Figure(figsize=(10, 4.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(result["models"]), sharey=True, squeeze=False)[0]
    for panel, (size, of_size) in zip(panels, result["models"].items(), strict=True):
        draw_panel(panel, medians(of_size))
        panel.set_title(describe(size, result), fontsize=11)
    panels[0].set_ylabel("median step, in steps without synchronization")
    caption = "One training step of each rung, {world_size} ranks, {backend} on {device}"
    if result["network"]:
        caption += ", {network}"
    finish_figure(figure, panels[0], caption.format(**result), path)


def read_arguments(parser: setup.Parser, sizes: str, steps: int, warmup: int):
    """Add the flags of a run over several models, with these defaults; read the command line."""
    add = parser.add_argument
    number = setup.whole_number
    names = ",".join(naive_ddp.SIZES)
    add("--sizes", default=sizes, metavar="SIZE,…", help=f"of {names}")
    add("--batch-size", type=number(1), help="sequences per rank and step (default: the size's)")
    add("--context-length", type=number(1), help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--steps", type=number(1), default=steps, help="steps that are measured")
    add("--warmup", type=number(0), default=warmup, help="steps before them")
    add("--seed", type=number(0), default=0)
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_process_group_arguments(parser)
    parser.set_defaults(no_baseline=False, gradient_as_bucket_view=False, trace=None)
    args = parser.parse_args()
    args.sizes = args.sizes.split(",")
    for size in args.sizes:
        if size not in naive_ddp.SIZES:
            parser.error(f"argument --sizes: {size!r} is not one of {names}")
    return args


def main():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    add("--network", metavar="TEXT", help="between the ranks; for the picture's title")
    args = read_arguments(parser, "tiny,deep", steps=12, warmup=5)

    with setup.process_group(args) as device:
        result = report.begin("rungs", args, device)
        result["network"] = args.network
        result["models"] = {}
        check_memory(args.sizes, args)
        for size in args.sizes:
            setup.say()
            args.size = size
            result["models"][size] = measure(args, device)
        print_summary({size: medians(one) for size, one in result["models"].items()})
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            draw(result, args.plot)


REPLICAS = len(LABELS)


def check_memory(sizes: list[str], args) -> None:
    """End the run before anything is measured if one of these models does not fit."""
    for size in sizes if args.device == "cpu" else []:
        with torch.device("meta"):
            model = naive_ddp.LanguageModel(*naive_ddp.SIZES[size][:5])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        each = 5 * getattr(setup.torch, args.dtype).itemsize
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
