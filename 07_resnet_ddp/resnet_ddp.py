"""07: ResNet-18 on one device against torch's DistributedDataParallel on N, and where the time goes.

The same script does both: started by torchrun it trains with DDP on that many ranks, started by plain python it trains
on a single device. As soon as the results of both are there they are compared and drawn.

    make 07_resnet_ddp NPROC=2                                                 (single, then DDP, then the pictures)
    python 07_resnet_ddp/resnet_ddp.py --threads 1                             (single)
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/resnet_ddp.py       (DDP; --max-restarts 3 --checkpoint FILE)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 --master-port 29400 \
        07_resnet_ddp/resnet_ddp.py                                            (two hosts; R is 0 on HOST0, else 1)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020; learning rate:
Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, sections 2.1 and 2.2.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def sharded_loaders(
    train_set: Dataset, test_set: Dataset, batch_size: int, seed: int, **options
) -> tuple:
    """This rank's share of both sets, `batch_size` images at a time, as two DataLoaders; `options` go to both.

    The training order depends on the seed and the epoch alone, and rank r takes every world_size-th image of it from the
    r-th on: the ranks' k-th batches together are the k-th batch of one device with a batch of world_size * batch_size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(train_set, world_size, rank, seed=seed, drop_last=True)
    # For evaluation a DistributedSampler would repeat images until the shares are equal, and count those twice.
    share = range(rank, len(test_set), world_size)
    return (
        DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options),
        DataLoader(test_set, batch_size, sampler=share, **options),
    )


def train(
    model: nn.Module,
    batches,
    optimizer,
    scheduler,
    device: torch.device,
    stopwatch,
    amp=False,
    synchronize=True,
):
    """Take one optimizer step per batch of (images, labels). After each yields its times, its loss and accuracy.

    The times are a stopwatch(device) with the marks start, data, end; loss and accuracy are this rank's, on the device.
    Nothing here waits for a GPU: the marks are events in its stream, read by whoever wants the numbers, when convenient.
    With synchronize=False a DDP model leaves out its all-reduces (to see what they cost; the ranks then drift apart).
    """
    model.train()
    watch = stopwatch(device)
    watch.mark("start")
    for images, labels in batches:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        watch.mark("data")
        with nullcontext() if synchronize else model.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                logits = model(images)  # DDP first gives every rank the buffers of rank 0
                loss = F.cross_entropy(logits, labels)
            loss.backward()  # DDP averages the gradients over the ranks meanwhile, bucket by bucket
        optimizer.step()  # the same gradients on all ranks, so the same weights
        optimizer.zero_grad()
        scheduler.step()
        watch.mark("end")
        yield watch, loss.detach(), (logits.argmax(1) == labels).double().mean()
        watch = stopwatch(device)
        watch.mark("start")


