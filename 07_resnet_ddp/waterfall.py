r"""07: from half of one device's time to DDP's: where the rest of the speed-up goes.

N ranks could do a step in an N-th of one device's time. Three take turns here: one device with the
whole batch, N processes with their shares of it that send nothing, and DDP. The bars between the
first and the last show what makes DDP's step longer: every rank changes all weights, N processes
share one machine, sending takes time from computing, and after its last gradient a rank waits. All
are resnet_ddp.py's train_step, on one batch of noise.

    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/waterfall.py
"""

import ctypes
import sys
import time
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


def make_step(device, image_size: int, batch_size: int, ddp: bool, of_all_ranks: bool = True):
    """Return a step of a model of its own, on so many images; of rank 0 unless `of_all_ranks`."""
    training = resnet_ddp.build(device, ddp, learning_rate=1e-3)
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    labels = torch.randint(10, [batch_size], device=device)

    def step() -> dict[str, float] | None:
        if not of_all_ranks and dist.get_rank() > 0:
            return None
        watch = timing.Stopwatch(device)
        watch.mark("start")
        watch.mark("data")  # at once: it lies there
        before = other_threads_seconds()
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
    """Return the ms of DDP's step, by what takes them, and their sum, last; of p50s.

    Exposed is what the rank that waits least waits: the others also wait for that rank.
    """
    one, ddp, apart = result["candidates"].values()

    def p50(times: dict, name: str, of_ranks=numpy.max) -> float:
        return 1000 * numpy.median(of_ranks(times[name], axis=0))

    ranks = result["world_size"]
    ideal = p50(one, "batch_seconds") / ranks
    optimizer = p50(ddp, "optimizer_seconds", numpy.mean) * (1 - 1 / ranks)
    exposed = p50(ddp, "exposed_comm_seconds", numpy.min)
    without_sending = p50(apart, "batch_seconds")
    whole = p50(ddp, "batch_seconds")
    return {
        f"one device ÷ {ranks}": ideal,
        "whole optimizer": optimizer,
        "sharing the machine": without_sending - ideal - optimizer,
        "sending meanwhile": whole - exposed - without_sending,
        "exposed all-reduce": exposed,
        "DDP": whole,
    }


def draw(reasons: dict[str, float], title: str, path: Path) -> None:
    """Draw a bar for each, which begins where the one before ends, and one for their sum."""
    figure, axes = report.new_figure(7, 4)
    ends = numpy.cumsum([*reasons.values()][:-1])
    bottoms = [0, *ends[:-1], 0]
    computing, sending = report.COLORS["backward"], report.COLORS["exposed communication"]
    colors = ["gray", computing, computing, sending, sending, "gray"]
    names = [name.replace(" ", "\n", 1) for name in reasons]
    bars = axes.bar(names, reasons.values(), bottom=bottoms, color=colors)
    first, *middle, last = reasons.values()
    texts = [f"{first:.0f}", *(f"{ms:+.0f}" for ms in middle), f"{last:.0f}"]
    axes.bar_label(bars, texts, padding=2)
    axes.margins(y=0.1)
    axes.set(title=title, ylabel="time of a step, ms")
    report.save_figure(figure, path)


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
        ddp = make_step(device, size, batch, ddp=True)
        steps = {
            "one device": make_step(device, size, args.global_batch, False, of_all_ranks=False),
            "uncounted": ddp,  # wakes up the ranks that have slept meanwhile
            "DDP": ddp,
            "without sending": make_step(device, size, batch, ddp=False),
        }
        result["candidates"] = timing.measure(steps, args.steps, 2)
        del result["candidates"]["uncounted"]
        reasons = reasons_of(result)
        report.print_table(["p50, ms", ""], [[name, f"{ms:.1f}"] for name, ms in reasons.items()])
        if device.type == "cpu":
            seconds = result["candidates"]["DDP"]["other_threads_seconds"]
            setup.say(f"gloo's threads had a rank's core for: {1000 * numpy.median(seconds):.1f}")
        ranks = result["world_size"]
        speed_up = ranks * reasons[f"one device ÷ {ranks}"] / reasons["DDP"]
        title = f"{ranks} ranks are {speed_up:.2f} times as fast as one device, not {ranks}"
        setup.say(title)
        report.write_json(args.json, result)
        if args.plot and dist.get_rank() == 0:
            draw(reasons, title, args.plot)


if __name__ == "__main__":
    main()
