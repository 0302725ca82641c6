r"""07: from half of one device's time to DDP's: where the rest of the speed-up goes.

N ranks could do a step in an N-th of one device's time. Four kinds of step take turns here: one
device with the whole batch, one device with a rank's batch, all ranks at once without their
all-reduces, and DDP. A bar of the picture shows how much longer each takes than the one before. All
are resnet_ddp.py's train_step, on one batch of noise, and as fast as the slowest rank.

    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/waterfall.py
"""

import ctypes
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy
import resnet_ddp
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import report, setup, timing


def other_threads_seconds() -> float:
    """Return the time on a core that all threads but this one have had: on a CPU, gloo's."""
    return time.process_time() - time.thread_time()


def make_step(device, image_size: int, batch_size: int, ddp: bool = True, synchronize: bool = True):
    """Return a step of a model of its own, on so many images; without `ddp` of rank 0 alone."""
    training = resnet_ddp.build(device, ddp, learning_rate=1e-3)
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    labels = torch.randint(10, [batch_size], device=device)

    def step() -> dict[str, float] | None:
        if not ddp and dist.get_rank() > 0:
            return None
        watch = timing.Stopwatch(device)
        watch.mark("start")
        watch.mark("data")  # at once: it lies there
        before = other_threads_seconds()
        with nullcontext() if synchronize else training.model.no_sync():
            resnet_ddp.train_step(training, images, labels, watch)
        of_others = other_threads_seconds() - before
        return resnet_ddp.seconds_of(watch) | {"other_threads_seconds": of_others}

    return step


def keep_freed_memory() -> None:
    """Have Linux's malloc keep what tensors free, instead of giving large blocks back at once.

    Else the next step gets them from the system page by page, and a large batch, with more blocks
    above 32 MB, loses more time to that than a small one.
    """
    if sys.platform == "linux":
        malloc = ctypes.CDLL(None)
        most_blocks_of_the_system, keep_at_the_end = -4, -1
        malloc.mallopt(most_blocks_of_the_system, 0)
        malloc.mallopt(keep_at_the_end, -1)


def reasons_of(result: dict) -> dict[str, float]:
    """Return the ms of DDP's step, by what takes them, and their sum, last; of p50s."""
    one, part, no_all_reduce, ddp = [
        1000 * numpy.median(numpy.max(times["batch_seconds"], axis=0))  # of the slowest rank
        for times in result["candidates"].values()
    ]
    ideal = one / result["world_size"]
    return {
        f"one device ÷ {result['world_size']}": ideal,
        "smaller batch": part - ideal,
        "all ranks at once": no_all_reduce - part,
        "all-reduce": ddp - no_all_reduce,
        "DDP": ddp,
    }


def draw(reasons: dict[str, float], title: str, path: Path) -> None:
    """Draw a bar for each, which begins where the one before ends, and one for their sum."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    ends = numpy.cumsum([*reasons.values()][:-1])
    bottoms = [0, *ends[:-1], 0]
    # As in all pictures: blue is computing, yellow what an all-reduce costs.
    colours = ["#666666", "#0072B2", "#0072B2", "#F0E442", "#666666"]
    names = [name.replace(" ", "\n", 1) for name in reasons]
    bars = axes.bar(names, reasons.values(), bottom=bottoms, color=colours)
    first, *middle, last = reasons.values()
    texts = [f"{first:.0f}", *(f"{ms:+.0f}" for ms in middle), f"{last:.0f}"]
    axes.bar_label(bars, texts, padding=2)
    axes.margins(y=0.1)
    axes.set(title=title, ylabel="time of a step, ms")
    figure.savefig(path, format="png")


def main():
    parser = setup.Parser(__doc__)
    resnet_ddp.add_size_arguments(parser)
    kinds = "of each kind, after two to warm up"
    parser.add_argument("--steps", type=setup.whole_number(1), default=10, help=kinds)
    fresh = "take the memory of each tensor from the system anew, as resnet_ddp.py does on a CPU"
    parser.add_argument("--fresh-memory", action="store_true", help=fresh)
    parser.add_argument("--json", type=setup.output_file, metavar="FILE", help="all measured, raw")
    setup.add_plot_arguments(parser, "waterfall.png")
    setup.add_process_group_arguments(parser)
    parser.set_defaults(workers=0)
    args = parser.parse_args()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        torch.set_num_threads(1)
        if not args.fresh_memory:
            keep_freed_memory()
        batch = resnet_ddp.choose_sizes(args, device)
        result = report.begin("07_resnet_ddp/waterfall", args, device)
        size = args.image_size
        steps = {
            "one device": make_step(device, size, args.global_batch, ddp=False),
            "one device, a rank's batch": make_step(device, size, batch, ddp=False),
            "uncounted": make_step(device, size, batch, synchronize=False),  # wakes all ranks up
            "no all-reduce": make_step(device, size, batch, synchronize=False),
            "DDP": make_step(device, size, batch),
        }
        result["candidates"] = timing.measure(steps, args.steps, 2)
        del result["candidates"]["uncounted"]
        reasons = reasons_of(result)
        report.print_table(["p50, ms", ""], [[name, f"{ms:.1f}"] for name, ms in reasons.items()])
        ddp = result["candidates"]["DDP"]
        exposed = 1000 * numpy.median(numpy.min(ddp["exposed_comm_seconds"], axis=0))
        of_others = 1000 * numpy.median(ddp["other_threads_seconds"])
        setup.say(f"of the all-reduce are exposed: {exposed:.1f}")
        if device.type == "cpu":
            setup.say(f"meanwhile gloo's threads have had a core for: {of_others:.1f}")
        ranks = result["world_size"]
        speed_up = ranks * reasons[f"one device ÷ {ranks}"] / reasons["DDP"]
        title = f"{ranks} ranks are {speed_up:.2f} times as fast as one device, not {ranks}"
        setup.say(title)
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            draw(reasons, title, args.plot)
            setup.say(f"written: {args.plot}")


if __name__ == "__main__":
    main()
