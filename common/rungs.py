r"""The rungs beside each other: stages 02 to 05 in one process group, step by step in turn.

Stages that run one after the other meet the machine in different moods, minutes apart. Here every
rung has a replica of its own, and all take turns (no sync, 02, 03, 04, 05, torch DDP, and again),
so that their steps can be compared with each other. Two models show what each idea is good for:
`tiny` has 27 large tensors, `deep` 195 small ones.

    make compare                                                        (see also ARGS="--help")
    torchrun --standalone --nproc-per-node 2 common/rungs.py --plot results/compare.png
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT), *(str(ROOT / stage) for stage in STAGES)]

import naive_ddp  # noqa: E402
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


def draw(by_size: dict[str, dict], models: dict[str, dict], caption: str, path: Path) -> None:
    """A panel per model: stacked bars of where the median step goes, against `no sync`."""
    figure = Figure(figsize=(10, 4.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(by_size), sharey=True, squeeze=False)[0]
    for panel, (size, rows) in zip(panels, by_size.items(), strict=True):
        labels = [LABELS[name] for name in rows]
        bottom = [0.0] * len(rows)
        for part, color in COLORS.items():
            heights = [row[part] for row in rows.values()]
            bars = panel.bar(labels, heights, bottom=bottom, color=color, width=0.65, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        totals = [f"{row['step']:.2f}" for row in rows.values()]
        panel.bar_label(bars, totals, padding=2, fontsize=10)
        panel.axhline(1, color="black", linestyle=":", linewidth=1)
        tensors = rows["NaiveDDP"]["collectives"]  # one all-reduce for each
        millions = models[size]["parameters"] / 1e6
        panel.set_title(
            f"{size}: {tensors} tensors, {millions:.1f} million parameters", fontsize=11
        )
        panel.set_ylim(
            0, 1.12 * max(max(row["step"] for row in r.values()) for r in by_size.values())
        )
    panels[0].set_ylabel("median step, in steps without synchronization")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, format="png")


def main():
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    number = setup.whole_number
    names = ",".join(naive_ddp.SIZES)
    add("--sizes", default="tiny,deep", metavar="tiny,deep", help=f"of {names}")
    add("--batch-size", type=number(1), help="sequences per rank and step (default: the size's)")
    add("--context-length", type=number(1), help="tokens per sequence (default: the size's)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--steps", type=number(1), default=12, help="measured")
    add("--warmup", type=number(0), default=5, help="steps before them, not measured")
    add("--seed", type=number(0), default=0)
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    add("--plot", type=setup.output_file, metavar="FILE", help="the picture, PNG")
    add("--network", metavar="TEXT", help="between the ranks; for the picture's title")
    setup.add_process_group_arguments(parser)
    parser.set_defaults(no_baseline=False, gradient_as_bucket_view=False, trace=None)
    args = parser.parse_args()
    sizes = args.sizes.split(",")
    for size in sizes:
        if size not in naive_ddp.SIZES:
            parser.error(f"argument --sizes: {size!r} is not one of {names}")

    with setup.process_group(args) as device:
        result = report.begin("rungs", args, device)
        result["network"] = args.network
        result["models"] = {}
        for size in sizes:
            setup.say()
            args.size = size
            result["models"][size] = measure(args, device)
        by_size = {size: medians(one) for size, one in result["models"].items()}
        print_summary(by_size)
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            models = {size: one["model"] for size, one in result["models"].items()}
            ranks = f"{result['world_size']} ranks, {result['backend']} on {result['device']}"
            if args.network:
                ranks += f", {args.network}"
            draw(by_size, models, f"One training step of each rung, {ranks}", args.plot)
            setup.say(f"written: {args.plot}")


def measure(args, device) -> dict:
    """All rungs in turn, with one model: "model" and "candidates" of the JSON."""
    others = {"FlatDDP": FlatDDP, "OverlapDDP": OverlapDDP, "BucketedDDP": BucketedDDP}
    replicas = len(others) + 3
    model = report.describe(naive_ddp.LanguageModel, naive_ddp.SIZES, args, replicas)
    batch_shape = model["batch_size"], model["context_length"]
    candidates = naive_ddp.benchmark(args, {}, device, batch_shape, others)
    return {"model": model, "candidates": candidates}


if __name__ == "__main__":
    main()
