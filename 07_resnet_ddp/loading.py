"""07: what loading costs: the images of resnet_ddp.py, resized and batched, and nothing computed.

    python 07_resnet_ddp/make_cifar.py results/cifar
    python 07_resnet_ddp/loading.py --data results/cifar --image-size 32 224 --workers 0 2

Every row goes once through the whole training set in random order, as one rank would. With workers
the loading happens in so many other processes, beside the training: it costs training nothing as
long as they deliver as many images per second as it takes, and there are cores for them.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader


def measure(train_set, batch_size: int, workers: int, progress) -> list[float]:
    """Seconds until each batch of one pass was there; the first includes starting the workers."""
    batches = DataLoader(train_set, batch_size, shuffle=True, num_workers=workers, drop_last=True)
    seconds = []
    start = time.perf_counter()
    for _ in batches:
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
        progress(f"batch {len(seconds)} of {len(batches)}")
    return seconds


# ==================================================================================================
# Below this line: the table, the command line.


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from images import load_images, name_of

        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: copy the repository's folder common/ and images.py into {folder}"
        )

    parser = setup.Parser(__doc__)
    add, whole = parser.add_argument, setup.whole_number
    images = "CIFAR-10, or make_cifar.py's, from this folder instead of the digits"
    add("--data", metavar="DIR", help=images)
    sizes = {"type": whole(8, 1024), "nargs": "+", "default": [32, 64, 224]}
    add("--image-size", **sizes, metavar="PIXELS", help="one or several")
    workers = "loading processes, one number or several; 0: in this one"
    add("--workers", type=whole(0, 64), nargs="+", default=[0, 2], metavar="N", help=workers)
    add("--batch-size", type=whole(1), default=64)
    add("--threads", type=whole(1, 1024), default=1, help="of this process; a worker has one")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    began = time.perf_counter()
    train_set, _ = load_images(args.data, False, args.image_size[0])
    reading = time.perf_counter() - began
    if args.batch_size > len(train_set):
        problem = f"is more than the {len(train_set)} training images"
        setup.fail(f"argument --batch-size: '{args.batch_size}' {problem}")
    what = f"{len(train_set)} training images, {name_of(args.data)}"
    setup.say(f"{what}, read in {reading:.1f} s; batches of {args.batch_size}")
    rows, found = [], []
    for size in args.image_size:
        train_set.size = (size, size)
        for workers in args.workers:

            def progress(place, size=size, workers=workers):
                setup.progress(f"{size} pixels, {workers} workers: {place}")

            seconds = measure(train_set, args.batch_size, workers, progress)
            images = len(seconds) * args.batch_size
            total = sum(seconds)
            row = [f"{size} pixels, {workers} workers", f"{total:.1f}", f"{images / total:.0f}"]
            rows.append([*row, f"{1000 * total / images:.3f}", *report.milliseconds(seconds)])
            found.append({"image_size": size, "workers": workers, "batch_seconds": seconds})
    header = ["", "total s", "images/s", "ms per image", "p50", "p75", "p90", "p95"]
    report.print_table(header, rows)
    setup.say("percentiles: ms until a batch is there")
    if args.json:
        import json

        args.json.write_text(json.dumps({"options": vars(args), "rows": found}, default=str))
        setup.say(f"written: {args.json}")


if __name__ == "__main__":
    main()
