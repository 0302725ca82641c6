r"""07: from half of one device's time to DDP's: where the rest of the speed-up goes.

N ranks could do a step in an N-th of one device's time. Four kinds of step take turns here: one
device with the whole batch, one device with a rank's part of it, all ranks at once without their
all-reduces, and DDP. What each takes longer than the one before is a bar of the picture. All are
resnet_ddp.py's train_step, on one batch of noise.

    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/waterfall.py
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import numpy
import resnet_ddp
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import report, setup, timing  # noqa: E402


def make_step(args, device, batch_size: int, ddp: bool = True, synchronize: bool = True):
    """Returns a step of a model of its own, on so many images; without `ddp` of rank 0 alone."""
    training = resnet_ddp.prepare(args, device, ddp)
    images = torch.randn(batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(10, [batch_size], device=device)

    def step() -> dict[str, float] | None:
        if not ddp and dist.get_rank() > 0:
            return None
        watch = timing.Stopwatch(device)
        watch.mark("start")
        watch.mark("data")  # at once: it lies there
        with nullcontext() if synchronize else training.model.no_sync():
            resnet_ddp.train_step(training, images, labels, watch)
        return resnet_ddp.seconds_of(watch)

    return step


def explain(result: dict) -> dict[str, float]:
    """Returns the ms of DDP's step, by what takes them, and their sum, last; of p50s."""
    one, part, no_all_reduce, ddp = result["candidates"].values()

    def p50(times: dict, name: str = "batch_seconds") -> float:
        return 1000 * report.percentiles(times[name])[0] / result["dilation"]

    ideal = p50(one) / result["world_size"]
    exposed = p50(ddp, "exposed_comm_seconds")
    return {
        f"one device ÷ {result['world_size']}": ideal,
        "smaller batch": p50(part) - ideal,
        "all ranks at once": p50(no_all_reduce) - p50(part),
        "exposed all-reduce": exposed,
        "rest": p50(ddp) - p50(no_all_reduce) - exposed,
        "DDP": p50(ddp),
    }


def draw(reasons: dict[str, float], title: str, path: Path) -> None:
    """A bar for each, which begins where the one before ends, and one for their sum."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    bottoms = [0, *numpy.cumsum([*reasons.values()][:-2]), 0]
    # As in all pictures: blue is computing, yellow exposed.
    colours = ["#666666", "#0072B2", "#0072B2", "#F0E442", "#999999", "#666666"]
    bars = axes.bar(reasons.keys(), reasons.values(), bottom=bottoms, color=colours)
    axes.bar_label(bars, [f"{ms:.0f}" for ms in reasons.values()])
    axes.set(title=title, ylabel="time of a step, ms")
    axes.margins(y=0.15)
    figure.savefig(path)


def main():
    parser = setup.Parser(__doc__)
    resnet_ddp.add_size_arguments(parser)
    kinds = "steps of each kind, after two to warm up"
    parser.add_argument("--steps", type=setup.whole_number(1), default=10, help=kinds)
    parser.add_argument("--json", type=setup.output_file, metavar="FILE", help="all measured, raw")
    setup.add_plot_arguments(parser, "waterfall.png")
    setup.add_process_group_arguments(parser)
    parser.set_defaults(seed=0, lr=1e-3)
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout, args.network) as device:
        torch.set_num_threads(1)
        resnet_ddp.choose_sizes(args, device)
        result = report.begin("07_resnet_ddp/waterfall", args, device)
        batch = args.batch_per_rank
        steps = {
            "one device": make_step(args, device, args.global_batch, ddp=False),
            "one device, a rank's batch": make_step(args, device, batch, ddp=False),
            "no all-reduce": make_step(args, device, batch, synchronize=False),
            "DDP": make_step(args, device, batch),
        }
        result["candidates"] = timing.measure(steps, args.steps, 2, setup.wire())
        reasons = explain(result)
        report.print_table(["p50, ms", ""], [[name, f"{ms:.1f}"] for name, ms in reasons.items()])
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            title = f"ResNet-18, {args.global_batch} images of {args.image_size} px a step"
            draw(reasons, title, args.plot)
            setup.say(f"written: {args.plot}")


if __name__ == "__main__":
    main()