@torch.no_grad()
def evaluate(model: nn.Module, batches, device: torch.device, amp=False) -> dict:
    """Loss, accuracy and number of images over the batches of all ranks, equal on every rank.

    `model` is not the DDP wrapper but what it wraps: the wrapper's forward is a collective, and a rank with one batch
    more than the others would wait in it for ever.
    """
    model.eval()
    for buffer in (
        model.buffers()
    ):  # since the last forward each rank's running statistics went their own way
        dist.broadcast(buffer, 0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.double(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return {"loss": loss / count, "accuracy": right / count, "images": int(count)}


def warm_up(model: nn.Module, image_size: int, device: torch.device) -> None:
    """One forward and backward on blank images, without a trace in the weights, buffers and gradients.

    After its first backward DDP sorts its buckets anew, by the order in which gradients came. That order decides how an
    all-reduce of more than two ranks rounds. Done before training it is the same for a run that starts and one that resumes.
    """
    before = copy.deepcopy(model.state_dict())
    model(torch.zeros(2, 3, image_size, image_size, device=device)).sum().backward()
    model.load_state_dict(before)
    model.zero_grad()


def save_checkpoint(
    path: Path, settings: dict, progress: dict, model: nn.Module, optimizer, scheduler, device
) -> None:
    """Write all that the rest of the training depends on, after an epoch; a file that stands there whole, or not at all.

    The sampler's position is progress["epoch"]: with the seed, which is one of the settings, it gives the next order.
    """
    mine = {"cpu": torch.get_rng_state()} | (
        {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    )
    random_states = [None] * dist.get_world_size()
    dist.all_gather_object(random_states, mine)
    if dist.get_rank() == 0:
        beside = path.with_name(path.name + ".part")
        with beside.open("wb") as file:
            torch.save(
                {
                    "settings": settings,
                    "progress": progress,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "random_states": random_states,
                },
                file,
            )
            file.flush()
            os.fsync(
                file.fileno()
            )  # the bytes are on the disk before the name is, should the power fail
        beside.replace(path)


def load_checkpoint(
    path: Path, settings: dict, model: nn.Module, optimizer, scheduler, device
) -> dict:
    """Restore on this rank what `save_checkpoint` wrote; returns its progress. ValueError if the settings were others."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in settings.items():
        if (
            checkpoint["settings"][name] != value and name != "epochs"
        ):  # of which there may be more now
            raise ValueError(
                f"it was written with {name} {checkpoint['settings'][name]}, not {value}"
            )
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    random_states = checkpoint["random_states"][dist.get_rank()]
    torch.set_rng_state(random_states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(random_states["cuda"], device)
    return checkpoint["progress"]


# ======================================================================================================================
# Below this line: the images, the report, the pictures, main.


class Images(Dataset):
    """Images [n, 3, height, width] of any number type and their labels; normalised and resized one by one, when asked."""

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        mean: list[float],
        std: list[float],
        image_size: int,
    ):
        self.images, self.labels, self.image_size = images, labels, image_size
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = (self.images[i].float() - self.mean) / self.std
        return F.interpolate(image[None], (self.image_size, self.image_size), mode="bilinear")[
            0
        ], self.labels[i]


def load_images(data: str | None, download: bool, image_size: int) -> tuple[Images, Images]:
    """Training and held-out images: the digits in common/ (1,500 and 297), or CIFAR-10 in the folder `data`."""
    import common.setup

    if data is None:
        digits = numpy.load(Path(common.__file__).with_name("digits.npz"))
        shuffled = numpy.random.default_rng(0).permutation(len(digits["labels"]))
        images = torch.tensor(digits["images"][shuffled])[:, None].expand(-1, 3, -1, -1)
        labels = torch.tensor(digits["labels"][shuffled], dtype=torch.int64)
        scale = [4.88] * 3, [6.02] * 3, image_size
        return Images(images[297:], labels[297:], *scale), Images(
            images[:297], labels[:297], *scale
        )
    try:
        from torchvision.datasets import CIFAR10

        if download:
            if int(os.environ["LOCAL_RANK"]) == 0:  # once per host
                CIFAR10(data, download=True)
            dist.barrier()
        scale = [125.3, 123.0, 113.9], [63.0, 62.1, 66.7], image_size
        return tuple(
            Images(
                torch.from_numpy(split.data).permute(0, 3, 1, 2),
                torch.tensor(split.targets),
                *scale,
            )
            for split in (CIFAR10(data, train=True), CIFAR10(data, train=False))
        )
    except Exception as error:  # torchvision raises many kinds for files that are missing, cut short or not CIFAR-10
        reason = (str(error) or type(error).__name__).splitlines()[0]
        common.setup.fail(
            f"argument --data: {data!r} holds no readable CIFAR-10 ({reason}); --download fetches it"
        )


SETTINGS = "epochs image_size global_batch steps_per_epoch lr momentum warmup_epochs amp channels_last workers seed".split()


def output_folder(text: str) -> Path:
    """A type for argparse: a folder that can be written to; it is made if it is not there."""
    try:
        Path(text or os.devnull).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder ({error.strerror})") from None
    if not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not writable")
    return Path(text)


def fit(args, device: torch.device, settings: dict) -> dict:
    """Train, evaluating and saving after each epoch; resume if there is a checkpoint. Returns the measured progress."""
    from torchvision.models import resnet18

    from common.setup import fail
    from common.timing import Stopwatch

    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = load_images(args.data, args.download, args.image_size)
    train_batches, test_batches = sharded_loaders(
        train_set,
        test_set,
        args.batch_per_rank,
        args.seed,
        num_workers=args.workers,
        pin_memory=device.type == "cuda",
    )
    steps = min(len(train_batches), args.steps_per_epoch or len(train_batches))
    if steps == 0:
        fail(
            f"argument --global-batch: '{args.global_batch}' needs {args.batch_per_rank * world_size} training images a step, "
            f"and there are {len(train_set)}"
        )

    torch.manual_seed(args.seed)
    network = resnet18(num_classes=10).to(device)
    if args.channels_last:
        network = network.to(
            memory_format=torch.channels_last
        )  # the first convolution turns the images round as well
    model = network
    if args.distributed:
        # With views a gradient lies in its bucket from the start. find_unused_parameters stays off: it would walk through
        # the graph in every step, and ResNet uses all its parameters.
        model = DistributedDataParallel(
            network, [device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    factor = world_size if args.scaling == "weak" else 1
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # Goyal et al.: a little more each step, up to factor * lr
        optimizer,
        lambda step: 1 + (factor - 1) * min(1.0, step / max(1, args.warmup_epochs * steps)),
    )
    warm_up(model, args.image_size, device)
    torch.manual_seed(args.seed + rank)  # from here on, what is random should differ between ranks

    progress = {"epoch": 0, "step": 0, "train_seconds": 0.0, "steps": [], "evaluations": []}
    found = torch.tensor(float(bool(args.checkpoint and args.checkpoint.exists())), device=device)
    dist.all_reduce(found)
    if found > 0:
        try:
            progress = load_checkpoint(
                args.checkpoint, settings, network, optimizer, scheduler, device
            )
            if progress["epoch"] > args.epochs:
                raise ValueError(
                    f"it is from after epoch {progress['epoch']}, and --epochs is {args.epochs}"
                )
        except (
            Exception
        ) as error:  # missing on this host, cut short, of another run: torch.load raises many kinds
            reason = (str(error) or type(error).__name__).splitlines()[0]
            fail(
                f"argument --checkpoint: '{args.checkpoint}' is not one that rank {rank} can resume from ({reason})"
            )
        if rank == 0:
            print(f"resumed from {args.checkpoint} after epoch {progress['epoch']}", flush=True)

    for epoch in range(progress["epoch"] + 1, args.epochs + 1):
        train_batches.sampler.set_epoch(epoch)  # else every epoch has the same order
        unread, samples = [], []
        dist.barrier()  # once per epoch: rank 0 may still be saving, and nobody's first batch should count that
        epoch_began = line_began = time.perf_counter()
        for outcome in train(
            model,
            islice(train_batches, steps),
            optimizer,
            scheduler,
            device,
            Stopwatch,
            args.amp,
            not args.no_sync,
        ):
            unread.append(outcome)
            if len(unread) < args.log_every and len(samples) + len(unread) < steps:
                continue
            # Only here do we wait for a GPU: to read the events and losses since the last progress line.
            samples += [
                {
                    "data_seconds": watch.seconds("start", "data"),
                    "compute_seconds": watch.seconds("data", "end"),
                    "loss": loss.item(),
                    "accuracy": accuracy.item(),
                }
                for watch, loss, accuracy in unread
            ]
            now, last = time.perf_counter(), samples[-1]
            over_ranks = torch.tensor([last["loss"], last["accuracy"]], device=device)
            dist.all_reduce(over_ranks)
            if rank == 0:
                loss, accuracy = (over_ranks / world_size).tolist()
                done = progress["step"] + len(samples)
                seconds_left = (
                    (progress["train_seconds"] + now - epoch_began)
                    / done
                    * (args.epochs * steps - done)
                )
                print(
                    f"epoch {epoch} step {len(samples):3}/{steps}  data {1000 * last['data_seconds']:.1f} ms  "
                    f"compute+sync {1000 * last['compute_seconds']:.1f} ms  "
                    f"{args.batch_per_rank * world_size * len(unread) / (now - line_began):.1f} images/s  loss {loss:.4f}  "
                    f"accuracy {accuracy:.1%}  ETA {seconds_left:.0f} s",
                    flush=True,
                )
            unread, line_began = [], time.perf_counter()
        everyones = [None] * world_size
        dist.all_gather_object(everyones, samples)
        progress["steps"] += [
            {name: [one[name] for one in ranks] for name in last}
            for ranks in zip(*everyones, strict=True)
        ]
        progress["train_seconds"] += now - epoch_began
        progress["evaluations"].append(evaluate(network, test_batches, device, args.amp))
        progress |= {"epoch": epoch, "step": progress["step"] + steps}
        if rank == 0:
            print(
                "epoch {} of {} done, held out: loss {loss:.4f}, accuracy {accuracy:.2%} of {images} images".format(
                    epoch, args.epochs, **progress["evaluations"][-1]
                ),
                flush=True,
            )
        if args.checkpoint:
            save_checkpoint(
                args.checkpoint, settings, progress, network, optimizer, scheduler, device
            )
    return progress


def times(result: dict, part: str) -> list[float]:
    """All ranks' and steps' ms of `data`, of `compute` (with the synchronisation) or of both, the `batch`."""
    parts = ["data_seconds", "compute_seconds"] if part == "batch" else [f"{part}_seconds"]
    return [
        1000 * sum(of_rank)
        for step in result["steps"]
        for of_rank in zip(*(step[part] for part in parts), strict=True)
    ]


def compare(folder: Path) -> None:
    """Compare 07_single.json with the 07_ddp_N.json of the same settings in this folder: a table and two pictures."""
    from matplotlib.figure import Figure

    from common.report import print_table

    ddp_files = sorted(
        folder.glob("07_ddp_*.json"), key=lambda path: (len(path.name), path.name)
    )  # by world size
    if not ddp_files or not (folder / "07_single.json").exists():
        return
    single, *others = (
        json.loads(path.read_text()) for path in [folder / "07_single.json", *ddp_files]
    )
    settings, results = single["settings"], [single]
    for path, ddp in zip(ddp_files, others, strict=True):
        if different := [name for name in settings if ddp["settings"][name] != settings[name]]:
            print(
                f"{path.name} is left out of the comparison: 07_single.json has another {', '.join(different)}",
                flush=True,
            )
        else:
            results.append(ddp)
    if len(results) == 1:
        return

    names = ["single", *(f"DDP × {result['world_size']}" for result in results[1:])]
    worlds, totals, throughput = (
        [result[key] for result in results]
        for key in ("world_size", "train_seconds", "images_per_second")
    )
    data, compute, batch = (
        [statistics.fmean(times(result, part)) for result in results]
        for part in ("data", "compute", "batch")
    )
    speedup = [each / throughput[0] for each in throughput]
    print_table(
        ["", "total s", "batch ms", "images/s", "speed-up", "efficiency", "accuracy"],
        [
            [
                name,
                f"{totals[i]:.1f}",
                f"{batch[i]:.1f}",
                f"{throughput[i]:.1f}",
                f"{speedup[i]:.2f}",
                f"{speedup[i] / worlds[i]:.1%}",
                f"{results[i]['evaluations'][-1]['accuracy']:.2%}",
            ]
            for i, name in enumerate(names)
        ],
    )

    blue, orange = (
        "#0072B2",
        "#E69F00",
    )  # from Okabe and Ito's palette, which the colour-blind can tell apart
    caption = (
        "ResNet-18, {data}, {image_size} px, --global-batch {global_batch}, {device}, threads per process: "
        "{threads_per_rank}"
    ).format(**settings) + f", {results[-1]['scaling']} scaling"
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    figure.suptitle(f"One device against N\n{caption}", fontsize=11)
    for axes, title, unit, heights in zip(
        figure.subplots(2, 2).flat,
        ["Total training time", "Mean batch time", "Throughput", "Speed-up in throughput"],
        ["seconds", "ms", "images/s over all ranks", "× single"],
        [totals, batch, throughput, speedup],
        strict=True,
    ):
        bars = axes.bar(names, heights, width=0.6, color=[blue] + [orange] * (len(names) - 1))
        axes.bar_label(
            bars,
            [f"{height:.{2 if height < 10 else 1 if height < 100 else 0}f}" for height in heights],
            padding=2,
        )
        axes.set(title=title, ylabel=unit, ylim=(0, 1.2 * max(heights)))
    for i, world_size in enumerate(worlds):
        axes.hlines(
            world_size,
            i - 0.4,
            i + 0.4,
            "black",
            "dashed",
            label="" if i else "ideal: number of processes",
        )
    axes.set_ylim(0, 1.3 * max(worlds))
    axes.legend(loc="upper left")
    figure.savefig(folder / "comparison.png")

    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    figure.suptitle(f"Where the time of a batch goes\n{caption}", fontsize=11)
    shares = [
        [100 * ms / whole for ms, whole in zip(part, batch, strict=True)]
        for part in (data, compute)
    ]
    for axes, unit, (lower, upper) in zip(
        figure.subplots(1, 2),
        ["ms per batch (mean)", "% of the batch time"],
        [(data, compute), shares],
        strict=True,
    ):
        axes.bar(names, lower, width=0.6, color=orange, label="data")
        bars = axes.bar(
            names, upper, width=0.6, color=blue, bottom=lower, label="compute and synchronise"
        )
        axes.bar_label(
            bars,
            [f"compute {y:.1f}\ndata {x:.1f}" for x, y in zip(lower, upper, strict=True)],
            padding=2,
        )
        axes.set(ylabel=unit, ylim=(0, 1.4 * max(map(sum, zip(lower, upper, strict=True)))))
        axes.legend(loc="upper center", ncols=2)
    axes.set_yticks(range(0, 101, 20))
    figure.savefig(folder / "breakdown.png")
    print(f"drawn: {folder.name}/comparison.png and {folder.name}/breakdown.png", flush=True)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common.report import environment, percentiles, print_table, write_json
        from common.setup import (
            Parser,
            add_process_group_arguments,
            output_file,
            positive_number,
            process_group,
            whole_number,
        )
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--image-size", type=whole_number(8, 1024), help="pixels (default: 64 on CPU, 224 on CUDA)"
    )
    parser.add_argument(
        "--global-batch",
        type=whole_number(1),
        help="images per step (default: 64 on CPU, 512 on CUDA)",
    )
    parser.add_argument(
        "--scaling",
        choices=["strong", "weak"],
        default="strong",
        help="strong: the ranks share --global-batch; weak: each has so many, and lr grows with their number",
    )
    parser.add_argument("--epochs", type=whole_number(1), default=3, help="(default: 3)")
    parser.add_argument(
        "--steps-per-epoch",
        type=whole_number(1),
        help="end each epoch after so many (default: all)",
    )
    parser.add_argument(
        "--lr",
        type=positive_number,
        default=0.02,
        help="learning rate of one device (default: 0.02)",
    )
    parser.add_argument("--momentum", type=float, default=0.9, help="from 0 to below 1")
    parser.add_argument(
        "--warmup-epochs",
        type=whole_number(0),
        default=1,
        help="of the learning rate in weak scaling",
    )
    parser.add_argument("--amp", action="store_true", help="bfloat16 where autocast holds it safe")
    parser.add_argument(
        "--channels-last",
        action="store_true",
        help="keep images and weights in the memory format NHWC",
    )
    parser.add_argument("--seed", type=whole_number(0), default=0)
    parser.add_argument(
        "--workers",
        type=whole_number(0, 64),
        help="loading processes per rank (default: 0 on CPU, 4 on CUDA)",
    )
    parser.add_argument(
        "--threads",
        type=whole_number(1, 1024),
        help="per process (default: cores / ranks of this host)",
    )
    parser.add_argument(
        "--log-every",
        type=whole_number(1),
        default=5,
        metavar="STEPS",
        help="between progress lines",
    )
    parser.add_argument(
        "--no-sync",
        action="store_true",
        help="DDP without its all-reduces, to see their cost; no results",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="CIFAR-10 from this folder instead of the digits"
    )
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 into --data first")
    parser.add_argument(
        "--checkpoint",
        type=output_file,
        metavar="FILE",
        help="saved after each epoch, resumed from if there",
    )
    parser.add_argument(
        "--results",
        type=output_folder,
        metavar="DIR",
        default=str(folder.parent / "results"),
        help="where the JSON and the pictures go (default: results/ of the repository)",
    )
    add_process_group_arguments(parser)
    args = parser.parse_args()

    args.distributed = "RANK" in os.environ  # torchrun sets it
    if (
        not args.distributed
    ):  # a group of one, on a free port; it makes one code of both, and training does without it
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
        }
    world_size, on_cuda = (
        int(os.environ["WORLD_SIZE"]),
        args.device != "cpu" and torch.cuda.is_available(),
    )
    args.image_size = args.image_size or (224 if on_cuda else 64)
    args.global_batch = args.global_batch or (512 if on_cuda else 64)
    args.workers = (4 if on_cuda else 0) if args.workers is None else args.workers
    args.batch_per_rank = args.global_batch // (world_size if args.scaling == "strong" else 1)
    if args.lr == float("inf"):
        parser.error("argument --lr: 'inf' is not a finite number above 0")
    if not 0 <= args.momentum < 1:
        parser.error(f"argument --momentum: '{args.momentum}' is not a number from 0 to below 1")
    if args.scaling == "strong" and args.global_batch % world_size:
        parser.error(
            f"argument --global-batch: '{args.global_batch}' cannot be divided by {world_size} ranks; allowed are "
            f"multiples of {world_size}"
        )
    if args.batch_per_rank < 2:
        parser.error(
            f"argument --global-batch: '{args.global_batch}' is one image per rank, and BatchNorm needs at least two"
        )
    if args.no_sync and not args.distributed:
        parser.error(
            "argument --no-sync: a single device has nothing to leave out; start with torchrun"
        )
    if args.download and not args.data:
        parser.error("argument --download: needs --data DIR, the folder for CIFAR-10")

    with process_group(args) as device:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        about = environment(device)
        settings = {
            "data": "CIFAR-10" if args.data else "digits",
            "device": about["device"],
            "threads_per_rank": about["threads_per_rank"],
        } | {name: getattr(args, name) for name in SETTINGS}
        if dist.get_rank() == 0:
            what = f"DDP × {world_size} over {about['backend']}" if args.distributed else "single"
            print(
                "{}: torch {torch} on {device} ({device_name}), threads per process {threads_per_rank}; {} scaling, batch "
                "{world_size} × {}, {} pixels".format(
                    what, args.scaling, args.batch_per_rank, args.image_size, **about
                ),
                flush=True,
            )
        progress = fit(args, device, {"world_size": world_size, "scaling": args.scaling} | settings)
        if dist.get_rank() != 0:
            return
        images = progress["step"] * args.batch_per_rank * world_size
        result = {
            "stage": folder.name,
            "name": "ddp" if args.distributed else "single",
            **about,
            "scaling": args.scaling,
            "batch_per_rank": args.batch_per_rank,
            "settings": settings,
            "images_per_second": images / progress["train_seconds"],
            **progress,
        }
        rows = []
        for part in ("data", "compute", "batch"):
            ms = times(result, part)
            columns = [sum(ms) / world_size / 1000, statistics.fmean(ms), *percentiles(ms)]
            rows.append([part, *(f"{value:.1f}" for value in columns)])
        print_table(["", "total s", "mean ms", "p50", "p75", "p90", "p95"], rows)
        print(
            "{} images in {train_seconds:.2f} s: {images_per_second:.1f} images/s over all ranks; held-out accuracy {:.2%}".format(
                images, progress["evaluations"][-1]["accuracy"], **result
            ),
            flush=True,
        )
        if not args.no_sync:
            write_json(
                args.results
                / (f"07_ddp_{world_size}.json" if args.distributed else "07_single.json"),
                result,
            )
            compare(args.results)


if __name__ == "__main__":
    main()
