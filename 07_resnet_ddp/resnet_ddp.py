r"""07: ResNet-18 on one device against torch's DDP on N, and where the time goes.

The same script does both: started by torchrun it trains with DDP on that many ranks, started by
plain python it trains on a single device. As soon as the results of both are there, compare_runs.py
compares and draws them. The images come from images.py.

    make 07_resnet_ddp NPROC=2                          (single, then DDP, then the pictures)
    python 07_resnet_ddp/resnet_ddp.py --threads 1      (single)
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/resnet_ddp.py       (DDP)
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        07_resnet_ddp/resnet_ddp.py --checkpoint FILE        (DDP; restarts, see the README)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 \
        --master-port 29400 07_resnet_ddp/resnet_ddp.py      (two hosts; R is 0 on HOST0, else 1)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020; learning rate: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
2017, sections 2.1 and 2.2.
"""

import argparse
import copy
import os
import sys
import time
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def sharded_loaders(
    train_set: Dataset, test_set: Dataset, batch_size: int, seed: int, **options
) -> tuple[DataLoader, DataLoader]:
    """This rank's share of both sets, `batch_size` images at a time; `options` go to both loaders.

    The training order depends on the seed and the epoch alone, and rank r takes every world_size-th
    image of it from the r-th on. So the ranks' k-th batches together are the k-th batch of one
    device with a batch of world_size * batch_size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(train_set, world_size, rank, seed=seed, drop_last=True)
    train_batches = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
    # For evaluation a DistributedSampler would repeat images until the shares are equal, and those
    # would count twice.
    share = range(rank, len(test_set), world_size)
    test_batches = DataLoader(test_set, batch_size, sampler=share, **options)
    return train_batches, test_batches


def train(
    model: nn.Module, batches, optimizer, scheduler, device, stopwatch, amp=False, synchronize=True
):
    """Take one step per batch of (images, labels); yield its times, its loss and its accuracy.

    The times are a stopwatch(device) with the marks start, data, end; loss and accuracy are this
    rank's, on the device. Nothing here waits for a GPU: the marks are events in its stream, read by
    whoever wants the numbers, when convenient. With synchronize=False a DDP model leaves out its
    all-reduces (to see what they cost; the ranks then drift apart).
    """
    model.train()
    watch = stopwatch(device)
    watch.mark("start")
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        watch.mark("data")
        communication = nullcontext() if synchronize else model.no_sync()
        with communication:
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
def evaluate(model: nn.Module, batches, device: torch.device, amp: bool = False) -> dict:
    """Loss, accuracy and number of images over the batches of all ranks, equal on every rank.

    `model` is not the DDP wrapper but what it wraps: the wrapper's forward is a collective, and a
    rank with one batch more than the others would wait in it for ever.
    """
    model.eval()
    # Since the last forward each rank's running statistics went their own way.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.double(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return {"loss": loss / count, "accuracy": right / count, "images": int(count)}


def warm_up(model: nn.Module, image_size: int, device: torch.device) -> None:
    """One forward and backward on blank images; no trace in the weights, buffers and gradients.

    After its first backward DDP sorts its buckets anew, by the order in which gradients came. That
    order decides how an all-reduce of more than two ranks rounds. Done before training, it is the
    same in a run that starts and in one that resumes.
    """
    before = copy.deepcopy(model.state_dict())
    blank = torch.zeros(2, 3, image_size, image_size, device=device)
    model(blank).sum().backward()
    model.load_state_dict(before)
    model.zero_grad()


def save_checkpoint(path: Path, settings: dict, progress: dict, parts: dict, device) -> None:
    """Write all that the rest of the training depends on, after an epoch.

    `parts` are model, optimizer and scheduler by name. The file stands there whole, or not at all.
    The sampler's position is progress["epoch"]: with the seed, one of the settings, it gives the
    next order.
    """
    mine = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    random_states = [None] * dist.get_world_size()
    dist.all_gather_object(random_states, mine)
    if dist.get_rank() != 0:
        return
    checkpoint = {"settings": settings, "progress": progress, "random_states": random_states}
    for name, part in parts.items():
        checkpoint[name] = part.state_dict()
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())  # the bytes are on the disk before the name is, should power fail
    beside.replace(path)


def load_checkpoint(path: Path, settings: dict, parts: dict, device: torch.device) -> dict:
    """Restore on this rank what `save_checkpoint` wrote, and return its progress.

    ValueError if the settings were others; only the number of epochs may have changed.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in settings.items():
        written = checkpoint["settings"][name]
        if written != value and name != "epochs":
            raise ValueError(f"it was written with {name} {written}, not {value}")
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    random_states = checkpoint["random_states"][dist.get_rank()]
    torch.set_rng_state(random_states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(random_states["cuda"], device)
    return checkpoint["progress"]


# ==================================================================================================
# Below this line: building, an epoch, the report, the arguments, main.


def build_model(args, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """ResNet-18, and what to train: its DDP wrapper, or the network itself on a single device."""
    from torchvision.models import resnet18

    torch.manual_seed(args.seed)
    network = resnet18(num_classes=10).to(device)
    if args.channels_last:  # the first convolution turns the images round as well
        network = network.to(memory_format=torch.channels_last)
    if not args.distributed:
        return network, network
    # With views a gradient lies in its bucket from the start. find_unused_parameters stays off: it
    # would walk through the graph in every step, and ResNet uses all its parameters.
    devices = [device] if device.type == "cuda" else None
    return network, DistributedDataParallel(network, devices, gradient_as_bucket_view=True)


def build_optimizer(args, model: nn.Module, steps_per_epoch: int):
    """SGD and its schedule. Weak scaling: Goyal et al., a little more each step, up to N * lr."""
    factor = dist.get_world_size() if args.scaling == "weak" else 1
    warmup_steps = max(1, args.warmup_epochs * steps_per_epoch)

    def scale(step: int) -> float:
        return 1 + (factor - 1) * min(1.0, step / warmup_steps)

    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def restore(args, settings: dict, parts: dict, device: torch.device) -> dict:
    """The progress to go on from: the checkpoint's if any rank finds it, else that of a start."""
    from common.setup import fail

    exists = args.checkpoint is not None and args.checkpoint.exists()
    found = torch.tensor(float(exists), device=device)
    dist.all_reduce(found)
    if found == 0:
        return {"epoch": 0, "step": 0, "train_seconds": 0.0, "steps": [], "evaluations": []}
    try:
        progress = load_checkpoint(args.checkpoint, settings, parts, device)
        epoch = progress["epoch"]
        if epoch > args.epochs:
            raise ValueError(f"it is from after epoch {epoch}, and --epochs is {args.epochs}")
    except Exception as error:  # torch.load has many kinds: missing on this host, cut short
        reason = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"rank {dist.get_rank()} can resume from ({reason})"
        fail(f"argument --checkpoint: '{args.checkpoint}' is not one that {problem}")
    if dist.get_rank() == 0:
        print(f"resumed from {args.checkpoint} after epoch {epoch}", flush=True)
    return progress


def fit(args, device: torch.device, settings: dict, sets: tuple) -> dict:
    """Train, evaluating and saving after each epoch; returns what was measured, the progress."""
    from common.setup import fail
    from common.timing import Stopwatch

    options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
    train_batches, test_batches = sharded_loaders(*sets, args.batch_per_rank, args.seed, **options)
    steps = min(len(train_batches), args.steps_per_epoch or len(train_batches))
    if steps == 0:
        needed = args.batch_per_rank * dist.get_world_size()
        problem = f"needs {needed} training images a step, and there are {len(sets[0])}"
        fail(f"argument --global-batch: '{args.global_batch}' {problem}")

    network, model = build_model(args, device)
    optimizer, scheduler = build_optimizer(args, model, steps)
    warm_up(model, args.image_size, device)
    # From here on, what is random should differ between ranks.
    torch.manual_seed(args.seed + dist.get_rank())
    parts = {"model": network, "optimizer": optimizer, "scheduler": scheduler}
    progress = restore(args, settings, parts, device)

    for epoch in range(progress["epoch"] + 1, args.epochs + 1):
        train_batches.sampler.set_epoch(epoch)  # else every epoch has the same order
        batches = islice(train_batches, steps)
        sync = not args.no_sync
        outcomes = train(model, batches, optimizer, scheduler, device, Stopwatch, args.amp, sync)
        measure_epoch(outcomes, args, progress, epoch, steps, device)
        held_out = evaluate(network, test_batches, device, args.amp)
        progress["evaluations"].append(held_out)
        progress["epoch"] = epoch
        if dist.get_rank() == 0:
            line = "held out: loss {loss:.4f}, accuracy {accuracy:.2%} of {images} images"
            print(f"epoch {epoch} of {args.epochs} done,", line.format(**held_out), flush=True)
        if args.checkpoint:
            save_checkpoint(args.checkpoint, settings, progress, parts, device)
    return progress


def measure_epoch(outcomes, args, progress: dict, epoch: int, steps: int, device) -> None:
    """Run an epoch of `train`, with a progress line every --log-every steps; adds to `progress`."""
    global_batch = args.batch_per_rank * dist.get_world_size()
    samples = []
    unread = []
    dist.barrier()  # rank 0 may still be saving, and nobody's first batch should count that
    began = line_began = time.perf_counter()
    for step, outcome in enumerate(outcomes, 1):
        unread.append(outcome)
        if len(unread) < args.log_every and step < steps:
            continue
        samples += [read(*one) for one in unread]
        now = time.perf_counter()
        rate = global_batch * len(unread) / (now - line_began)
        done = progress["step"] + step
        seconds_per_step = (progress["train_seconds"] + now - began) / done
        seconds_left = seconds_per_step * (args.epochs * steps - done)
        place = f"epoch {epoch} step {step:3}/{steps}"
        print_progress(place, samples[-1], rate, seconds_left, device)
        unread = []
        line_began = time.perf_counter()
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, samples)
    for of_step in zip(*everyones, strict=True):  # by rank
        values = {name: [sample[name] for sample in of_step] for name in of_step[0]}
        progress["steps"].append(values)
    progress["step"] += steps
    progress["train_seconds"] += now - began


def read(watch, loss: torch.Tensor, accuracy: torch.Tensor) -> dict:
    """The numbers of a step that `train` yielded. Here, and only here, we wait for a GPU."""
    return {
        "data_seconds": watch.seconds("start", "data"),
        "compute_seconds": watch.seconds("data", "end"),
        "loss": loss.item(),
        "accuracy": accuracy.item(),
    }


def print_progress(place: str, sample: dict, rate: float, seconds_left: float, device) -> None:
    """Rank 0's times of a step; loss and accuracy over all ranks, so all have to call this."""
    over_ranks = torch.tensor([sample["loss"], sample["accuracy"]], device=device)
    dist.all_reduce(over_ranks)
    if dist.get_rank() != 0:
        return
    loss, accuracy = (over_ranks / dist.get_world_size()).tolist()
    data = 1000 * sample["data_seconds"]
    compute = 1000 * sample["compute_seconds"]
    print(
        f"{place}  data {data:.1f} ms  compute+sync {compute:.1f} ms  {rate:.1f} images/s  "
        f"loss {loss:.4f}  accuracy {accuracy:.1%}  ETA {seconds_left:.0f} s",
        flush=True,
    )


def print_report(result: dict, images: int) -> None:
    """Where the time of a batch went, over all steps of all ranks, and what came out."""
    from common import report

    steps = result["steps"]
    data = torch.tensor([step["data_seconds"] for step in steps], dtype=torch.float64)
    compute = torch.tensor([step["compute_seconds"] for step in steps], dtype=torch.float64)
    rows = []
    for name, seconds in (("data", data), ("compute", compute), ("batch", data + compute)):
        total = seconds.sum() / result["world_size"]
        cells = report.milliseconds(seconds.flatten().tolist())
        rows.append([name, f"{total:.1f}", f"{1000 * seconds.mean():.1f}", *cells])
    report.print_table(["", "total s", "mean ms", "p50", "p75", "p90", "p95"], rows)
    accuracy = result["evaluations"][-1]["accuracy"]
    speed = "{train_seconds:.2f} s: {images_per_second:.1f} images/s over all ranks; held-out"
    print(f"{images} images in", speed.format(**result), f"accuracy {accuracy:.2%}", flush=True)


def output_folder(text: str) -> Path:
    """A type for argparse: a folder that can be written to; it is made if it is not there."""
    try:
        Path(text or os.devnull).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder ({error.strerror})") from None
    if not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not writable")
    return Path(text)


def add_arguments(parser, results: Path) -> None:
    from common.setup import add_process_group_arguments, output_file, positive_number, whole_number

    add = parser.add_argument
    whole = whole_number
    add("--image-size", type=whole(8, 1024), help="pixels (default: 64 on CPU, 224 on CUDA)")
    add("--global-batch", type=whole(1), help="images per step (default: 64 on CPU, 512 on CUDA)")
    scaling = "strong: the ranks share --global-batch; "
    scaling += "weak: each has so many, and lr grows with their number"
    add("--scaling", choices=["strong", "weak"], default="strong", help=scaling)
    add("--epochs", type=whole(1), default=3, help="(default: 3)")
    add("--steps-per-epoch", type=whole(1), help="end each epoch after so many (default: all)")
    rate = "learning rate of one device (default: 0.02)"
    add("--lr", type=positive_number, default=0.02, help=rate)
    add("--momentum", type=float, default=0.9, help="from 0 to below 1")
    add("--warmup-epochs", type=whole(0), default=1, help="of the learning rate in weak scaling")
    add("--amp", action="store_true", help="bfloat16 where autocast holds it safe")
    layout = "keep images and weights in the memory format NHWC"
    add("--channels-last", action="store_true", help=layout)
    add("--seed", type=whole(0), default=0)
    workers = "loading processes per rank (default: 0 on CPU, 4 on CUDA)"
    add("--workers", type=whole(0, 64), help=workers)
    add("--threads", type=whole(1, 1024), help="per process (default: cores / ranks of this host)")
    add("--log-every", type=whole(1), default=5, metavar="STEPS", help="between progress lines")
    no_sync = "DDP without its all-reduces, to see their cost; no results"
    add("--no-sync", action="store_true", help=no_sync)
    add("--data", metavar="DIR", help="CIFAR-10 from this folder instead of the digits")
    add("--download", action="store_true", help="fetch CIFAR-10 into --data first")
    saved = "saved after each epoch, resumed from if there"
    add("--checkpoint", type=output_file, metavar="FILE", help=saved)
    where = "where the JSON and the pictures go (default: results/ of the repository)"
    add("--results", type=output_folder, metavar="DIR", default=str(results), help=where)
    add_process_group_arguments(parser)


def complete(args, parser, world_size: int) -> None:
    """Fill in the defaults that depend on the device, and refuse what does not go together."""
    on_cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.image_size is None:
        args.image_size = 224 if on_cuda else 64
    if args.global_batch is None:
        args.global_batch = 512 if on_cuda else 64
    if args.workers is None:
        args.workers = 4 if on_cuda else 0
    ranks = world_size if args.scaling == "strong" else 1  # that share --global-batch
    args.batch_per_rank = args.global_batch // ranks
    flag = f"argument --global-batch: '{args.global_batch}'"
    if args.lr == float("inf"):
        parser.error("argument --lr: 'inf' is not a finite number above 0")
    if not 0 <= args.momentum < 1:
        parser.error(f"argument --momentum: '{args.momentum}' is not a number from 0 to below 1")
    if args.global_batch % ranks:
        parser.error(f"{flag} cannot be divided by {ranks} ranks; allowed are multiples of {ranks}")
    if args.batch_per_rank < 2:
        parser.error(f"{flag} is one image per rank, and BatchNorm needs at least two")
    if args.no_sync and not args.distributed:
        problem = "a single device has nothing to leave out; start with torchrun"
        parser.error(f"argument --no-sync: {problem}")
    if args.download and not args.data:
        parser.error("argument --download: needs --data DIR, the folder for CIFAR-10")


# What two runs need in common to be compared, and a run with the checkpoint it resumes from.
SETTINGS = """epochs image_size global_batch steps_per_epoch lr momentum warmup_epochs
    amp channels_last workers seed""".split()


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from images import load_images

        from common import report, setup
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/ and 07_resnet_ddp/images.py"
        sys.exit(f"error: {error}: copy {needed} into {folder}")

    parser = setup.Parser(__doc__)
    add_arguments(parser, folder.parent / "results")
    args = parser.parse_args()
    args.distributed = "RANK" in os.environ  # torchrun sets it
    if not args.distributed:
        # A group of one, on a free port: it makes one code of both, and training does without it.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    world_size = int(os.environ["WORLD_SIZE"])
    complete(args, parser, world_size)

    with setup.process_group(args) as device:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        about = report.environment(device)
        threads = about["threads_per_rank"]
        name = what = "single"
        file = "07_single.json"
        if args.distributed:
            name = "ddp"
            what = f"DDP × {world_size} over {about['backend']}"
            file = f"07_ddp_{world_size}.json"
        if dist.get_rank() == 0:
            where = "torch {torch} on {device} ({device_name})".format(**about)
            where += f", threads per process {threads}"
            batch = f"batch {world_size} × {args.batch_per_rank}, {args.image_size} pixels"
            print(f"{what}: {where}; {args.scaling} scaling, {batch}", flush=True)

        data = "CIFAR-10" if args.data else "digits"
        settings = {"data": data, "device": about["device"], "threads_per_rank": threads}
        settings |= {setting: getattr(args, setting) for setting in SETTINGS}
        run = {"world_size": world_size, "scaling": args.scaling}
        sets = load_images(args.data, args.download, args.image_size)
        progress = fit(args, device, run | settings, sets)
        if dist.get_rank() != 0:
            return
        images = progress["step"] * args.batch_per_rank * world_size
        result = {"stage": folder.name, "name": name, **about}
        result |= {"scaling": args.scaling, "batch_per_rank": args.batch_per_rank}
        result |= {"settings": settings, "images_per_second": images / progress["train_seconds"]}
        result |= progress
        print_report(result, images)
        if args.no_sync:
            return
        report.write_json(args.results / file, result)
        if (folder / "compare_runs.py").exists():
            from compare_runs import compare

            compare(args.results)
        else:
            print(f"no comparison and no pictures: compare_runs.py is not in {folder}", flush=True)


if __name__ == "__main__":
    main()
