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
    """A step of a model of its own on `batch_size` images; without `ddp` rank 0 alone takes it."""
    _, model = resnet_ddp.build_model(0, device, ddp)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    images = torch.randn(batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(10, [batch_size], device=device)

    def step() -> dict[str, float] | None:
        if not ddp and dist.get_rank() > 0:
            return None
        watch = timing.Stopwatch(device)
        watch.mark("start")
        with nullcontext() if synchronize else model.no_sync():
            resnet_ddp.train_step(model, images, labels, optimizer, scheduler, watch)
        exposed = watch.seconds("last gradient", "backward")
        return {"step_seconds": watch.seconds("start", "end"), "exposed_comm_seconds": exposed}

    return step


def explain(samples: dict[str, dict], world_size: int) -> dict[str, float]:
    """The ms of DDP's step, by what takes them, and their sum, last; of p50s."""
    p50 = {}
    for name, times in samples.items():
        p50[name] = 1000 * report.percentiles(times["step_seconds"])[0]
    exposed = 1000 * report.percentiles(samples["DDP"]["exposed_comm_seconds"])[0]
    ideal = p50["one device"] / world_size
    return {
        f"one device ÷ {world_size}": ideal,
        "smaller\nbatch": p50["one device, a rank's batch"] - ideal,
        "contention\nof the ranks": p50["no all-reduce"] - p50["one device, a rank's batch"],
        "exposed\nall-reduce": exposed,
        "rest: backward\nbeside all-reduce": p50["DDP"] - p50["no all-reduce"] - exposed,
        "DDP": p50["DDP"],
    }


def draw(reasons: dict[str, float], title: str, path: Path) -> None:
    """A bar for each, which begins where the one before ends, and one for their sum."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    bottoms = [0, *numpy.cumsum([*reasons.values()][:-2]), 0]
    # As in all pictures: blue is computing, yellow exposed, orange while an all-reduce runs.
    colours = ["#666666", "#0072B2", "#0072B2", "#F0E442", "#D55E00", "#666666"]
    bars = axes.bar(reasons.keys(), reasons.values(), bottom=bottoms, color=colours)
    axes.bar_label(bars, [f"{ms:.0f}" for ms in reasons.values()])
    axes.set(title=title, ylabel="time of a step, ms")
    axes.margins(y=0.15)
    figure.savefig(path)


def main():
    parser = setup.Parser(__doc__)
    resnet_ddp.add_size_arguments(parser)
    add = parser.add_argument
    add("--steps", type=setup.whole_number(1), default=10, help="measured, of each kind")
    add("--warmup", type=setup.whole_number(0), default=2, help="steps before them")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    setup.add_plot_arguments(parser, "waterfall.png")
    setup.add_process_group_arguments(parser)
    parser.set_defaults(scaling="strong", workers=0)
    args = parser.parse_args()
    with setup.process_group(args) as device:
        resnet_ddp.choose_sizes(args)
        torch.set_num_threads(args.threads)
        result = report.begin("07_resnet_ddp/waterfall", args, device)
        batch = args.batch_per_rank
        steps = {
            "one device": make_step(args, device, args.global_batch, ddp=False),
            "one device, a rank's batch": make_step(args, device, batch, ddp=False),
            "no all-reduce": make_step(args, device, batch, synchronize=False),
            "DDP": make_step(args, device, batch),
        }
        result["candidates"] = timing.measure(steps, args.steps, args.warmup)
        reasons = explain(result["candidates"], dist.get_world_size())
        rows = [[reason.replace("\n", " "), f"{ms:.1f}"] for reason, ms in reasons.items()]
        report.print_table(["p50, ms", ""], rows)
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            title = f"ResNet-18, {args.global_batch} images of {args.image_size} px a step"
            draw(reasons, title, args.plot)
            setup.say(f"written: {args.plot}")


if __name__ == "__main__":
    main()
